// Routes are in the fragment of the address (`/console/#/subscribers/1?tab=health`), so the server serves one page. While an
// operator acts for a tenant, every address names it (`?tenant=acme`), so that a copied link opens the same page.
import { actForTenant, actingTenant } from "../api/session";
import { createStore, useStore } from "./store";

export interface Route {
  /** The decoded parts of the path: `["subscribers", "1"]`. */
  parts: string[];
  query: URLSearchParams;
}

const current = createStore<Route>(parse(location.hash));
window.addEventListener("hashchange", () => current.set(parse(location.hash)));

export function useRoute(): Route {
  return useStore(current);
}

/** Opens an address that `link` has made. */
export function navigate(to: string): void {
  location.hash = to;
  // At once, not with the event: what changed together with the address, such as the tenant, is shown together with it.
  current.set(parse(location.hash));
}

/** Acts for another tenant, or for the caller's own if it is empty, on the page that is open. */
export function switchTenant(tenant: string): void {
  actForTenant(tenant);
  setQuery({});
}

/** Replaces parameters of the query without an entry in the browser's history. An empty value removes one. */
export function setQuery(changes: Record<string, string>): void {
  const { parts, query } = parse(location.hash);
  query.delete("tenant");
  history.replaceState(null, "", linkWithQuery({ ...Object.fromEntries(query), ...changes }, ...parts));
  current.set(parse(location.hash));
}

/** The address of a page: `link("subscribers", id)` is `#/subscribers/…`. */
export function link(...parts: string[]): string {
  return linkWithQuery({}, ...parts);
}

/** The address of a page with parameters. Those that are empty are left out. */
export function linkWithQuery(parameters: Record<string, string>, ...parts: string[]): string {
  const query = new URLSearchParams(Object.entries({ tenant: actingTenant.get(), ...parameters }).filter(([, value]) => value !== ""));
  const search = query.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${search === "" ? "" : `?${search}`}`;
}

function parse(hash: string): Route {
  const [path = "", search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter((part) => part !== "").map(decode);
  return { parts, query: new URLSearchParams(search) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
