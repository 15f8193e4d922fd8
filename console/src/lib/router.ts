// Routes are in the fragment of the address (`/console/#/subscribers/1?tab=health`), so the server serves one page.
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

export function navigate(to: string): void {
  location.hash = to;
}

/** Replaces one parameter of the query without an entry in the browser's history. An empty value removes it. */
export function setQuery(changes: Record<string, string>): void {
  const { parts, query } = parse(location.hash);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "") query.delete(name);
    else query.set(name, value);
  }
  const search = query.toString();
  history.replaceState(null, "", link(...parts) + (search === "" ? "" : `?${search}`));
  current.set(parse(location.hash));
}

/** The address of a page: `link("subscribers", id)` is `#/subscribers/…`. */
export function link(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
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
