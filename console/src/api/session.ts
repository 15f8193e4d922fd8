// Who is signed in. Credentials are in sessionStorage only: they end with the tab, other sites never see them, and no
// request carries them unless this page adds the header. So a foreign page cannot make requests in our name. A new tab of
// this origin takes the session over from an open one (`tabs.ts`).
import { randomId } from "../lib/ids";
import { createStore } from "../lib/store";
import type { Caller } from "./types";

export interface Credentials {
  /** The same in all tabs of a session. */
  session: string;
  /** An API key, a portal token or an access token. */
  bearer: string;
  /** Present in the tab where a user signed in with a password. It can be used once, so no other tab gets it. */
  refreshToken?: string;
  /** When the access token of a user has to be replaced, in milliseconds since 1970. */
  refreshAt?: number;
}

const CREDENTIALS_KEY = "pillarbox.credentials";
const TENANT_KEY = "pillarbox.tenant";

const DAMAGED_LINK = "This portal link is not complete. Copy all of it, or ask its sender for a new one.";
const REFUSED_LINK = "This portal link has expired or was revoked. Ask its sender for a new one.";
/** Portal tokens begin with this. */
const PORTAL_PREFIX = "pbxp_";

/** Why the last session ended, for the sign-in page. */
export const signOutReason = createStore("");
export const credentials = createStore<Credentials | null>(readCredentials());
export const caller = createStore<Caller | null>(null);
/** The session that the user has ended last in this tab; the other tabs also end it. */
export const signedOut = createStore("");
/** The tenant that an operator acts for; empty for the caller's own. */
export const actingTenant = createStore(sessionStorage.getItem(TENANT_KEY) ?? "");

/** What a request acts for. A sequence of requests passes one scope to all of them, so that it cannot change sides. */
export interface RequestScope {
  /** Aborted when the session ends; a later session has another signal, even with the same credentials. */
  sessionEnded: AbortSignal;
  tenant: string;
}

let sessionEnd = new AbortController();

export function currentScope(): RequestScope {
  return { sessionEnded: sessionEnd.signal, tenant: actingTenant.get() };
}

/** Begins a separate session in this tab. */
export function beginSession(found: Omit<Credentials, "session">): void {
  saveCredentials({ ...found, session: randomId() });
}

export function saveCredentials(next: Credentials): void {
  sessionStorage.setItem(CREDENTIALS_KEY, JSON.stringify(next));
  signOutReason.set("");
  credentials.set(next);
}

/** Ends the session at the user's request: in all tabs, and on the server if the user signed in with a password. */
export function signOut(): void {
  const ended = credentials.get();
  if (ended?.refreshAt !== undefined) revoke(ended.bearer);
  endSession();
  if (ended !== null) signedOut.set(ended.session);
}

/** Ends a session that the server no longer accepts. `reason` is shown on the sign-in page, unless a portal link began the session. */
export function refuseSession(reason: string): void {
  endSession(credentials.get()?.bearer.startsWith(PORTAL_PREFIX) ? REFUSED_LINK : reason);
}

/** Ends the session. `reason` is shown on the sign-in page. */
export function endSession(reason = ""): void {
  sessionStorage.removeItem(CREDENTIALS_KEY);
  sessionStorage.removeItem(TENANT_KEY);
  actingTenant.set("");
  caller.set(null);
  signOutReason.set(reason);
  credentials.set(null);
  const ended = sessionEnd;
  sessionEnd = new AbortController();
  ended.abort();
}

/** Revokes the session of an access token on the server. Best effort: without a response the session expires by itself. */
export function revoke(accessToken: string): void {
  const headers = { authorization: `Bearer ${accessToken}` };
  fetch("/identity/v1/logout", { method: "POST", headers, credentials: "omit", keepalive: true }).catch(() => {});
}

export function actForTenant(tenant: string): void {
  sessionStorage.setItem(TENANT_KEY, tenant);
  actingTenant.set(tenant);
}

/** The tenant whose data the pages of the hub show. */
export function shownTenant(): string {
  return actingTenant.get() || (caller.get()?.tenant ?? "main");
}

function readCredentials(): Credentials | null {
  const fromAddress = tokenInAddress();
  if (fromAddress !== null) {
    const found = { session: randomId(), bearer: fromAddress };
    sessionStorage.setItem(CREDENTIALS_KEY, JSON.stringify(found));
    sessionStorage.removeItem(TENANT_KEY);
    return found;
  }
  const saved = sessionStorage.getItem(CREDENTIALS_KEY);
  return saved === null ? null : parseCredentials(saved);
}

/** Returns null if the stored text is damaged: the user signs in again. */
function parseCredentials(saved: string): Credentials | null {
  try {
    const found = JSON.parse(saved) as Credentials | null;
    return typeof found?.bearer === "string" && typeof found.session === "string" ? found : null;
  } catch {
    return null;
  }
}

/**
 * A portal link has the token in the fragment, which browsers send to no server. It is removed from the address at once.
 * Returns null if there is no token, or if its encoding is damaged, which the sign-in page then says.
 */
function tokenInAddress(): string | null {
  const match = /^#token=([^&]*)/.exec(location.hash);
  if (match === null) return null;
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  try {
    const token = decodeURIComponent(match[1]!);
    if (token.startsWith(PORTAL_PREFIX)) return token;
  } catch {
    // The encoding is damaged.
  }
  signOutReason.set(DAMAGED_LINK);
  return null;
}

// A portal link that is opened in a tab which already shows the console changes the fragment only: nothing is loaded again.
// The listener is in the capture phase, so that the router reads the address after the token has been removed.
window.addEventListener("hashchange", () => {
  const token = tokenInAddress();
  if (token === null) return;
  signOut();
  beginSession({ bearer: token });
}, { capture: true });
