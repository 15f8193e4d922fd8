import { useEffect, useState } from "preact/hooks";
import { api } from "../api/client";
import type { Gathering, Registration } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Card, Identifier, MiddleTruncated, Page, Stat, StateBadge, Tabs, Time } from "../components/basics";
import { TimeChart } from "../components/chart";
import { ask } from "../components/dialog";
import { ActionButton } from "../components/form";
import { ListView, usePages } from "../components/list";
import { showToast } from "../components/toasts";
import { describePrincipal, formatNumber } from "../lib/format";
import { useLive } from "../lib/live";
import { link } from "../lib/router";
import { Seats } from "./gatherings";

const POLL_MS = 1_500;
const LIST_POLL_MS = 3_000;
const SAMPLES_MAX = 200;

interface Sample {
  time: number;
  active: number;
  waiting: number;
}

export function GatheringPage({ id, tab }: { id: string; tab: string }) {
  const event = useLive(`gathering ${id}`, (signal) => api.get("/event/v1/events/{id}", { path: { id }, signal }), LIST_POLL_MS);
  const here = link("gatherings", id);
  return (
    <Page title={event.data?.title ?? "Gathering"} parent={{ label: "Gatherings", href: link("gatherings") }}
      description={event.data && <span class="row"><StateBadge state={event.data.status} /><span>{event.data.city}, <Time at={event.data.start_time} /></span></span>}
      actions={event.data && <GatheringActions event={event.data} reload={event.reload} />}>
      <LiveSeats id={id} />
      <Tabs label="Parts of the gathering" current={tab} tabs={[
        { id: "", label: "Participants", href: here },
        { id: "waitlist", label: "Waitlist", href: link("gatherings", id, "waitlist") },
        { id: "bans", label: "Bans", href: link("gatherings", id, "bans") },
        { id: "history", label: "History", href: link("gatherings", id, "history") },
      ]} />
      <Card flush title={tab === "history" ? "History, oldest first" : undefined}>
        {tab === "bans" ? <Bans id={id} /> : tab === "history" ? <History id={id} /> : <Registrations id={id} isWaitlist={tab === "waitlist"} />}
      </Card>
    </Page>
  );
}

/** The seats now, and a chart of how they filled since the page was opened. */
function LiveSeats({ id }: { id: string }) {
  const stats = useLive(`stats ${id}`, (signal) => api.get("/join/v1/events/{id}/stats", { path: { id }, signal }), POLL_MS);
  const [samples, setSamples] = useState<Sample[]>([]);
  useEffect(() => {
    if (stats.data === undefined) return;
    const sample = { time: Date.now() / 1000, active: stats.data.active_count, waiting: stats.data.waitlist_count };
    setSamples((previous) => [...previous.slice(1 - SAMPLES_MAX), sample]);
  }, [stats.data]);
  return (
    <Loaded live={stats}>
      {(data) => (
        <>
          <div class="stats">
            <Stat label="Seats taken" value={<Seats active={data.active_count} capacity={data.capacity} />} />
            <Stat label="Seats left" value={data.seats_left === undefined || data.seats_left === null ? "unlimited" : formatNumber(data.seats_left)} />
            <Stat label="Waitlist" value={formatNumber(data.waitlist_count)} tone={data.waitlist_count > 0 ? "warn" : "neutral"} />
            <Stat label="Joins so far" value={formatNumber(data.joined_in_all)} hint="joining again counts again" />
          </div>
          <Card title="Seats since you opened this page">
            <TimeChart label="Seats" times={samples.map((sample) => sample.time)} format={formatNumber} scale="count" height={120} series={[
              { label: "Taken", colour: "blue", values: samples.map((sample) => sample.active) },
              { label: "Waitlist", colour: "violet", values: samples.map((sample) => sample.waiting) },
            ]} />
          </Card>
        </>
      )}
    </Loaded>
  );
}

function GatheringActions({ event, reload }: { event: Gathering; reload: () => void }) {
  const path = { id: event.id };
  const unpublish = async () => {
    const body = "It is no longer listed. It can be published again.";
    const reason = await ask({ title: `Unpublish ${event.title}?`, body, confirm: "Unpublish", isDangerous: true, textLabel: "Reason" });
    if (reason === null) return;
    await api.post("/event/v1/events/{id}/unpublish", { path, body: { reason: reason || null } });
    reload();
  };
  const cancel = async () => {
    const body = "All participants are told. This cannot be undone.";
    const reason = await ask({ title: `Cancel ${event.title}?`, body, confirm: "Cancel the gathering", isDangerous: true, textLabel: "Reason" });
    if (reason === null) return;
    await api.post("/event/v1/events/{id}/cancel", { path, body: { reason: reason || null } });
    reload();
  };
  return (
    <>
      {event.status === "published" && <ActionButton label="Unpublish" onRun={unpublish} />}
      {event.status !== "canceled" && <ActionButton class="danger" label="Cancel the gathering" onRun={cancel} />}
    </>
  );
}

function Registrations({ id, isWaitlist }: { id: string; isWaitlist: boolean }) {
  const list = usePages<Registration>(`registrations ${id} ${isWaitlist}`, (page, signal) => {
    const options = { path: { id }, query: page, signal };
    return isWaitlist ? api.get("/join/v1/events/{id}/waitlist", options) : api.get("/join/v1/events/{id}/participants", options);
  }, LIST_POLL_MS);
  return (
    <ListView list={list} label={isWaitlist ? "Waitlist" : "Participants"} rowKey={(row) => row.id} columns={[
      { header: "User", primary: true, cell: (row) => <Identifier value={row.user_id} /> },
      { header: "Status", cell: (row) => <StateBadge state={row.status} /> },
      ...(isWaitlist ? [{ header: "Position", align: "right" as const, cell: (row: Registration) => row.position ?? "–" }] : []),
      { header: "Joined", cell: (row) => <Time at={row.created_at} /> },
      { header: "Actions", actions: true, cell: (row) => <Moderation row={row} reload={list.reload} /> },
    ]} empty={<Empty title={isWaitlist ? "The waitlist is empty" : "There are no participants yet"}>The list updates while this page is open.</Empty>} />
  );
}

function Moderation({ row, reload }: { row: Registration; reload: () => void }) {
  const path = { id: row.event_id };
  const kick = async () => {
    const reason = await ask({ title: "Remove this user?", body: "The seat becomes free. The user may join again.", confirm: "Remove", isDangerous: true, textLabel: "Reason" });
    if (reason === null) return;
    await api.post("/join/v1/events/{id}/kick", { path, body: { user_id: row.user_id, reason: reason || null } });
    showToast("The user was removed.");
    reload();
  };
  const ban = async () => {
    const reason = await ask({ title: "Ban this user?", body: "The user is removed and cannot join again until the ban is lifted.", confirm: "Ban", isDangerous: true, textLabel: "Reason" });
    if (reason === null) return;
    await api.post("/join/v1/events/{id}/ban", { path, body: { user_id: row.user_id, reason: reason || null } });
    showToast("The user was banned.");
    reload();
  };
  return <><ActionButton class="small" label="Remove" onRun={kick} /><ActionButton class="small danger" label="Ban" onRun={ban} /></>;
}

function Bans({ id }: { id: string }) {
  const list = usePages(`bans ${id}`, (page, signal) => api.get("/join/v1/events/{id}/bans", { path: { id }, query: page, signal }), LIST_POLL_MS);
  const lift = (userId: string) => async () => {
    await api.post("/join/v1/events/{id}/unban", { path: { id }, body: { user_id: userId } });
    showToast("The ban was lifted.");
    list.reload();
  };
  return (
    <ListView list={list} label="Bans" rowKey={(row) => row.id} columns={[
      { header: "User", primary: true, cell: (row) => <Identifier value={row.user_id} /> },
      { header: "Reason", cell: (row) => row.reason ?? <span class="muted">–</span> },
      { header: "By", cell: (row) => <MiddleTruncated text={describePrincipal(row.banned_by)} /> },
      { header: "Banned", cell: (row) => <Time at={row.created_at} /> },
      { header: "Until", cell: (row) => row.expires_at ? <Time at={row.expires_at} /> : "it is lifted" },
      { header: "Actions", actions: true, cell: (row) => <ActionButton class="small" label="Lift" onRun={lift(row.user_id)} /> },
    ]} empty={<Empty title="No user is banned" />} />
  );
}

function History({ id }: { id: string }) {
  const list = usePages(`history ${id}`, (page, signal) => api.get("/join/v1/events/{id}/history", { path: { id }, query: page, signal }), LIST_POLL_MS);
  return (
    <ListView list={list} label="History" rowKey={(row) => `${row.version} ${row.user_id ?? ""} ${row.action}`} columns={[
      { header: "Action", primary: true, cell: (row) => <strong>{row.action}</strong> },
      { header: "User", cell: (row) => row.user_id ? <Identifier value={row.user_id} /> : <span class="muted">–</span> },
      { header: "Change", cell: (row) => row.to ? `${row.from ?? "none"} → ${row.to}` : <span class="muted">–</span> },
      { header: "By", cell: (row) => row.user_id && row.actor === `user:${row.user_id}` ? "the user" : <MiddleTruncated text={describePrincipal(row.actor)} /> },
      { header: "Reason", cell: (row) => row.reason ?? <span class="muted">–</span> },
      { header: "When", cell: (row) => <Time at={row.at} /> },
    ]} empty={<Empty title="Nothing has happened yet" />} />
  );
}
