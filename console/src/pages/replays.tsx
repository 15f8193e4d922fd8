import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { Replay } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Card, Details, Identifier, Meter, Notice, Page, Stat, StateBadge, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, FormError, SelectField, TextField, useAction } from "../components/form";
import { ListView, usePages } from "../components/list";
import { SubscriberField, useSubscriberName } from "../components/subscriber-field";
import { describePrincipal, formatNumber, formatPercent, formatRate, formatSeconds, plural } from "../lib/format";
import { useLive } from "../lib/live";
import { useMayManage } from "../lib/permissions";
import { link, navigate } from "../lib/router";
import type { PageProps } from "../pages";

const LIST_POLL_MS = 3_000;
const POLL_MS = 1_000;

export function ReplaysPage({ parts }: PageProps) {
  const [id] = parts;
  if (id === undefined) return <ReplayList />;
  return id === "new" ? <NewReplayPage /> : <ReplayPage id={id} />;
}

function ReplayList() {
  const mayManage = useMayManage();
  const list = usePages<Replay>("replays", (page, signal) => api.get("/hub/v1/replays", { query: page, signal }), LIST_POLL_MS);
  const start = <a class="button primary" href={link("replays", "new")}>New replay</a>;
  return (
    <Page title="Replays" description="Jobs that send events again, beside the live messages." actions={mayManage && start}>
      <Card flush>
        <ListView list={list} label="Replays" rowKey={(row) => row.id} columns={[
          { header: "Replay", primary: true, cell: (row) => <a href={link("replays", row.id)}>{describe(row)}</a> },
          { header: "Subscriber", cell: (row) => row.subscriber_id ? row.subscriber_name ?? "deleted" : "all" },
          { header: "State", cell: (row) => <StateBadge state={row.state} /> },
          { header: "Progress", cell: (row) => <ReplayMeter replay={row} /> },
          { header: "Delivered", align: "right", cell: (row) => `${formatNumber(row.delivered)} of ${formatNumber(row.created)}` },
          { header: "Created", cell: (row) => <Time at={row.created_at} /> },
        ]} empty={<Empty title="No replay" actions={mayManage && start}>After an outage of a receiver, or for a new one, send the events of a time range again.</Empty>} />
      </Card>
    </Page>
  );
}

function describe(replay: Replay): string {
  if (replay.kind === "backfill") return "Backfill of a new subscriber";
  if (replay.events) return plural(replay.events, "chosen event");
  return replay.event_types.length > 0 ? replay.event_types.join(", ") : "All event types";
}

function ReplayMeter({ replay }: { replay: Replay }) {
  const isOver = replay.state === "finished";
  const share = isOver ? 1 : replay.done ?? 0;
  const tone = replay.state === "failed" || replay.dead > 0 ? "bad" : isOver && replay.waiting === 0 ? "good" : "neutral";
  return <Meter share={share} label={`Progress: ${formatPercent(share)}`} tone={tone} />;
}

function ReplayPage({ id }: { id: string }) {
  const live = useLive(`replay ${id}`, (signal) => api.get("/hub/v1/replays/{id}", { path: { id }, signal }), POLL_MS);
  return (
    <Page title={live.data ? describe(live.data) : "Replay"} parent={{ label: "Replays", href: link("replays") }} description={<Identifier value={id} />}
      actions={live.data && <ReplayActions replay={live.data} reload={live.reload} />}>
      <Loaded live={live}>{(replay) => <ReplayView replay={replay} />}</Loaded>
    </Page>
  );
}

function ReplayView({ replay }: { replay: Replay }) {
  // Chosen events have no range.
  const hasRange = !replay.events;
  return (
    <>
      {replay.error && <Notice tone="bad">{replay.error}</Notice>}
      {replay.waits_for && <Notice tone="warn">The replay waits for <a href={link("subscribers", replay.waits_for)}>a subscriber</a> that has too many messages left. Repair or disable it.</Notice>}
      <Card title="Progress" actions={<StateBadge state={replay.state} />}><ReplayMeter replay={replay} /></Card>
      <div class="stats">
        <Stat label="Messages created" value={formatNumber(replay.created)} hint={`${formatNumber(replay.matched)} matched`} />
        <Stat label="Delivered" value={formatNumber(replay.delivered)} />
        <Stat label="Waiting" value={formatNumber(replay.waiting)} />
        <Stat label="Dead" value={formatNumber(replay.dead)} tone={replay.dead > 0 ? "bad" : "neutral"} href={link("dead-letters")} />
        <Stat label="Rate" value={replay.rate === undefined || replay.rate === null ? "–" : formatRate(replay.rate)} />
        <Stat label="Remaining time" value={replay.eta_seconds === undefined || replay.eta_seconds === null ? "–" : formatSeconds(replay.eta_seconds)} />
      </div>
      <Card title="Selection">
        <Details entries={[
          ["Subscriber", replay.subscriber_id ? <a href={link("subscribers", replay.subscriber_id)}>{replay.subscriber_name ?? "a deleted subscriber"}</a> : "all subscribers"],
          ["Mode", hasRange && (replay.mode === "missed" ? "only events that the subscriber has not got" : "all events that match")],
          ["From", hasRange && replay.from && <Time at={replay.from} />],
          ["To", hasRange && (replay.to ? <Time at={replay.to} /> : replay.from && "when the replay was created")],
          ["Replayed up to", hasRange && replay.state !== "finished" && replay.position && <Time at={replay.position} />],
          ["Rate limit", replay.rate_per_second ? `${replay.rate_per_second}/s` : "none"],
          ["Requested by", describePrincipal(replay.requested_by)],
          ["Started", <Time at={replay.started_at} />],
          ["Ended", <Time at={replay.ended_at} />],
        ]} />
      </Card>
    </>
  );
}

function ReplayActions({ replay, reload }: { replay: Replay; reload: () => void }) {
  const path = { id: replay.id };
  const isActive = ["pending", "running", "paused"].includes(replay.state);
  if (!useMayManage() || !isActive) return null;
  const pause = async () => { await api.post("/hub/v1/replays/{id}/pause", { path }); reload(); };
  const resume = async () => { await api.post("/hub/v1/replays/{id}/resume", { path }); reload(); };
  const cancel = async () => {
    const body = "No further message is created. Messages that exist are still sent.";
    if (await ask({ title: "Cancel this replay?", body, confirm: "Cancel the replay", isDangerous: true }) === null) return;
    await api.post("/hub/v1/replays/{id}/cancel", { path });
    reload();
  };
  return (
    <>
      {replay.state === "paused" ? <ActionButton label="Resume" onRun={resume} /> : <ActionButton label="Pause" onRun={pause} />}
      <ActionButton class="danger" label="Cancel the replay" onRun={cancel} />
    </>
  );
}

function NewReplayPage() {
  const action = useAction();
  const [recipients, setRecipients] = useState("");
  const [subscriber, setSubscriber] = useState("");
  const [from, setFrom] = useState(() => toLocalInput(new Date(Date.now() - 3_600_000)));
  const [to, setTo] = useState("");
  const [types, setTypes] = useState("");
  const [mode, setMode] = useState("resend");
  const [rate, setRate] = useState("");
  const [count, setCount] = useState<{ matched: number; is_exact: boolean }>();

  const name = useSubscriberName(subscriber);
  const isChosen = recipients === "all" || (recipients === "one" && subscriber !== "");

  const request = (dryRun: boolean) => api.post("/hub/v1/replays", { body: {
    subscriber_id: recipients === "one" ? subscriber : undefined,
    from: from === "" ? undefined : new Date(from).toISOString(),
    to: to === "" ? undefined : new Date(to).toISOString(),
    event_types: types.trim() === "" ? undefined : types.split(/[,\s]+/).filter((type) => type !== ""),
    mode: mode === "missed" ? "missed" : "resend",
    rate_per_second: rate === "" ? undefined : Number(rate),
    dry_run: dryRun,
  } });
  const countMessages = async () => {
    const result = await request(true);
    if (!("is_exact" in result)) return undefined;
    setCount(result);
    return `${result.is_exact ? "" : "at least "}${plural(result.matched, "message")}`;
  };
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      const matched = await countMessages();
      const body = (
        <Details entries={[
          ["To", recipients === "all" ? "all subscribers" : name ?? subscriber],
          ["Events from", <Time at={new Date(from).toISOString()} />],
          ["Until", to === "" ? "now" : <Time at={new Date(to).toISOString()} />],
          ["Event types", types.trim() || "all"],
        ]} />
      );
      if (await ask({ title: `Send ${matched} again?`, body, confirm: "Start the replay" }) === null) return;
      const replay = await request(false);
      if ("id" in replay) navigate(link("replays", replay.id));
    });
  };
  return (
    <Page title="New replay" parent={{ label: "Replays", href: link("replays") }} description="Count shows how many messages would be sent, and sends nothing.">
      <form class="stack" onSubmit={submit}>
        <FormError action={action} shown={["/from", "/to", "/event_types", "/rate_per_second", "/subscriber_id"]} />
        <Card>
          <div class="form-grid">
            <SelectField label="Send to" value={recipients} onChange={setRecipients} options={[
              { value: "", label: "Choose" }, { value: "one", label: "One subscriber" }, { value: "all", label: "All subscribers" },
            ]} />
            {recipients === "one" && <SubscriberField value={subscriber} onChange={setSubscriber} all="Choose" error={action.errorOf("/subscriber_id")} />}
            <TextField label="From" type="datetime-local" required value={from} onChange={setFrom} error={action.errorOf("/from")} />
            <TextField label="To" type="datetime-local" value={to} onChange={setTo} error={action.errorOf("/to")} hint="Leave empty for the present time." />
            <TextField label="Event types" value={types} onChange={setTypes} error={action.errorOf("/event_types")} hint="Separated by commas. Leave empty for all." />
            <SelectField label="Mode" value={mode} onChange={setMode} options={[
              { value: "resend", label: "Send all that match again" }, { value: "missed", label: "Only what the subscriber has not got" },
            ]} />
            <TextField label="Messages per second" type="number" value={rate} onChange={setRate} error={action.errorOf("/rate_per_second")} hint="Leave empty for no limit." />
          </div>
        </Card>
        {count && <Notice tone="good">{count.is_exact ? "Exactly" : "At least"} <strong>{plural(count.matched, "message")}</strong> would be sent.</Notice>}
        <div class="row">
          <button type="button" class="button" disabled={action.isBusy || !isChosen} onClick={() => action.run(async () => void await countMessages())}>Count</button>
          <button type="submit" class="button primary" disabled={action.isBusy || !isChosen} title={isChosen ? undefined : "Choose to whom it is sent"}>Start the replay</button>
        </div>
      </form>
    </Page>
  );
}

/** The value of a `datetime-local` field, in the time zone of the browser. */
function toLocalInput(time: Date): string {
  return new Date(time.getTime() - time.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
