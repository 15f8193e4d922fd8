// Access tokens of users last for minutes. The refresh token is replaced with each use, so only one request may use it.
import { credentials, saveCredentials, signOut, type Credentials } from "./session";

/** The token is replaced this long before it expires. */
const MARGIN_MS = 30_000;

let running: Promise<void> | null = null;

export function fromTokens(tokens: { access_token: string; refresh_token: string; expires_in: number }): Credentials {
  const refreshAt = Date.now() + tokens.expires_in * 1000 - MARGIN_MS;
  return { bearer: tokens.access_token, refreshToken: tokens.refresh_token, refreshAt };
}

/** Replaces the access token of a user who signed in with a password, if it expires soon. */
export async function refreshIfNeeded(): Promise<void> {
  const session = credentials.get();
  if (session?.refreshToken === undefined || (session.refreshAt ?? 0) > Date.now()) return;
  running ??= refresh(session.refreshToken).finally(() => (running = null));
  await running;
}

async function refresh(token: string): Promise<void> {
  const response = await fetch("/identity/v1/refresh", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ refresh_token: token }),
    credentials: "omit",
  }).catch(() => null);
  // Without a response the token may still be valid: the next request tries again.
  if (response === null || response.status >= 500) return;
  if (!response.ok) return signOut("Your session has ended. Sign in again.");
  saveCredentials(fromTokens((await response.json()) as Parameters<typeof fromTokens>[0]));
}
