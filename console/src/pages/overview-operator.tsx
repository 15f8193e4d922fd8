import { useEffect, useState } from "preact/hooks";
import { api } from "../api/client";
import type { ConsumerStatus, Overview } from "../api/types";
import { Loaded } from "../components/async";
import { Badge, Card, Page, Stat, StateBadge } from "../components/basics";
import { TimeChart } from "../components/chart";
import { Findings } from "../components/findings";
import { Table } from "../components/table";
import { formatCompact, formatMilliseconds, formatNumber, formatRate, formatSeconds } from "../lib/format";
import { useLive } from "../lib/live";
import { link, linkWithQuery } from "../lib/router";

const POLL_MS = 2_000;
const CONSUMERS_POLL_MS = 5_000;
/** Between two samples that are farther apart nothing is known, such as during an outage. */
const GAP_SECONDS_MIN = 15;
/** Five minutes of polls: older samples are dropped. */
const SAMPLES_MAX = 150;

interface Sample {
  time: number;
  posted: number | null;
  delivered: number | null;
  failed: number | null;
  p50: number | null;
  p99: number | null;
  endpointsP99: number | null;
}

export function OperatorOverview() {
  const overview = useLive("overview", (signal) => api.get("/admin/v1/overview", { signal }), POLL_MS);
  const consumers = useLive("consumers", (signal) => api.get("/admin/v1/consumers", { signal }), CONSUMERS_POLL_MS);
  const samples = useSamples(overview.data);
  return (
    <Page title="Overview" description="The whole installation, live.">
      <Loaded live={overview}>{(data) => <Rates overview={data} samples={samples} isCurrent={overview.error === undefined} />}</Loaded>
      <Card title="Consumers of the log" flush actions={<a href={link("log")}>All details</a>}>
        <Loaded live={consumers}>{(data) => <ConsumerLags consumers={data.items} isCurrent={consumers.error === undefined} />}</Loaded>
      </Card>
    </Page>
  );
}

/** `isCurrent` is false while the server does not respond: what was found before says nothing about now. */
function Rates({ overview, samples, isCurrent }: { overview: Overview; samples: Sample[]; isCurrent: boolean }) {
  const last = samples[samples.length - 1];
  const dead = overview.dead_letters;
  const deadOthers = dead.consumers + dead.mail + dead.notifications;
  // An installation in which nothing was posted has not shown yet that everything works.
  const isEmpty = overview.posted_total === 0;
  const times = samples.map((sample) => sample.time);
  const current = (value: string) => (isCurrent ? value : "…");
  const latest = isCurrent ? "now" : "the last known";
  const rate = (value: number | null | undefined) => current(value === null || value === undefined ? "…" : formatRate(value));
  return (
    <>
      {isCurrent && (!isEmpty || overview.findings.length > 0) && <Findings findings={overview.findings} none={<NoFindings />} />}
      {isEmpty && <FirstSteps />}
      <div class="stats">
        <Stat label="Posted" value={rate(last?.posted)} hint={`${formatCompact(overview.posted_total)} in total`} href={link("events")} />
        <Stat label="Delivered" value={rate(last?.delivered)} hint={`${formatCompact(overview.delivered_total)} in total`} href={link("deliveries")} />
        <Stat label="Failed attempts" value={rate(last?.failed)} tone={last?.failed ? "warn" : "neutral"}
          hint={`${formatCompact(overview.failed_attempts_total)} in total`} href={linkWithQuery({ outcome: "failed" }, "deliveries")} />
        <Stat label="Post to delivery" value={current(overview.end_to_end_ms ? formatMilliseconds(overview.end_to_end_ms.p50) : "–")}
          hint={overview.end_to_end_ms ? `99 % within ${formatMilliseconds(overview.end_to_end_ms.p99)}` : "No delivery in 5 minutes"} />
        <Stat label="Dead letters" value={current(formatNumber(dead.webhooks))} tone={dead.webhooks > 0 ? "bad" : "neutral"}
          hint={dead.webhooks > 0 ? "webhooks that were given up" : "of webhooks"} href={link("dead-letters")} />
        <Stat label="Other dead letters" value={current(formatNumber(deadOthers))} tone={deadOthers > 0 ? "bad" : "neutral"}
          hint={`${dead.consumers} consumers, ${dead.mail} mail, ${dead.notifications} notifications`}
          href={dead.consumers > 0 ? link("dead-letters", "consumers") : link("notifications")} />
      </div>
      <div class="grid">
        <Card title="Posted and delivered per second">
          <TimeChart label="Posted and delivered per second" times={times} latest={latest} format={formatRate} series={[
            { label: "Posted", colour: "blue", values: samples.map((sample) => sample.posted) },
            { label: "Delivered", colour: "green", values: samples.map((sample) => sample.delivered) },
            { label: "Failed attempts", colour: "orange", values: samples.map((sample) => sample.failed) },
          ]} />
        </Card>
        <Card title="From post to delivery">
          <TimeChart label="From post to delivery" times={times} latest={latest} format={formatMilliseconds} scale="duration" series={[
            { label: "50 %", colour: "teal", values: samples.map((sample) => sample.p50) },
            { label: "99 %", colour: "violet", values: samples.map((sample) => sample.p99) },
            { label: "Endpoints, 99 %", colour: "blue", values: samples.map((sample) => sample.endpointsP99) },
          ]} />
        </Card>
      </div>
    </>
  );
}

/** What the server looks at for its findings, and what it does not. */
function NoFindings() {
  return (
    <>
      <strong>No findings.</strong> The dependencies and tasks of this server work, no consumer of the log has lapsed, lags or has
      parked messages, no subscriber fails or was disabled, and no dead letter waits for a retry. Not looked
      at: <a href={link("subscribers")}>paused subscribers</a>, blocked lanes and <a href={link("streams")}>streams</a>.
    </>
  );
}

/** What to do with an installation in which nothing was posted yet. */
function FirstSteps() {
  return (
    <Card title="First steps">
      <ul class="stack-small">
        <li>See everything move: run <code>pillarbox demo</code> in a terminal. At its end it removes its tenants, subscribers and keys; its messages stay in the log until retention ends.</li>
        <li><a href={link("subscribers", "new")}>Create a subscriber</a> for a receiver of webhooks; <code>pillarbox listen</code> is one to try.</li>
        <li>Post in SQL, <code>select pillarbox.post('order.created', '{"{"}"id": 1{"}"}')</code>, or over HTTP with <a href={link("keys")}>an API key</a>.</li>
      </ul>
    </Card>
  );
}

/** Turns the counters of consecutive polls into rates. A counter that went down was reset, so it gives no rate. */
function useSamples(overview: Overview | undefined): Sample[] {
  const [state, setState] = useState<{ previous: Overview | undefined; samples: Sample[] }>({ previous: undefined, samples: [] });
  useEffect(() => {
    if (overview === undefined) return;
    setState(({ previous, samples }) => {
      return { previous: overview, samples: [...samples, ...samplesOf(previous, overview)].slice(-SAMPLES_MAX) };
    });
  }, [overview]);
  return state.samples;
}

/** The sample of a poll. After a gap one without values precedes it, so that the chart draws no line through the gap. */
function samplesOf(previous: Overview | undefined, current: Overview): Sample[] {
  if (previous === undefined) return [];
  const seconds = (Date.parse(current.at) - Date.parse(previous.at)) / 1000;
  if (seconds <= 0) return [];
  const unknown = { posted: null, delivered: null, failed: null, p50: null, p99: null, endpointsP99: null };
  const gap = seconds < GAP_SECONDS_MIN ? [] : [{ time: Date.parse(previous.at) / 1000 + 1, ...unknown }];
  const rate = (before: number, after: number) => (after < before ? null : (after - before) / seconds);
  return [...gap, {
    time: Date.parse(current.at) / 1000,
    posted: rate(previous.posted_total, current.posted_total),
    delivered: rate(previous.delivered_total, current.delivered_total),
    failed: rate(previous.failed_attempts_total, current.failed_attempts_total),
    p50: current.end_to_end_ms?.p50 ?? null,
    p99: current.end_to_end_ms?.p99 ?? null,
    endpointsP99: current.latency_ms?.p99 ?? null,
  }];
}

function ConsumerLags({ consumers, isCurrent }: { consumers: ConsumerStatus[]; isCurrent: boolean }) {
  // The ones that need attention come first.
  const sorted = [...consumers].sort((one, other) => weight(other) - weight(one) || one.consumer.localeCompare(other.consumer));
  return (
    <Table label="Consumers of the log" compact rows={sorted} rowKey={(row) => row.consumer} columns={[
      { header: "Consumer", primary: true, cell: (row) => <code>{row.consumer}</code> },
      { header: "State", cell: (row) => isCurrent ? <StateBadge state={consumerState(row)} /> : "…" },
      { header: "Lag", align: "right", cell: (row) => isCurrent ? formatSeconds(row.lag_seconds) : "…" },
      { header: "Messages behind", optional: true, align: "right", cell: (row) => isCurrent ? formatNumber(row.lag_messages) : "…" },
      { header: "Parked", optional: true, align: "right", cell: (row) => isCurrent ? formatNumber(row.parked) : "…" },
      { header: "Dead letters", optional: true, align: "right", cell: (row) => isCurrent ? <DeadLetterCount count={row.dead} /> : "…" },
    ]} />
  );
}

function DeadLetterCount({ count }: { count: number }) {
  return count > 0 ? <Badge tone="bad">{formatNumber(count)}</Badge> : <>0</>;
}

export function consumerState(consumer: ConsumerStatus): string {
  if (consumer.lapsed_at) return "lapsed";
  if (consumer.workers.length === 0) return "no worker";
  return consumer.parked > 0 ? "parked" : "active";
}

function weight(consumer: ConsumerStatus): number {
  if (consumer.lapsed_at) return 1e15;
  return (consumer.workers.length === 0 ? 1e12 : 0) + consumer.lag_messages + consumer.parked + consumer.dead;
}
