import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { Stream, StreamWithState } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Badge, Card, CodeBlock, Details, Page, Stat, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, Checkbox, FormError, SelectField, TextField, useAction } from "../components/form";
import { ListView, usePages } from "../components/list";
import { Table } from "../components/table";
import { showToast } from "../components/toasts";
import { formatNumber, formatSeconds, plural } from "../lib/format";
import { parseEventId } from "../lib/event-id";
import { parseJsonField } from "../lib/json";
import { useLive, useNow } from "../lib/live";
import { useMayManage } from "../lib/permissions";
import { link, navigate } from "../lib/router";
import type { PageProps } from "../pages";
import { EventTypeList } from "./subscribers";

const POLL_MS = 3_000;

export function StreamsPage({ parts }: PageProps) {
  const [name] = parts;
  if (name === undefined) return <StreamList />;
  return name === "new" ? <NewStreamPage /> : <StreamPage name={name} />;
}

function StreamList() {
  const mayManage = useMayManage();
  const list = usePages<Stream>("streams", (page, signal) => api.get("/hub/v1/streams", { query: page, signal }));
  const create = <a class="button primary" href={link("streams", "new")}>Create a stream</a>;
  return (
    <Page title="Streams" description="Events that consumers pull, instead of receiving webhooks." actions={mayManage && create}>
      <Card flush>
        <ListView list={list} label="Streams" rowKey={(row) => row.id} columns={[
          { header: "Name", primary: true, cell: (row) => <a href={link("streams", row.name)}>{row.name}</a> },
          { header: "Event types", cell: (row) => <EventTypeList types={row.event_types} /> },
          { header: "Filter", cell: (row) => row.filter && row.filter.length > 0 ? plural(row.filter.length, "condition") : <span class="muted">–</span> },
          { header: "Created", cell: (row) => <Time at={row.created_at} /> },
        ]} empty={<Empty title="No stream" actions={mayManage && create}>A consumer that cannot receive requests, or that decides itself how fast it reads, pulls a stream.</Empty>} />
      </Card>
    </Page>
  );
}

function StreamPage({ name }: { name: string }) {
  const live = useLive(`stream ${name}`, (signal) => api.get("/hub/v1/streams/{name}", { path: { name }, signal }), POLL_MS);
  const mayManage = useMayManage();
  const remove = async () => {
    const body = "Its readers get no further events. This cannot be undone.";
    if (await ask({ title: `Delete ${name}?`, body, confirm: "Delete", isDangerous: true, typeToConfirm: name }) === null) return;
    await api.delete("/hub/v1/streams/{name}", { path: { name } });
    showToast(`${name} was deleted.`);
    navigate(link("streams"));
  };
  return (
    <Page title={name} parent={{ label: "Streams", href: link("streams") }} actions={live.data && mayManage && <ActionButton class="danger" label="Delete" onRun={remove} />}>
      <Loaded live={live}>{(stream) => <StreamView stream={stream} reload={live.reload} />}</Loaded>
    </Page>
  );
}

/** Those whose lease has not ended: the others are also shown for a while. */
export function activeReaders(readers: StreamWithState["readers"], now: number): StreamWithState["readers"] {
  return readers.filter((reader) => Date.parse(reader.lease_until) > now);
}

function StreamView({ stream, reload }: { stream: StreamWithState; reload: () => void }) {
  const mayManage = useMayManage();
  const active = activeReaders(stream.readers, useNow());
  const lapsed = stream.parts.filter((part) => part.lapsed).length;
  return (
    <>
      <div class="stats">
        <Stat label="Messages to read" value={formatNumber(stream.lag.messages)} tone={stream.lag.messages > 0 && active.length === 0 ? "warn" : "neutral"} />
        <Stat label="Oldest of them" value={stream.lag.messages === 0 ? "–" : formatSeconds(stream.lag.seconds)} />
        <Stat label="Readers" value={formatNumber(active.length)} hint="with a lease" />
        <Stat label="Lapsed parts" value={formatNumber(lapsed)} tone={lapsed > 0 ? "bad" : "neutral"} hint={lapsed > 0 ? "unread messages were dropped: seek to continue" : "of 16 have lost unread messages"} />
      </div>
      <div class="grid">
        <div class="stack">
          <Card title="Readers" flush>
            {stream.readers.length === 0 ? <Empty title="No reader">A reader appears here when it pulls.</Empty> : (
              <Table label="Readers" rows={stream.readers} rowKey={(row) => row.reader} columns={[
                { header: "Reader", primary: true, cell: (row) => <code>{row.reader}</code> },
                { header: "Parts", cell: (row) => row.parts.join(", ") },
                { header: "Lease", cell: (row) => <>{active.includes(row) ? "until " : "ended "}<Time at={row.lease_until} /></> },
              ]} />
            )}
          </Card>
          <Card title="Parts" flush>
            <Table label="Parts" compact rows={stream.parts} rowKey={(row) => String(row.part)} columns={[
              { header: "Part", primary: true, cell: (row) => row.part },
              { header: "To read", align: "right", cell: (row) => formatNumber(row.lag_messages) },
              { header: "Oldest", cell: (row) => <Time at={row.oldest_at} /> },
              { header: "Reader", cell: (row) => row.lapsed ? <Badge tone="bad">lapsed</Badge> : row.reader ? <code>{row.reader}</code> : <span class="muted">–</span> },
            ]} />
          </Card>
        </div>
        <div class="stack">
          <Card title="Stream">
            <div class="stack">
              <Details entries={[
                ["Event types", <EventTypeList types={stream.event_types} />],
                ["Ordering key", stream.ordering_key ? <code>{stream.ordering_key}</code> : "that of the event"],
                ["Created", <Time at={stream.created_at} />],
              ]} />
              {stream.filter && stream.filter.length > 0 && <CodeBlock label="filter" value={stream.filter} />}
              <CodeBlock label="how to pull" value={`curl ${location.origin}/hub/v1/streams/${stream.name}/pull \\\n  -H "authorization: Bearer $KEY" \\\n  -H 'content-type: application/json' \\\n  -d '{"reader":"worker-1","wait_ms":20000}'`} />
            </div>
          </Card>
          {mayManage && <Seek name={stream.name} reload={reload} />}
        </div>
      </div>
    </>
  );
}

function Seek({ name, reload }: { name: string; reload: () => void }) {
  const [target, setTarget] = useState("time");
  const [time, setTime] = useState("");
  const [event, setEvent] = useState("");
  const [force, setForce] = useState(false);
  const action = useAction();
  const submit = (submitted: Event) => {
    submitted.preventDefault();
    void action.run(async () => {
      const body = target === "time" ? { time: time === "" ? undefined : new Date(time).toISOString() }
        : target === "event" ? { event_id: parseEventId(event) ?? event.trim() }
          : { position: target === "oldest" ? "oldest" as const : "newest" as const };
      const moved = await api.post("/hub/v1/streams/{name}/seek", { path: { name }, body: { ...body, force } });
      showToast(`Moved: ${plural(moved.lag.messages, "message")} to read.`);
      reload();
    });
  };
  return (
    <Card title="Move the position">
      <form class="form" onSubmit={submit}>
        <FormError action={action} shown={["/time", "/event_id"]} />
        <SelectField label="To" value={target} onChange={setTarget} options={[
          { value: "time", label: "A time" }, { value: "event", label: "After an event" }, { value: "oldest", label: "The oldest event" }, { value: "newest", label: "The newest event" },
        ]} />
        {target === "time" && <TextField label="Time" type="datetime-local" required value={time} onChange={setTime} error={action.errorOf("/time")} />}
        {target === "event" && <TextField label="Event" required value={event} onChange={setEvent} error={action.errorOf("/event_id")} placeholder="evt_… or a UUID" />}
        <Checkbox label="End the leases of readers" checked={force} onChange={setForce} />
        <div class="row"><button type="submit" class="button" disabled={action.isBusy}>Move</button></div>
      </form>
    </Card>
  );
}

function NewStreamPage() {
  const [name, setName] = useState("");
  const [types, setTypes] = useState("*");
  const [filter, setFilter] = useState("");
  const [orderingKey, setOrderingKey] = useState("");
  const action = useAction();
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      const created = await api.post("/hub/v1/streams", { body: {
        name,
        event_types: types.split(/[,\s]+/).filter((type) => type !== ""),
        filter: filter.trim() === "" ? undefined : parseJsonField(filter, "/filter") as Stream["filter"],
        ordering_key: orderingKey === "" ? undefined : orderingKey,
      } });
      navigate(link("streams", created.name));
    });
  };
  return (
    <Page title="New stream" parent={{ label: "Streams", href: link("streams") }} description="It contains the events that are posted after it was created.">
      <form class="stack" onSubmit={submit}>
        <FormError action={action} shown={["/name", "/event_types", "/filter", "/ordering_key"]} />
        <Card>
          <div class="form">
            <TextField label="Name" required value={name} onChange={setName} error={action.errorOf("/name")} placeholder="orders" />
            <TextField label="Event types" required value={types} onChange={setTypes} error={action.errorOf("/event_types")} hint="Separated by commas: exact types, order.*, or * for all." />
            <TextField label="Filter" multiline value={filter} onChange={setFilter} error={action.errorOf("/filter")}
              hint={<>JSON, all conditions must hold: <code>{'[{"pointer":"/amount","op":"gte","value":100}]'}</code>. Leave empty for all events.</>} />
            <TextField label="Ordering key" value={orderingKey} onChange={setOrderingKey} error={action.errorOf("/ordering_key")} hint="A JSON pointer into the payload. Leave empty for the event's own key." />
          </div>
        </Card>
        <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>Create</button></div>
      </form>
    </Page>
  );
}
