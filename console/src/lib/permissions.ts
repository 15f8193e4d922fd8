import { caller } from "../api/session";
import { useStore } from "./store";

/** Whether the caller may change something of its tenant. */
export function useMayManage(): boolean {
  const signedIn = useStore(caller);
  return signedIn !== null && !signedIn.read_only;
}

/** Whether the caller may change event types: they describe what the producer posts, so portal tokens may not. */
export function useMayChangeEventTypes(): boolean {
  const signedIn = useStore(caller);
  return signedIn !== null && !signedIn.read_only && signedIn.kind !== "portal_token";
}

/** Whether the caller may post events: keys may, portal tokens and users may not. */
export function useMayPost(): boolean {
  const signedIn = useStore(caller);
  return signedIn !== null && signedIn.kind === "key" && !signedIn.read_only;
}
