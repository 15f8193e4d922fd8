import { useEffect, useState } from "preact/hooks";
import { api } from "../api/client";
import { fromTokens } from "../api/refresh";
import { beginSession, signOutReason } from "../api/session";
import { Notice } from "../components/basics";
import { FormError, TextField, useAction } from "../components/form";
import { Logo } from "../components/icon";
import { brandName } from "../lib/brand";
import { useStore } from "../lib/store";

export function SignIn() {
  const name = useStore(brandName);
  const reason = useStore(signOutReason);
  const [isUser, setUser] = useState(false);
  useEffect(() => {
    document.title = `Sign in · ${name} console`;
  }, [name]);
  return (
    <main class="sign-in">
      <div class="card">
        <div class="card-body stack">
          <div class="row"><Logo /><h1>{name} console</h1></div>
          {reason !== "" && <Notice tone="warn">{reason}</Notice>}
          {isUser ? <UserForm /> : <KeyForm />}
          <button type="button" class="button quiet" onClick={() => setUser(!isUser)}>
            {isUser ? "Sign in with a key or a token" : "Sign in with e-mail and password"}
          </button>
        </div>
      </div>
    </main>
  );
}

function KeyForm() {
  const [key, setKey] = useState("");
  const submit = (event: Event) => {
    event.preventDefault();
    beginSession({ bearer: key.trim() });
  };
  return (
    <form class="form" onSubmit={submit}>
      <TextField label="API key or portal token" type="password" required autocomplete="off" value={key} onChange={setKey}
        hint="An admin key shows everything. A manage key or a portal token shows its own tenant. It is stored until you close the tabs of the console." />
      <button type="submit" class="button primary" disabled={key.trim() === ""}>Sign in</button>
    </form>
  );
}

function UserForm() {
  const [email, setEmail] = useState("");
  const [password, setPassword] = useState("");
  const action = useAction();
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => beginSession(fromTokens(await api.post("/identity/v1/login", { body: { email, password } }))));
  };
  return (
    <form class="form" onSubmit={submit}>
      <FormError action={action} shown={["/email", "/password"]} />
      <TextField label="E-mail" type="email" required autocomplete="username" value={email} onChange={setEmail} error={action.errorOf("/email")} />
      <TextField label="Password" type="password" required autocomplete="current-password" value={password} onChange={setPassword}
        error={action.errorOf("/password")} hint="Your account needs the role admin." />
      <button type="submit" class="button primary" disabled={action.isBusy}>Sign in</button>
    </form>
  );
}
