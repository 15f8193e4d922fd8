import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { SubscriberHealth } from "../api/types";
import { Loaded } from "../components/async";
import { Card, Stat, Time } from "../components/basics";
import { TimeChart } from "../components/chart";
import { SelectField } from "../components/form";
import { formatMilliseconds, formatNumber, formatPercent } from "../lib/format";
import { useLive } from "../lib/live";
import { intervalsOf } from "../lib/series";

const POLL_MS = 10_000;
const HOUR_MS = 3_600_000;

type Resolution = SubscriberHealth["resolution"];
const RANGES: Record<string, { label: string; hours: number; resolution: Resolution; stepSeconds: number }> = {
  hour: { label: "Last hour", hours: 1, resolution: "minute", stepSeconds: 60 },
  day: { label: "Last 24 hours", hours: 24, resolution: "hour", stepSeconds: 3_600 },
  month: { label: "Last 30 days", hours: 720, resolution: "day", stepSeconds: 86_400 },
};

/** The state, success rate and response times of a subscriber; `isBrief` leaves out the charts. */
export function SubscriberHealthCards({ id, isBrief = false }: { id: string; isBrief?: boolean }) {
  const [name, setName] = useState("hour");
  const range = RANGES[name] ?? RANGES["hour"]!;
  const live = useLive(`health ${id} ${name}`, (signal) => {
    const from = new Date(Date.now() - range.hours * HOUR_MS).toISOString();
    return api.get("/hub/v1/subscribers/{id}/health", { path: { id }, query: { resolution: range.resolution, from }, signal });
  }, POLL_MS);
  return (
    <>
      {!isBrief && (
        <div class="filters">
          <SelectField label="Time" value={name} onChange={setName} options={Object.entries(RANGES).map(([value, { label }]) => ({ value, label }))} />
        </div>
      )}
      <Loaded live={live}>
        {(health) => <><HealthStats health={health} period={range.label.toLowerCase()} />{!isBrief && <HealthCharts health={health} stepSeconds={range.stepSeconds} />}</>}
      </Loaded>
    </>
  );
}

function HealthStats({ health, period }: { health: SubscriberHealth; period: string }) {
  const { totals } = health;
  const isBad = health.state === "breaker_open" || health.state === "disabled";
  const state = health.state.replace(/_/g, " ");
  return (
    <div class="stats">
      <Stat label="State" value={state[0]!.toUpperCase() + state.slice(1)} tone={isBad ? "bad" : health.state === "healthy" ? "neutral" : "warn"}
        hint={<HealthHint health={health} />} />
      <Stat label="Attempts" value={formatNumber(totals.attempts)} hint={`${period}, counted each minute`} />
      <Stat label="Success rate" value={totals.success_rate === undefined || totals.success_rate === null ? "–" : formatPercent(totals.success_rate)} hint={`${formatNumber(totals.failed)} failed, ${formatNumber(totals.dead)} dead`} />
      <Stat label="Response time" value={totals.latency_ms ? formatMilliseconds(totals.latency_ms.p50) : "–"}
        hint={totals.latency_ms ? `99 % within ${formatMilliseconds(totals.latency_ms.p99)}` : "no attempt"} />
    </div>
  );
}

function HealthHint({ health }: { health: SubscriberHealth }) {
  const began = health.failing_since && <>began <Time at={health.failing_since} /></>;
  if (health.state === "breaker_open") return <>sending is paused after repeated failures{began && <>, which {began}</>}</>;
  if (began) return <>failures {began}</>;
  return health.state === "paused" || health.state === "disabled" ? <>by its settings</> : <>by the last attempts</>;
}

function HealthCharts({ health, stepSeconds }: { health: SubscriberHealth; stepSeconds: number }) {
  const intervals = new Map(health.series.map((interval) => [Date.parse(interval.at) / 1000, interval]));
  const times = intervalsOf(health.from, health.to, stepSeconds);
  const latest = health.resolution === "minute" ? "last full minute" : `this ${health.resolution} so far`;
  const latency = (name: "p50" | "p95" | "p99") => times.map((time) => intervals.get(time)?.latency_ms?.[name] ?? null);
  return (
    <div class="grid">
      <Card title="Attempts">
        <TimeChart label="Attempts" times={times} format={formatNumber} latest={latest} scale="count" series={[
          { label: "Delivered", colour: "green", values: times.map((time) => intervals.get(time)?.delivered ?? 0) },
          { label: "Failed", colour: "orange", values: times.map((time) => intervals.get(time)?.failed ?? 0) },
          { label: "Dead", colour: "red", values: times.map((time) => intervals.get(time)?.dead ?? 0) },
        ]} />
      </Card>
      <Card title="Response times">
        <TimeChart label="Response times" times={times} format={formatMilliseconds} latest={latest} series={[
          { label: "50 %", colour: "teal", values: latency("p50") },
          { label: "95 %", colour: "blue", values: latency("p95") },
          { label: "99 %", colour: "violet", values: latency("p99") },
        ]} />
      </Card>
    </div>
  );
}
