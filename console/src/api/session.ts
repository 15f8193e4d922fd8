// Who is signed in. Credentials are in sessionStorage only: they end with the tab, other tabs and other sites never see
// them, and no request carries them unless this page adds the header. So a foreign page cannot make requests in our name.
import { createStore } from "../lib/store";
import type { Caller } from "./types";

export interface Credentials {
  /** An API key, a portal token or an access token. */
  bearer: string;
  /** Present for a user who signed in with a password; each one can be used once. */
  refreshToken?: string;
  /** When the access token has to be replaced, in milliseconds since 1970. */
  refreshAt?: number;
}

const CREDENTIALS_KEY = "pillarbox.credentials";
const TENANT_KEY = "pillarbox.tenant";

export const credentials = createStore<Credentials | null>(readCredentials());
export const caller = createStore<Caller | null>(null);
/** The tenant that an operator acts for; empty for the caller's own. */
export const actingTenant = createStore(sessionStorage.getItem(TENANT_KEY) ?? "");
/** Why the last session ended, for the sign-in page. */
export const signOutReason = createStore("");

export function saveCredentials(next: Credentials): void {
  sessionStorage.setItem(CREDENTIALS_KEY, JSON.stringify(next));
  signOutReason.set("");
  credentials.set(next);
}

export function signOut(reason = ""): void {
  sessionStorage.removeItem(CREDENTIALS_KEY);
  sessionStorage.removeItem(TENANT_KEY);
  actingTenant.set("");
  caller.set(null);
  signOutReason.set(reason);
  credentials.set(null);
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
    const found = { bearer: fromAddress };
    sessionStorage.setItem(CREDENTIALS_KEY, JSON.stringify(found));
    sessionStorage.removeItem(TENANT_KEY);
    return found;
  }
  const saved = sessionStorage.getItem(CREDENTIALS_KEY);
  return saved === null ? null : (JSON.parse(saved) as Credentials);
}

/** A portal link has the token in the fragment, which browsers send to no server. It is removed from the address at once. */
function tokenInAddress(): string | null {
  const match = /^#token=([^&]+)/.exec(location.hash);
  if (match === null) return null;
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  return decodeURIComponent(match[1]!);
}
