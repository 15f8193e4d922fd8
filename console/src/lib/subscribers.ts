import { api } from "../api/client";
import { useLive } from "./live";

const REFRESH_MS = 30_000;

/** The names of the tenant's first 100 subscribers by id, for lists that contain ids only. */
export function useSubscriberNames(): Map<string, string> {
  const live = useLive("subscriber-names", (signal) => api.get("/hub/v1/subscribers", { query: { limit: 100 }, signal }), REFRESH_MS);
  return new Map((live.data?.items ?? []).map((subscriber) => [subscriber.id, subscriber.name]));
}

export function subscriberOptions(names: Map<string, string>, all: string): { value: string; label: string }[] {
  return [{ value: "", label: all }, ...[...names].map(([value, label]) => ({ value, label }))];
}
