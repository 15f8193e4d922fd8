import { api } from "../api/client";
import { useLive } from "../lib/live";
import { OPTIONS_MAX, SearchSelect, type Found } from "./search-select";

async function loadSubscribers(q: string, signal: AbortSignal): Promise<Found> {
  const page = await api.get("/hub/v1/subscribers", { query: { q: q || undefined, limit: OPTIONS_MAX }, signal });
  return { options: page.items.map(({ id, name }) => ({ value: id, label: name })), hasMore: Boolean(page.next_cursor) };
}

interface SubscriberFieldProps {
  value: string;
  onChange: (id: string) => void;
  error?: string;
  /** The label of no choice. */
  all?: string;
}

/** The choice of a subscriber of the tenant, or of all of them. */
export function SubscriberField({ value, onChange, error, all = "All subscribers" }: SubscriberFieldProps) {
  const name = useSubscriberName(value);
  return <SearchSelect label="Subscriber" name="subscribers" load={loadSubscribers} value={value} valueLabel={name} all={all} onChange={onChange} error={error} />;
}

/** The name of one subscriber; undefined while it is loaded, and if it was deleted. */
export function useSubscriberName(id: string): string | undefined {
  const live = useLive(`subscriber-name ${id}`, async (signal) =>
    id === "" ? undefined : (await api.get("/hub/v1/subscribers/{id}", { path: { id }, signal })).name);
  return live.data;
}
