import { api } from "../api/client";
import type { ConsumerStatus, LogMessage, ParkedMessage } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Badge, Card, CodeBlock, Details, Identifier, Page, StateBadge, Tabs, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, SelectField, TextField } from "../components/form";
import { ListView, usePages } from "../components/list";
import { Table } from "../components/table";
import { showToast } from "../components/toasts";
import { formatNumber, formatSeconds, plural } from "../lib/format";
import { useLive, useLiveWithBackoff } from "../lib/live";
import { link, linkWithQuery, setQuery } from "../lib/router";
import type { PageProps } from "../pages";
import { consumerState } from "./overview-operator";

const POLL_MS = 3_000;
const TAIL_POLL_MS = 1_500;

export function LogPage({ parts, query }: PageProps) {
  const [tab = "", id] = parts;
  if (tab === "messages" && id !== undefined) return <LogMessagePage id={id} />;
  return (
    <Page title="Log and consumers" description="The append-only log, and who has read how far.">
      <Tabs label="Parts of the log" current={tab} tabs={[
        { id: "", label: "Consumers", href: link("log") },
        { id: "tail", label: "Live tail", href: link("log", "tail") },
        { id: "parked", label: "Parked messages", href: link("log", "parked") },
      ]} />
      {tab === "tail" ? <LiveTail query={query} /> : tab === "parked" ? <Parked query={query} /> : <Consumers />}
    </Page>
  );
}

function Consumers() {
  const live = useLive("consumers", (signal) => api.get("/admin/v1/consumers", { signal }), POLL_MS);
  return (
    <Card flush>
      <Loaded live={live}>
        {({ items }) => (
          <Table label="Consumers" rows={items} rowKey={(row) => row.consumer} columns={[
            { header: "Consumer", primary: true, cell: (row) => <code>{row.consumer}</code> },
            { header: "State", cell: (row) => <StateBadge state={consumerState(row)} /> },
            { header: "Lag", align: "right", cell: (row) => formatSeconds(row.lag_seconds) },
            { header: "Messages behind", align: "right", cell: (row) => formatNumber(row.lag_messages) },
            { header: "Parked", align: "right", cell: (row) => row.parked > 0 ? <a href={linkWithQuery({ consumer: row.consumer }, "log", "parked")}>{formatNumber(row.parked)}</a> : "0" },
            { header: "Dead letters", align: "right", cell: (row) => row.dead > 0 ? <a href={linkWithQuery({ consumer: row.consumer }, "dead-letters", "consumers")}>{formatNumber(row.dead)}</a> : "0" },
            { header: "Leases", cell: (row) => <Leases consumer={row} /> },
            { header: "Actions", actions: true, cell: (row) => <ConsumerActions consumer={row} reload={live.reload} /> },
          ]} />
        )}
      </Loaded>
    </Card>
  );
}

/** The shard workers and how many of the 16 shards each has leased. */
function Leases({ consumer }: { consumer: ConsumerStatus }) {
  if (consumer.workers.length === 0) return <Badge tone="warn">no worker</Badge>;
  const title = consumer.workers.map((worker) => `${worker.name}: ${plural(worker.shards, "shard")}`).join("\n");
  const shards = consumer.workers.reduce((total, worker) => total + worker.shards, 0);
  return <span class="truncate" title={title}>{consumer.workers.length === 1 ? consumer.workers[0]!.name : plural(consumer.workers.length, "worker")}, {plural(shards, "shard")}</span>;
}

function ConsumerActions({ consumer, reload }: { consumer: ConsumerStatus; reload: () => void }) {
  const path = { name: consumer.consumer };
  const reset = async () => {
    const body = "The consumer reads on from now. Messages in between are skipped; replay them if they are needed.";
    if (await ask({ title: `Reset ${consumer.consumer}?`, body, confirm: "Reset", isDangerous: true }) === null) return;
    await api.post("/admin/v1/consumers/{name}/reset", { path, body: {} });
    showToast(`${consumer.consumer} reads on from now.`);
    reload();
  };
  const drop = async () => {
    const body = "Its cursor and its parked messages are deleted. Retention no longer waits for it.";
    if (await ask({ title: `Delete ${consumer.consumer}?`, body, confirm: "Delete", isDangerous: true, typeToConfirm: consumer.consumer }) === null) return;
    await api.delete("/admin/v1/consumers/{name}", { path });
    showToast(`${consumer.consumer} was deleted.`);
    reload();
  };
  if (consumer.lapsed_at) return <ActionButton class="small" label="Reset" onRun={reset} />;
  return consumer.workers.length === 0 ? <ActionButton class="small danger" label="Delete" onRun={drop} /> : null;
}

function LiveTail({ query }: { query: URLSearchParams }) {
  const topic = query.get("topic") ?? "";
  const source = query.get("source") ?? "";
  const list = usePages<LogMessage>(`tail ${topic} ${source}`, (page, signal) =>
    api.get("/admin/v1/log", { query: { topic: topic || undefined, source: source || undefined, ...page }, signal }), TAIL_POLL_MS);
  return (
    <>
      <div class="filters">
        <TextField label="Topic" value={topic} onChange={(value) => setQuery({ topic: value })} placeholder="order.created" />
        <SelectField label="Source" value={source} onChange={(value) => setQuery({ source: value })} options={[
          { value: "", label: "All sources" }, ...["sql", "hub", "hub.system", "events", "joins", "identity", "progress", "notify", "pillarbox"].map((name) => ({ value: name, label: name })),
        ]} />
      </div>
      <Card title="Newest messages" flush actions={<Badge tone="good">live</Badge>}>
        <ListView list={list} label="Messages of the log" rowKey={(row) => row.event_id} columns={[
          { header: "Topic", primary: true, cell: (row) => <a href={link("log", "messages", row.event_id)}>{row.topic}</a> },
          { header: "Number", align: "right", cell: (row) => row.log_id },
          { header: "Source", cell: (row) => row.source },
          { header: "Tenant", cell: (row) => row.tenant },
          { header: "Key", cell: (row) => row.key ? <code class="truncate">{row.key}</code> : <span class="muted">–</span> },
          { header: "Posted", cell: (row) => <Time at={row.at} /> },
        ]} empty={<Empty title="No message">Messages appear here as soon as their transactions commit.</Empty>} />
      </Card>
    </>
  );
}

function Parked({ query }: { query: URLSearchParams }) {
  const consumer = query.get("consumer") ?? "";
  const list = usePages<ParkedMessage>(`parked ${consumer}`, (page, signal) =>
    api.get("/admin/v1/parked", { query: { consumer: consumer || undefined, ...page }, signal }), POLL_MS);
  const retry = (row: ParkedMessage) => async () => {
    await api.post("/admin/v1/parked/{place}/retry", { path: { place: row.place } });
    showToast("The consumer retries the message now.");
    list.reload();
  };
  const discard = (row: ParkedMessage) => async () => {
    const body = "The consumer skips the message, and later messages of its key go on.";
    if (await ask({ title: "Discard this message?", body, confirm: "Discard", isDangerous: true }) === null) return;
    await api.post("/admin/v1/parked/{place}/discard", { path: { place: row.place } });
    list.reload();
  };
  return (
    <>
      <div class="filters"><TextField label="Consumer" value={consumer} onChange={(value) => setQuery({ consumer: value })} placeholder="notify.mail" /></div>
      <Card flush>
        <ListView list={list} label="Parked messages" rowKey={(row) => String(row.place)} columns={[
          { header: "Topic", primary: true, cell: (row) => <a href={link("log", "messages", row.message.event_id)}>{row.message.topic}</a> },
          { header: "Consumer", cell: (row) => <code>{row.consumer}</code> },
          { header: "Attempts", align: "right", cell: (row) => row.attempts },
          { header: "Last error", cell: (row) => <span class="truncate" title={row.last_error}>{row.last_error}</span> },
          { header: "Next attempt", cell: (row) => <Time at={row.next_at} /> },
          { header: "Actions", actions: true, cell: (row) => row.discarded ? <span class="muted">discarded</span> : (
            <><ActionButton class="small" label="Retry now" onRun={retry(row)} /><ActionButton class="small danger" label="Discard" onRun={discard(row)} /></>
          ) },
        ]} empty={<Empty title="No parked message">A message that fails waits here for its retry.</Empty>} />
      </Card>
    </>
  );
}

function LogMessagePage({ id }: { id: string }) {
  const live = useLiveWithBackoff(`log-message ${id}`, (signal) => api.get("/admin/v1/log/{event_id}", { path: { event_id: id }, signal }), POLL_MS);
  return (
    <Page title={live.data?.topic ?? "Message"} parent={{ label: "Live tail", href: link("log", "tail") }} description={<Identifier value={id} />}>
      <Loaded live={live}>
        {(message) => (
          <div class="grid">
            <Card title="Message">
              <div class="stack">
                <Details entries={[
                  ["Number", message.log_id], ["Source", message.source], ["Tenant", message.tenant],
                  ["Key", message.key && <code>{message.key}</code>], ["Posted", <Time at={message.at} />],
                ]} />
                {message.payload !== undefined && <CodeBlock label="payload" value={message.payload} />}
              </div>
            </Card>
            <Card title="Consumers" flush>
              <Table label="Consumers" rows={message.consumers} rowKey={(row) => row.consumer} columns={[
                { header: "Consumer", primary: true, cell: (row) => <code>{row.consumer}</code> },
                { header: "Status", cell: (row) => <StateBadge state={row.status} title={row.last_error ?? undefined} /> },
                { header: "Attempts", align: "right", cell: (row) => row.attempts },
                { header: "Processed", cell: (row) => <Time at={row.sent_at} /> },
              ]} />
            </Card>
          </div>
        )}
      </Loaded>
    </Page>
  );
}
