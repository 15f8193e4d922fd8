// When dead letters were given up: a filter, and the range of a selection in a question.
import type { ComponentChildren } from "preact";
import { setQuery } from "../lib/router";
import { Time } from "./basics";
import { SelectField } from "./form";

const HOUR_MS = 3_600_000;
const PERIODS = [
  { value: "", label: "At any time", hours: 0 },
  { value: "1h", label: "In the last hour", hours: 1 },
  { value: "24h", label: "In the last 24 hours", hours: 24 },
  { value: "7d", label: "In the last 7 days", hours: 168 },
];

export interface GivenUpPeriod {
  /** In the address. */
  value: string;
  hours: number;
}

export function givenUpPeriod(query: URLSearchParams): GivenUpPeriod {
  return PERIODS.find(({ value }) => value === query.get("given_up")) ?? PERIODS[0]!;
}

/** When the period begins, in RFC 3339; undefined if it has no beginning. */
export function startOf({ hours }: GivenUpPeriod): string | undefined {
  return hours === 0 ? undefined : new Date(Date.now() - hours * HOUR_MS).toISOString();
}

export function GivenUpField({ period }: { period: GivenUpPeriod }) {
  return <SelectField label="Given up" value={period.value} onChange={(value) => setQuery({ given_up: value })} options={PERIODS} />;
}

/**
 * From the first to the last of `times`, which are in the order of the list. If the list goes on, its end is open: that is the
 * oldest one in a list that begins with the newest.
 */
export function givenUpRange(times: string[], hasMore: boolean): ComponentChildren {
  const [first, last] = [times[0], times[times.length - 1]];
  if (first === undefined || last === undefined) return undefined;
  const isNewestFirst = first > last;
  const [oldest, newest] = isNewestFirst ? [last, first] : [first, last];
  return (
    <>
      from {hasMore && isNewestFirst ? "before " : ""}<Time at={oldest} /> to {hasMore && !isNewestFirst ? "after " : ""}<Time at={newest} />
    </>
  );
}
