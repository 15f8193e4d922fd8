// One session in several tabs. Credentials are in the memory and the sessionStorage of each tab, so a tab that is opened from
// a link begins without them: it asks the tabs that are open. Only pages of this origin hear each other on the channel.
import { randomId } from "../lib/ids";
import { refreshIfNeeded } from "./refresh";
import { actForTenant, actingTenant, credentials, endSession, saveCredentials, signOutReason, signedOut, type Credentials } from "./session";

/** A new tab waits this long for the first answer, and this long for others after it. */
const FIRST_ANSWER_MS = 400;
const OTHER_ANSWERS_MS = 40;
const ACCESS_TOKEN_MS = 3_000;

type Shared = Omit<Credentials, "refreshToken">;
type Message =
  | { kind: "who-is-signed-in"; asker: string }
  | { kind: "signed-in"; asker: string; shared: Shared; tenant: string; usedAt: number }
  | { kind: "access-token-wanted"; session: string }
  | { kind: "access-token"; shared: Shared }
  | { kind: "signed-out"; session: string };
type Answer = Extract<Message, { kind: "signed-in" }>;

// A page in a frame neither asks nor answers, nor does a window that another page has opened: that page may be of another site.
const channel = window.top === window && window.opener === null ? new BroadcastChannel("pillarbox.session") : null;
let usedAt = Date.now();

/** Takes over the session of another tab if this one has none, that of the tab which was used last. */
export async function takeOverSession(): Promise<void> {
  // The sign-in page says why a portal link does not work; another session must not hide that.
  if (channel === null || credentials.get() !== null || signOutReason.get() !== "") return;
  const answers = await collectAnswers(randomId());
  const latest = answers.sort((one, other) => other.usedAt - one.usedAt)[0];
  if (latest === undefined || credentials.get() !== null) return;
  actForTenant(latest.tenant);
  saveCredentials(latest.shared);
}

function collectAnswers(asker: string): Promise<Answer[]> {
  return new Promise((resolve) => {
    const answers: Answer[] = [];
    const stopListening = listen((message) => {
      if (message.kind !== "signed-in" || message.asker !== asker) return;
      answers.push(message);
      if (answers.length === 1) window.setTimeout(finish, OTHER_ANSWERS_MS);
    });
    const finish = () => {
      stopListening();
      resolve(answers);
    };
    window.setTimeout(finish, FIRST_ANSWER_MS);
    send({ kind: "who-is-signed-in", asker });
  });
}

/** Waits until another tab has replaced the access token. Returns false if no tab can. */
export function askForAccessToken({ session }: Credentials): Promise<boolean> {
  return new Promise((resolve) => {
    const finish = (isAnswered: boolean) => {
      stopListening();
      resolve(isAnswered);
    };
    // The new token is saved by the listener that hears it in every tab, which is older than this one.
    const stopListening = listen((message) => {
      if (message.kind === "access-token" && message.shared.session === session) finish(true);
    });
    window.setTimeout(() => finish(false), ACCESS_TOKEN_MS);
    send({ kind: "access-token-wanted", session });
  });
}

/** Gives the other tabs of the session a new access token. */
export function shareAccessToken(next: Credentials): void {
  send({ kind: "access-token", shared: withoutRefreshToken(next) });
}

function withoutRefreshToken({ session, bearer, refreshAt }: Credentials): Shared {
  return { session, bearer, refreshAt };
}

function answer(message: Message): void {
  const current = credentials.get();
  if (current === null) return;
  switch (message.kind) {
    case "who-is-signed-in":
      return send({ kind: "signed-in", asker: message.asker, shared: withoutRefreshToken(current), tenant: actingTenant.get(), usedAt });
    case "access-token-wanted":
      if (message.session !== current.session || current.refreshToken === undefined) return;
      return void refreshIfNeeded().then((isUsable) => {
        const latest = credentials.get();
        if (isUsable && latest?.session === message.session) shareAccessToken(latest);
      });
    case "access-token":
      // A duplicated tab has a copy of the refresh token, which was used for this access token.
      if (message.shared.session === current.session) saveCredentials(message.shared);
      return;
    case "signed-out":
      if (message.session === current.session) endSession("You have signed out in another tab.");
      return;
    case "signed-in":
      return;
  }
}

function listen(onMessage: (message: Message) => void): () => void {
  const listener = (event: MessageEvent<Message>) => onMessage(event.data);
  channel?.addEventListener("message", listener);
  return () => channel?.removeEventListener("message", listener);
}

function send(message: Message): void {
  channel?.postMessage(message);
}

listen(answer);
signedOut.subscribe(() => send({ kind: "signed-out", session: signedOut.get() }));
for (const kind of ["pointerdown", "keydown"]) window.addEventListener(kind, () => (usedAt = Date.now()), { capture: true });
