// Access tokens of users last for minutes. The refresh token is replaced with each use, and the server ends the session if
// one is used twice. So one tab has it, and uses it in one request at a time; the other tabs ask that tab for access tokens.
import { credentials, endSession, revoke, saveCredentials, type Credentials } from "./session";
import { askForAccessToken, shareAccessToken } from "./tabs";

/** The token is replaced this long before it expires. */
const MARGIN_MS = 30_000;

/** Statuses that refuse the refresh token for good. */
const REFUSED = [400, 401, 403];
const LOST_SESSION = "Your session has ended with the tab in which you signed in. Sign in again.";

let running: { token: string; done: Promise<void> } | null = null;

export function fromTokens(tokens: { access_token: string; refresh_token: string; expires_in: number }): Omit<Credentials, "session"> {
  const refreshAt = Date.now() + tokens.expires_in * 1000 - MARGIN_MS;
  return { bearer: tokens.access_token, refreshToken: tokens.refresh_token, refreshAt };
}

/**
 * Replaces the access token of a user who signed in with a password, if it expires soon. Returns false if the token has
 * expired and could not be replaced for now: a request with it would be refused, and that would end the session.
 */
export async function refreshIfNeeded(): Promise<boolean> {
  const session = credentials.get();
  if (session?.refreshAt === undefined || session.refreshAt > Date.now()) return true;
  const token = session.refreshToken ?? session.bearer;
  if (running?.token !== token) running = { token, done: session.refreshToken === undefined ? borrow(session) : refresh(session, token) };
  const started = running;
  await started.done;
  if (running === started) running = null;
  const current = credentials.get();
  return current?.refreshAt === undefined || current.refreshAt + MARGIN_MS > Date.now();
}

/** Asks the tab that has the refresh token. If there is none, the session ends with the access token. */
async function borrow(session: Credentials): Promise<void> {
  const isAnswered = await askForAccessToken(session);
  const isExpired = (session.refreshAt ?? 0) + MARGIN_MS <= Date.now();
  if (!isAnswered && isExpired && credentials.get() === session) endSession(LOST_SESSION);
}

async function refresh(session: Credentials, token: string): Promise<void> {
  const response = await fetch("/identity/v1/refresh", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ refresh_token: token }),
    credentials: "omit",
  }).catch(() => null);
  // Any other failure (no response, 429, 5xx) says nothing about the token: the next request tries again.
  const isRefused = response !== null && REFUSED.includes(response.status);
  if (isRefused && credentials.get() === session) return endSession("Your session has ended. Sign in again.");
  if (response === null || !response.ok) return;
  const tokens = (await response.json().catch(() => null)) as Parameters<typeof fromTokens>[0] | null;
  if (tokens === null) return;
  // The user may have signed out in the meantime: the new token must not sign in again.
  if (credentials.get() !== session) return revoke(tokens.access_token);
  const next = { ...fromTokens(tokens), session: session.session };
  saveCredentials(next);
  shareAccessToken(next);
}
