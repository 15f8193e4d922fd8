import { useEffect, useState } from "preact/hooks";
import { ApiError, api } from "./api/client";
import { actForTenant, actingTenant, caller, credentials, currentScope, signOut } from "./api/session";
import { ErrorBox, Skeleton } from "./components/async";
import { QuestionHost, dismissQuestion } from "./components/dialog";
import { Page } from "./components/basics";
import { Shell } from "./components/shell";
import { Toasts } from "./components/toasts";
import { toApiError } from "./lib/live";
import { link, setQuery, useRoute } from "./lib/router";
import { useStore } from "./lib/store";
import { PAGES } from "./pages";
import { SignIn } from "./pages/sign-in";

export function App() {
  const session = useStore(credentials);
  const signedIn = useStore(caller);
  const [error, setError] = useState<ApiError>();

  const identify = () => {
    setError(undefined);
    const scope = currentScope();
    // A late answer of a former session must not decide what the current one sees.
    const ifCurrent = (act: () => void) => scope.sessionEnded.aborted || act();
    api.get("/hub/v1/caller", { scope }).then(
      (found) => ifCurrent(() => caller.set(found)),
      (cause) => ifCurrent(() => setError(toApiError(cause))),
    );
  };
  useEffect(() => {
    if (caller.get() !== null) return;
    // A question of the former session must not be answered in this one.
    dismissQuestion();
    if (session !== null) identify();
  }, [session]);

  return (
    <>
      {session === null ? <SignIn /> : signedIn === null ? <Connecting error={error} onRetry={identify} /> : <CurrentPage />}
      <QuestionHost />
      <Toasts />
    </>
  );
}

function Connecting({ error, onRetry }: { error: ApiError | undefined; onRetry: () => void }) {
  if (error === undefined) return <Skeleton />;
  return (
    <main class="sign-in">
      <div class="card"><div class="card-body stack">
        <h1>Sign-in failed</h1>
        <ErrorBox error={error} onRetry={onRetry} />
        <button type="button" class="button" onClick={() => signOut()}>Use other credentials</button>
      </div></div>
    </main>
  );
}

function CurrentPage() {
  const { parts, query } = useRoute();
  const tenant = useStore(actingTenant);
  const signedIn = useStore(caller);
  const [path = "", ...rest] = parts;
  // The address names the tenant. The page is shown when the tenant is chosen, so that nothing is loaded before.
  const mayAct = signedIn !== null && signedIn.is_operator && signedIn.kind === "key";
  const named = query.get("tenant");
  const wanted = !mayAct || named === null ? tenant : named === signedIn.tenant ? "" : named;
  useEffect(() => {
    if (wanted !== tenant) actForTenant(wanted);
    else if (mayAct && named === null && tenant !== "") setQuery({});
  }, [wanted, tenant, named, mayAct]);
  if (wanted !== tenant) return null;
  const entry = PAGES.find((page) => page.path === path && signedIn !== null && page.isFor(signedIn));
  return (
    <Shell currentPath={path}>
      {entry === undefined
        ? <Page title="This page does not exist"><p>It may need other permissions. <a href={link()}>Go to the overview</a>.</p></Page>
        // Another tenant or another object is another page: nothing of the previous one may stay on screen.
        : <entry.component key={`${tenant} ${parts.join("/")}`} parts={rest} query={query} />}
    </Shell>
  );
}
