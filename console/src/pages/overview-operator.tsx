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

const POLL_MS = 2_000;
const CONSUMERS_POLL_MS = 5_000;
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
      <Card title="Consumers of the log" flush actions={<a href="#/log">All details</a>}>
        <Loaded live={consumers}>{(data) => <ConsumerLags consumers={data.items} />}</Loaded>
      </Card>
    </Page>
  );
}

/** `isCurrent` is false while the server does not respond: what was found before says nothing about now. */
function Rates({ overview, samples, isCurrent }: { overview: Overview; samples: Sample[]; isCurrent: boolean }) {
  const last = samples[samples.length - 1];
  const dead = overview.dead_letters;
  const deadOthers = dead.consumers + dead.mail + dead.notifications;
  const times = samples.map((sample) => sample.time);
  const rate = (value: number | null | undefined) => (value === null || value === undefined ? "…" : formatRate(value));
  return (
    <>
      {isCurrent && <Findings findings={overview.findings} />}
      <div class="stats">
        <Stat label="Posted" value={rate(last?.posted)} hint={`${formatCompact(overview.posted_total)} in total`} href="#/events" />
        <Stat label="Delivered" value={rate(last?.delivered)} hint={`${formatCompact(overview.delivered_total)} in total`} href="#/deliveries" />
        <Stat label="Failed attempts" value={rate(last?.failed)} tone={last?.failed ? "warn" : "neutral"}
          hint={`${formatCompact(overview.failed_attempts_total)} in total`} href="#/deliveries?outcome=failed" />
        <Stat label="Post to delivery" value={overview.end_to_end_ms ? formatMilliseconds(overview.end_to_end_ms.p50) : "–"}
          hint={overview.end_to_end_ms ? `99 % within ${formatMilliseconds(overview.end_to_end_ms.p99)}` : "No delivery in 5 minutes"} />
        <Stat label="Dead letters" value={formatNumber(dead.webhooks)} tone={dead.webhooks > 0 ? "bad" : "neutral"}
          hint={dead.webhooks > 0 ? "webhooks that were given up" : "of webhooks"} href="#/dead-letters" />
        <Stat label="Other dead letters" value={formatNumber(deadOthers)} tone={deadOthers > 0 ? "bad" : "neutral"}
          hint={`${dead.consumers} consumers, ${dead.mail} mail, ${dead.notifications} notifications`}
          href={dead.consumers > 0 ? "#/dead-letters/consumers" : "#/notifications"} />
      </div>
      <div class="grid">
        <Card title="Posted and delivered per second">
          <TimeChart label="Posted and delivered per second" times={times} format={formatRate} series={[
            { label: "Posted", colour: "blue", values: samples.map((sample) => sample.posted) },
            { label: "Delivered", colour: "green", values: samples.map((sample) => sample.delivered) },
            { label: "Failed attempts", colour: "orange", values: samples.map((sample) => sample.failed) },
          ]} />
        </Card>
        <Card title="From post to delivery">
          <TimeChart label="From post to delivery" times={times} format={formatMilliseconds} scale="duration" series={[
            { label: "50 %", colour: "teal", values: samples.map((sample) => sample.p50) },
            { label: "99 %", colour: "violet", values: samples.map((sample) => sample.p99) },
            { label: "Endpoints, 99 %", colour: "blue", values: samples.map((sample) => sample.endpointsP99) },
          ]} />
        </Card>
      </div>
    </>
  );
}

/** Turns the counters of consecutive polls into rates. A counter that went down was reset, so it gives no rate. */
function useSamples(overview: Overview | undefined): Sample[] {
  const [state, setState] = useState<{ previous: Overview | undefined; samples: Sample[] }>({ previous: undefined, samples: [] });
  useEffect(() => {
    if (overview === undefined) return;
    setState(({ previous, samples }) => {
      const sample = sampleOf(previous, overview);
      return { previous: overview, samples: sample === null ? samples : [...samples.slice(1 - SAMPLES_MAX), sample] };
    });
  }, [overview]);
  return state.samples;
}

function sampleOf(previous: Overview | undefined, current: Overview): Sample | null {
  if (previous === undefined) return null;
  const seconds = (Date.parse(current.at) - Date.parse(previous.at)) / 1000;
  if (seconds <= 0) return null;
  const rate = (before: number, after: number) => (after < before ? null : (after - before) / seconds);
  return {
    time: Date.parse(current.at) / 1000,
    posted: rate(previous.posted_total, current.posted_total),
    delivered: rate(previous.delivered_total, current.delivered_total),
    failed: rate(previous.failed_attempts_total, current.failed_attempts_total),
    p50: current.end_to_end_ms?.p50 ?? null,
    p99: current.end_to_end_ms?.p99 ?? null,
    endpointsP99: current.latency_ms?.p99 ?? null,
  };
}

function ConsumerLags({ consumers }: { consumers: ConsumerStatus[] }) {
  // The ones that need attention come first.
  const sorted = [...consumers].sort((one, other) => weight(other) - weight(one) || one.consumer.localeCompare(other.consumer));
  return (
    <Table label="Consumers of the log" compact rows={sorted} rowKey={(row) => row.consumer} columns={[
      { header: "Consumer", primary: true, cell: (row) => <code>{row.consumer}</code> },
      { header: "State", cell: (row) => <StateBadge state={consumerState(row)} /> },
      { header: "Lag", align: "right", cell: (row) => formatSeconds(row.lag_seconds) },
      { header: "Messages behind", optional: true, align: "right", cell: (row) => formatNumber(row.lag_messages) },
      { header: "Parked", optional: true, align: "right", cell: (row) => formatNumber(row.parked) },
      { header: "Dead letters", optional: true, align: "right", cell: (row) => row.dead > 0 ? <Badge tone="bad">{formatNumber(row.dead)}</Badge> : "0" },
    ]} />
  );
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
