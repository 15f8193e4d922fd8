import { ApiError, api } from "../api/client";
import { shownTenant } from "../api/session";
import type { Finding, StreamWithState, Subscriber, SubscriberHealth } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Card, Notice, Page, Stat, StateBadge, Time } from "../components/basics";
import { TimeChart } from "../components/chart";
import { Findings } from "../components/findings";
import { Table } from "../components/table";
import { atLeast, capitalized, formatMilliseconds, formatNumber, formatPercent } from "../lib/format";
import { useLive, useNow } from "../lib/live";
import { link, linkWithQuery } from "../lib/router";
import { useMayManage } from "../lib/permissions";
import { intervalsOf, sum } from "../lib/series";
import { activeReaders } from "./streams";
import { EventTypeList } from "./subscribers";

const POLL_MS = 10_000;
/** Each subscriber and each stream costs one request per poll. */
const SUBSCRIBERS_SHOWN = 10;
const STREAMS_SHOWN = 10;
const HOUR_MS = 3_600_000;
const DEAD_LETTERS_COUNTED = 100;
/** In the place of a number that was true before the server stopped to respond. */
const UNKNOWN = "…";

interface Row {
  subscriber: Subscriber;
  health: SubscriberHealth;
}

interface TenantState {
  rows: Row[];
  streams: StreamWithState[];
  /** Counted up to a limit: there may be more. */
  deadLetters: number;
  hasMoreDeadLetters: boolean;
  /** There are other subscribers, or other streams, about which the page knows nothing. */
  hasOthers: boolean;
}

export function TenantOverview() {
  const live = useLive("tenant-overview", loadState, POLL_MS);
  return (
    <Page title="Overview" description={`The webhooks${shownTenant() === "" ? "" : ` of ${shownTenant()}`} in the last hour, and the streams.`}>
      <Loaded live={live}>
        {(state) => state.rows.length === 0 && state.streams.length === 0 ? <NoRecipients /> : <State state={state} isCurrent={live.error === undefined} />}
      </Loaded>
    </Page>
  );
}

async function loadState(signal: AbortSignal): Promise<TenantState> {
  const [subscribers, streams, deadLetters] = await Promise.all([
    api.get("/hub/v1/subscribers", { query: { limit: SUBSCRIBERS_SHOWN }, signal }),
    api.get("/hub/v1/streams", { query: { limit: STREAMS_SHOWN }, signal }),
    api.get("/hub/v1/dead-letters", { query: { retried: false, limit: DEAD_LETTERS_COUNTED }, signal }),
  ]);
  const from = new Date(Date.now() - HOUR_MS).toISOString();
  const [rows, states] = await Promise.all([
    allThatExist(subscribers.items.map(async (subscriber) => ({
      subscriber,
      health: await api.get("/hub/v1/subscribers/{id}/health", { path: { id: subscriber.id }, query: { resolution: "minute", from }, signal }),
    }))),
    allThatExist(streams.items.map(({ name }) => api.get("/hub/v1/streams/{name}", { path: { name }, signal }))),
  ]);
  const hasOthers = Boolean(subscribers.next_cursor ?? streams.next_cursor);
  return { rows, streams: states, deadLetters: deadLetters.items.length, hasMoreDeadLetters: Boolean(deadLetters.next_cursor), hasOthers };
}

/** Waits for the answers, without those about what was deleted since it was listed. */
async function allThatExist<T>(requests: Promise<T>[]): Promise<T[]> {
  const answers = await Promise.all(requests.map((request) => request.catch((cause: unknown) => {
    if (cause instanceof ApiError && cause.status === 404) return undefined;
    throw cause;
  })));
  return answers.filter((answer) => answer !== undefined);
}

function NoRecipients() {
  const actions = useMayManage() && (
    <>
      <a class="button primary" href={link("subscribers", "new")}>Create a subscriber</a>
      <a class="button" href={link("streams", "new")}>Create a stream</a>
    </>
  );
  return (
    <Card>
      <Empty title="No subscriber and no stream yet" actions={actions}>
        A subscriber is the address of a server that receives events as webhooks. A stream is for consumers that pull events.
      </Empty>
    </Card>
  );
}

interface StateProps {
  state: TenantState;
  /** False while the server does not respond: what was found before says nothing about now. */
  isCurrent: boolean;
}

function State({ state, isCurrent }: StateProps) {
  return (
    <>
      {state.hasOthers && (
        <Notice tone="neutral">
          This page is about the {SUBSCRIBERS_SHOWN} newest subscribers and the first {STREAMS_SHOWN} streams only, except for the dead letters.
          The others are among <a href={link("subscribers")}>all subscribers</a> and <a href={link("streams")}>all streams</a>.
        </Notice>
      )}
      {isCurrent && <Findings findings={findProblems(state)} none={<>None of these subscribers fails or is disabled, and nothing that was given up waits for a retry.</>} />}
      {state.rows.length > 0 && <Webhooks state={state} isCurrent={isCurrent} />}
      {state.streams.length > 0 && <Streams streams={state.streams} isCurrent={isCurrent} />}
    </>
  );
}

function Streams({ streams, isCurrent }: { streams: StreamWithState[]; isCurrent: boolean }) {
  const now = useNow();
  const current = (value: string) => (isCurrent ? value : UNKNOWN);
  return (
    <Card title="Streams" flush actions={<a href={link("streams")}>All streams</a>}>
      <Table label="Streams" rows={streams} rowKey={(row) => row.id} columns={[
        { header: "Name", primary: true, cell: (row) => <a href={link("streams", row.name)}>{row.name}</a> },
        { header: "Event types", cell: (row) => <EventTypeList types={row.event_types} /> },
        { header: "Messages to read", align: "right", cell: (row) => current(formatNumber(row.lag.messages)) },
        { header: "Readers", align: "right", cell: (row) => current(formatNumber(activeReaders(row.readers, now).length)) },
      ]} />
    </Card>
  );
}

function Webhooks({ state, isCurrent }: StateProps) {
  const current = (value: string) => (isCurrent ? value : UNKNOWN);
  const totals = state.rows.map((row) => row.health.totals);
  const delivered = sum(totals.map((total) => total.delivered));
  const failed = sum(totals.map((total) => total.failed + total.dead));
  const slowest = Math.max(0, ...totals.map((total) => total.latency_ms?.p95 ?? 0));
  const series = addSeries(state.rows);
  return (
    <>
      <div class="stats">
        <Stat label="Delivered" value={current(formatNumber(delivered))} hint="last hour" href={link("deliveries")} />
        <Stat label="Failed attempts" value={current(formatNumber(failed))} tone={isCurrent && failed > 0 ? "warn" : "neutral"} hint="last hour" href={linkWithQuery({ outcome: "failed" }, "deliveries")} />
        <Stat label="Success rate" value={current(delivered + failed === 0 ? "–" : formatPercent(delivered / (delivered + failed)))} hint="last hour" />
        <Stat label="Slowest endpoint" value={current(slowest === 0 ? "–" : formatMilliseconds(slowest))} hint="95 % of its responses" />
        <Stat label="Dead letters" value={current(`${formatNumber(state.deadLetters)}${state.hasMoreDeadLetters ? "+" : ""}`)}
          tone={isCurrent && state.deadLetters > 0 ? "bad" : "neutral"} hint="not retried" href={link("dead-letters")} />
      </div>
      <Card title="Attempts per minute">
        <TimeChart label="Attempts per minute" times={series.times} format={formatNumber} latest={isCurrent ? "last full minute" : "the last known"} scale="count" series={[
          { label: "Delivered", colour: "green", values: series.delivered },
          { label: "Failed", colour: "orange", values: series.failed },
        ]} />
      </Card>
      <Card title="Subscribers" flush actions={<a href={link("subscribers")}>All subscribers</a>}>
        <Table label="Subscribers" rows={state.rows} rowKey={(row) => row.subscriber.id} columns={[
          { header: "Name", primary: true, cell: (row) => <a href={link("subscribers", row.subscriber.id)}>{row.subscriber.name}</a> },
          { header: "State", cell: (row) => isCurrent ? <StateBadge state={row.health.state} /> : UNKNOWN },
          { header: "Success", align: "right", cell: ({ health }) => current(health.totals.success_rate === undefined || health.totals.success_rate === null ? "–" : formatPercent(health.totals.success_rate)) },
          { header: "95 % within", align: "right", cell: ({ health }) => current(health.totals.latency_ms ? formatMilliseconds(health.totals.latency_ms.p95) : "–") },
          { header: "Failures began", cell: (row) => <Time at={row.health.failing_since} /> },
        ]} />
      </Card>
    </>
  );
}

function findProblems({ rows, deadLetters, hasMoreDeadLetters }: TenantState): Finding[] {
  const findings: Finding[] = [];
  for (const { subscriber, health } of rows) {
    const where = link("subscribers", subscriber.id);
    if (health.state === "failing" || health.state === "breaker_open") {
      findings.push({
        severity: health.state === "breaker_open" ? "critical" : "warning",
        title: `${subscriber.name} fails`,
        detail: `${subscriber.url} does not accept webhooks. Messages wait and are retried.`,
        what_to_do: "Inspect the last attempts and repair the endpoint. The retries then deliver them.",
        links: [{ label: subscriber.name, address: where }],
      });
    } else if (health.state === "disabled") {
      findings.push({
        severity: "critical", title: `${subscriber.name} is disabled`, detail: subscriber.inactive_reason ?? "It gets no messages.",
        what_to_do: "Enable it again when its endpoint is ready.", links: [{ label: subscriber.name, address: where }],
      });
    }
  }
  if (deadLetters > 0) {
    findings.push({
      severity: "warning", title: capitalized(atLeast(deadLetters, hasMoreDeadLetters, "dead letter")),
      detail: "These messages were given up after their retries.",
      what_to_do: "Repair the cause, then retry them; or discard those that are no longer needed.", links: [{ label: "Dead letters", address: link("dead-letters") }],
    });
  }
  return findings;
}

function addSeries(rows: Row[]): { times: number[]; delivered: number[]; failed: number[] } {
  const minutes = new Map<number, { delivered: number; failed: number }>();
  for (const interval of rows.flatMap((row) => row.health.series)) {
    const time = Date.parse(interval.at) / 1000;
    const minute = minutes.get(time) ?? { delivered: 0, failed: 0 };
    minute.delivered += interval.delivered;
    minute.failed += interval.failed + interval.dead;
    minutes.set(time, minute);
  }
  const health = rows[0]?.health;
  const times = health === undefined ? [] : intervalsOf(health.from, health.to, 60);
  return {
    times,
    delivered: times.map((time) => minutes.get(time)?.delivered ?? 0),
    failed: times.map((time) => minutes.get(time)?.failed ?? 0),
  };
}
