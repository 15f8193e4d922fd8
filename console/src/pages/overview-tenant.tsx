import { ApiError, api } from "../api/client";
import { shownTenant } from "../api/session";
import type { Finding, StreamWithState, Subscriber, SubscriberHealth } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Card, Page, Stat, StateBadge, Time } from "../components/basics";
import { TimeChart } from "../components/chart";
import { Findings } from "../components/findings";
import { Table } from "../components/table";
import { formatMilliseconds, formatNumber, formatPercent, plural } from "../lib/format";
import { useLive } from "../lib/live";
import { link } from "../lib/router";
import { useMayManage } from "../lib/permissions";
import { intervalsOf, sum } from "../lib/series";
import { EventTypeList } from "./subscribers";

const POLL_MS = 10_000;
/** Each subscriber and each stream costs one request per poll. */
const SUBSCRIBERS_SHOWN = 10;
const STREAMS_SHOWN = 10;
const HOUR_MS = 3_600_000;
const DEAD_LETTERS_COUNTED = 100;

interface Row {
  subscriber: Subscriber;
  health: SubscriberHealth;
}

interface TenantState {
  rows: Row[];
  streams: StreamWithState[];
  deadLetters: number;
}

export function TenantOverview() {
  const live = useLive("tenant-overview", loadState, POLL_MS);
  return (
    <Page title="Overview" description={`The webhooks${shownTenant() === "" ? "" : ` of ${shownTenant()}`} in the last hour, and the streams.`}>
      <Loaded live={live}>{(state) => state.rows.length === 0 && state.streams.length === 0 ? <NoRecipients /> : <State state={state} />}</Loaded>
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
  return { rows, streams: states, deadLetters: deadLetters.items.length };
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

function State({ state }: { state: TenantState }) {
  return (
    <>
      <Findings findings={findProblems(state)} />
      {state.rows.length > 0 && <Webhooks state={state} />}
      {state.streams.length > 0 && <Streams streams={state.streams} />}
    </>
  );
}

function Streams({ streams }: { streams: StreamWithState[] }) {
  return (
    <Card title="Streams" flush actions={<a href={link("streams")}>All streams</a>}>
      <Table label="Streams" rows={streams} rowKey={(row) => row.id} columns={[
        { header: "Name", primary: true, cell: (row) => <a href={link("streams", row.name)}>{row.name}</a> },
        { header: "Event types", cell: (row) => <EventTypeList types={row.event_types} /> },
        { header: "Messages to read", align: "right", cell: (row) => formatNumber(row.lag.messages) },
        { header: "Readers", align: "right", cell: (row) => formatNumber(row.readers.length) },
      ]} />
    </Card>
  );
}

function Webhooks({ state }: { state: TenantState }) {
  const totals = state.rows.map((row) => row.health.totals);
  const delivered = sum(totals.map((total) => total.delivered));
  const failed = sum(totals.map((total) => total.failed + total.dead));
  const slowest = Math.max(0, ...totals.map((total) => total.latency_ms?.p95 ?? 0));
  const series = addSeries(state.rows);
  return (
    <>
      <div class="stats">
        <Stat label="Delivered" value={formatNumber(delivered)} hint="last hour" href={link("deliveries")} />
        <Stat label="Failed attempts" value={formatNumber(failed)} tone={failed > 0 ? "warn" : "neutral"} hint="last hour" href={`${link("deliveries")}?outcome=failed`} />
        <Stat label="Success rate" value={delivered + failed === 0 ? "–" : formatPercent(delivered / (delivered + failed))} hint="last hour" />
        <Stat label="Slowest endpoint" value={slowest === 0 ? "–" : formatMilliseconds(slowest)} hint="95 % of its responses" />
        <Stat label="Dead letters" value={state.deadLetters >= DEAD_LETTERS_COUNTED ? `${DEAD_LETTERS_COUNTED}+` : formatNumber(state.deadLetters)}
          tone={state.deadLetters > 0 ? "bad" : "neutral"} hint="not retried" href={link("dead-letters")} />
      </div>
      <Card title="Attempts per minute">
        <TimeChart label="Attempts per minute" times={series.times} format={formatNumber} latest="last full minute" scale="count" series={[
          { label: "Delivered", colour: "green", values: series.delivered },
          { label: "Failed", colour: "orange", values: series.failed },
        ]} />
      </Card>
      <Card title="Subscribers" flush actions={<a href={link("subscribers")}>All subscribers</a>}>
        <Table label="Subscribers" rows={state.rows} rowKey={(row) => row.subscriber.id} columns={[
          { header: "Name", primary: true, cell: (row) => <a href={link("subscribers", row.subscriber.id)}>{row.subscriber.name}</a> },
          { header: "State", cell: (row) => <StateBadge state={row.health.state} /> },
          { header: "Success", align: "right", cell: ({ health }) => health.totals.success_rate === undefined || health.totals.success_rate === null ? "–" : formatPercent(health.totals.success_rate) },
          { header: "95 % within", align: "right", cell: ({ health }) => health.totals.latency_ms ? formatMilliseconds(health.totals.latency_ms.p95) : "–" },
          { header: "Failures began", cell: (row) => <Time at={row.health.failing_since} /> },
        ]} />
      </Card>
    </>
  );
}

function findProblems({ rows, deadLetters }: TenantState): Finding[] {
  const findings: Finding[] = [];
  for (const { subscriber, health } of rows) {
    const where = link("subscribers", subscriber.id);
    if (health.state === "failing" || health.state === "breaker_open") {
      findings.push({
        severity: health.state === "breaker_open" ? "critical" : "warning",
        title: `${subscriber.name} fails`,
        detail: `${subscriber.url} does not accept webhooks. Messages wait and are retried.`,
        what_to_do: "Look at the last attempts and repair the endpoint; then the retries deliver them.",
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
      severity: "warning", title: `${plural(deadLetters, "dead letter")}${deadLetters >= DEAD_LETTERS_COUNTED ? " or more" : ""}`,
      detail: "These messages were given up after their retries.",
      what_to_do: "Repair the cause, then retry them; or discard those that nobody needs.", links: [{ label: "Dead letters", address: link("dead-letters") }],
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
