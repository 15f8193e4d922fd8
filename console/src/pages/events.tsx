import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { HubEvent } from "../api/types";
import { Empty } from "../components/async";
import { Card, Identifier, Page, StateBadge, Time } from "../components/basics";
import { Dialog } from "../components/dialog";
import { FormError, SelectField, TextField, useAction } from "../components/form";
import { ListView, usePages } from "../components/list";
import { showToast } from "../components/toasts";
import { parseEventId } from "../lib/event-id";
import { parseJsonField } from "../lib/json";
import { useMayPost } from "../lib/permissions";
import { link, navigate, setQuery } from "../lib/router";
import type { PageProps } from "../pages";
import { EventPage } from "./event";

const POLL_MS = 3_000;
const RANGES: Record<string, number> = { "15m": 15 * 60_000, "1h": 3_600_000, "24h": 86_400_000 };

export function EventsPage({ parts, query }: PageProps) {
  const [id] = parts;
  return id === undefined ? <EventList query={query} /> : <EventPage id={parseEventId(id) ?? id} />;
}

function EventList({ query }: { query: URLSearchParams }) {
  const [isPosting, setPosting] = useState(false);
  const mayPost = useMayPost();
  const type = query.get("type") ?? "";
  const range = query.get("range") ?? "";
  const status = query.get("status") === "rejected" ? "rejected" : undefined;
  const list = usePages<HubEvent>(`events ${type} ${range} ${status ?? ""}`, (page, signal) => {
    const from = RANGES[range] === undefined ? undefined : new Date(Math.floor((Date.now() - RANGES[range]) / 60_000) * 60_000).toISOString();
    return api.get("/hub/v1/events", { query: { event_type: type || undefined, from, status, ...page }, signal });
  }, POLL_MS);
  return (
    <Page title="Events" description="The posted events, newest first. Open an event to see its delivery to every subscriber."
      actions={mayPost && <button type="button" class="button primary" onClick={() => setPosting(true)}>Post an event</button>}>
      <Filters type={type} range={range} status={status ?? ""} />
      <Card flush>
        <ListView list={list} label="Events" rowKey={(row) => row.event_id} empty={<NoEvents isFiltered={type !== "" || range !== "" || status !== undefined} />} columns={[
          { header: "Type", primary: true, cell: (row) => <a href={link("events", row.event_id)}>{row.event_type}</a> },
          { header: "Event", cell: (row) => <Identifier value={row.event_id} /> },
          { header: "Ordering key", cell: (row) => row.ordering_key ? <code class="truncate">{row.ordering_key}</code> : <span class="muted">–</span> },
          { header: "Source", cell: (row) => row.source },
          { header: "Recipients", cell: (row) => <StateBadge state={row.outcome} /> },
          ...(status ? [{ header: "Reason", cell: (row: HubEvent) => <span class="truncate">{reasonOf(row)}</span> }] : []),
          { header: "Posted", cell: (row) => <Time at={row.received_at} /> },
        ]} />
      </Card>
      {isPosting && <PostDialog onClose={() => setPosting(false)} />}
    </Page>
  );
}

/** The first error of a rejected event. */
function reasonOf(event: HubEvent): string {
  const error = event.rejection?.errors[0];
  return error ? `${error.pointer} ${error.detail}` : "";
}

function Filters({ type, range, status }: { type: string; range: string; status: string }) {
  const [text, setText] = useState(type);
  const search = (event: Event) => {
    event.preventDefault();
    const value = text.trim();
    const id = parseEventId(value);
    if (id !== null) navigate(link("events", id));
    else setQuery({ type: value });
  };
  return (
    <form class="filters" role="search" onSubmit={search}>
      <TextField label="Type or event id" value={text} onChange={setText} placeholder="order.paid or evt_…" />
      <SelectField label="Time" value={range} onChange={(value) => setQuery({ range: value })} options={[
        { value: "", label: "Any time" }, { value: "15m", label: "Last 15 minutes" }, { value: "1h", label: "Last hour" }, { value: "24h", label: "Last 24 hours" },
      ]} />
      <SelectField label="Status" value={status} onChange={(value) => setQuery({ status: value })} options={[
        { value: "", label: "Any status" }, { value: "rejected", label: "Rejected" },
      ]} />
      <button type="submit" class="button">Search</button>
    </form>
  );
}

function NoEvents({ isFiltered }: { isFiltered: boolean }) {
  if (isFiltered) return <Empty title="No event matches">Try another type or a longer time.</Empty>;
  return (
    <Empty title="No event yet">
      Post one here, with <code>POST /hub/v1/events</code>, or in SQL with <code>select pillarbox.post(…)</code>.
    </Empty>
  );
}

function PostDialog({ onClose }: { onClose: () => void }) {
  const [type, setType] = useState("order.created");
  const [key, setKey] = useState("");
  const [payload, setPayload] = useState('{\n  "id": 1\n}');
  const action = useAction();
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      const body = { event_type: type, ordering_key: key || undefined, payload: parseJsonField(payload, "/payload") };
      const accepted = await api.post("/hub/v1/events", { body });
      showToast("The event was accepted.");
      onClose();
      navigate(link("events", accepted.event_id));
    });
  };
  return (
    <Dialog title="Post an event" onClose={onClose}>
      <form onSubmit={submit}>
        <h2 class="dialog-head">Post an event</h2>
        <div class="dialog-body form">
          <FormError action={action} shown={["/event_type", "/ordering_key", "/payload"]} />
          <TextField label="Type" required value={type} onChange={setType} error={action.errorOf("/event_type")} />
          <TextField label="Ordering key" value={key} onChange={setKey} error={action.errorOf("/ordering_key")} hint="Events with the same key are delivered in order. Optional." />
          <TextField label="Payload" multiline rows={6} value={payload} onChange={setPayload} error={action.errorOf("/payload")} />
        </div>
        <div class="dialog-foot">
          <button type="button" class="button" onClick={onClose}>Cancel</button>
          <button type="submit" class="button primary" disabled={action.isBusy}>Post</button>
        </div>
      </form>
    </Dialog>
  );
}
