import { api } from "../api/client";
import type { HubAttempt, HubMessage } from "../api/types";
import { AttemptEntries, KindBadge } from "../components/attempts";
import { Empty, Loaded } from "../components/async";
import { Card, Details, DueTime, Identifier, Page, StateBadge, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, SelectField } from "../components/form";
import { ListView, usePages } from "../components/list";
import { SubscriberField } from "../components/subscriber-field";
import type { Column } from "../components/table";
import { showToast } from "../components/toasts";
import { useLive } from "../lib/live";
import { useMayManage } from "../lib/permissions";
import { link, navigate, setQuery } from "../lib/router";
import type { PageProps } from "../pages";

const POLL_MS = 2_000;
/** The server searches the deliveries of every subscriber for the list of all, so it is loaded less often. */
const POLL_ALL_MS = 10_000;
const OUTCOMES = ["delivered", "pending", "failed", "dead"] as const;
type ListedOutcome = (typeof OUTCOMES)[number];

export function DeliveriesPage({ parts, query }: PageProps) {
  const [id] = parts;
  return id === undefined ? <DeliveryList query={query} /> : <DeliveryPage id={id} />;
}

function DeliveryList({ query }: { query: URLSearchParams }) {
  const subscriber = query.get("subscriber") ?? "";
  const outcome = OUTCOMES.find((name) => name === query.get("outcome"));
  return (
    <Page title="Deliveries" description="One event for one subscriber, with the outcome of the last time that it was sent. Newest first.">
      <div class="filters">
        <SubscriberField value={subscriber} onChange={(value) => setQuery({ subscriber: value })} />
        <SelectField label="Outcome" value={outcome ?? ""} onChange={(value) => setQuery({ outcome: value })}
          options={[{ value: "", label: "All outcomes" }, ...OUTCOMES.map((name) => ({ value: name, label: name }))]} />
      </div>
      <Card flush><Deliveries subscriber={subscriber} outcome={outcome} hasNames /></Card>
    </Page>
  );
}

interface DeliveriesProps {
  subscriber?: string;
  outcome?: ListedOutcome;
  /** Whether there is a column of the subscriber. */
  hasNames?: boolean;
}

/** The deliveries of one subscriber or of all, refreshed while they are shown. */
export function Deliveries({ subscriber = "", outcome, hasNames = false }: DeliveriesProps) {
  const list = usePages<HubMessage>(`deliveries ${subscriber} ${outcome}`, (page, signal) =>
    api.get("/hub/v1/messages", { query: { subscriber_id: subscriber || undefined, outcome, ...page }, signal }), subscriber === "" ? POLL_ALL_MS : POLL_MS);
  const columns: Column<HubMessage>[] = [
    { header: "Event", primary: true, cell: (row) => <a href={deliveryLink(row)}>{row.event_type ?? "unknown type"}</a> },
    { header: "Outcome", cell: (row) => <span class="row nowrap"><StateBadge state={row.outcome} title={row.last_error ?? undefined} /><KindBadge kind={row.kind} /></span> },
    { header: "Attempts", align: "right", cell: (row) => row.attempts },
    { header: "Response", cell: (row) => row.last_status ? `${row.last_status}` : row.last_error ?? <span class="muted">–</span> },
    { header: "Ordering key", cell: (row) => row.ordering_key ? <code class="truncate">{row.ordering_key}</code> : <span class="muted">–</span> },
    { header: "Next attempt", cell: (row) => <DueTime at={row.next_attempt_at} /> },
    { header: "Queued", cell: (row) => <Time at={row.created_at} /> },
  ];
  if (hasNames) {
    columns.splice(1, 0, { header: "Subscriber", cell: (row) => <a href={link("subscribers", row.subscriber_id)}>{row.subscriber_name}</a> });
  }
  return (
    <ListView list={list} label="Deliveries" columns={columns} rowKey={(row) => row.id ?? `${row.subscriber_id} ${row.received_at} ${row.created_at}`}
      empty={<Empty title="No delivery">{outcome === undefined ? "Deliveries appear here as soon as an event matches a subscriber." : `No delivery has the outcome ${outcome}.`}</Empty>} />
  );
}

function deliveryLink(message: HubMessage): string {
  return message.id ? link("deliveries", message.id) : link("events", message.event_id ?? "");
}

interface Delivery {
  message: HubMessage;
  attempts: HubAttempt[];
}

function DeliveryPage({ id }: { id: string }) {
  const live = useLive<Delivery>(`delivery ${id}`, async (signal) => {
    const [message, attempts] = await Promise.all([
      api.get("/hub/v1/messages/{id}", { path: { id }, signal }),
      api.get("/hub/v1/messages/{id}/attempts", { path: { id }, signal }),
    ]);
    return { message, attempts: attempts.items };
  }, POLL_MS);
  return (
    <Page title={live.data?.message.event_type ?? "Delivery"} parent={{ label: "Deliveries", href: link("deliveries") }} description={<Identifier value={id} />}
      actions={live.data && <DeliveryActions id={id} message={live.data.message} reload={live.reload} />}>
      <Loaded live={live}>
        {({ message, attempts }) => (
          <div class="grid">
            <Card title="Attempts">
              {attempts.length === 0 && !message.next_attempt_at ? <Empty title="No attempt yet">The message waits for its turn.</Empty> : (
                <ol class="timeline">
                  <li class="info"><strong>Posted</strong><div class="timeline-time"><Time at={message.received_at} /></div></li>
                  <AttemptEntries attempts={attempts} />
                  {message.next_attempt_at && <li class="warn"><strong>Next attempt</strong> <DueTime at={message.next_attempt_at} /></li>}
                </ol>
              )}
            </Card>
            <Card title="Message"><DeliveryDetails message={message} /></Card>
          </div>
        )}
      </Loaded>
    </Page>
  );
}

function DeliveryDetails({ message }: { message: HubMessage }) {
  return (
    <Details entries={[
      ["Outcome", <span class="row"><StateBadge state={message.outcome} /><KindBadge kind={message.kind} /></span>],
      ["Dead letter", message.dead_letter_id && <a href={link("dead-letters", message.dead_letter_id)}>Open the dead letter</a>],
      ["Blocked", message.blocks_lane && "Later messages with its ordering key wait until it is retried or discarded."],
      ["Event", message.event_id && <Identifier value={message.event_id} href={link("events", message.event_id)} />],
      ["Subscriber", <a href={link("subscribers", message.subscriber_id)}>{message.subscriber_name}</a>],
      ["Ordering key", message.lane && <code>{message.lane}</code>],
      ["Number within the key", message.seq],
      ["Replay", message.replay_id && <Identifier value={message.replay_id} href={link("replays", message.replay_id)} />],
      ["Last error", message.last_error],
      ["Posted", <Time at={message.received_at} />],
    ]} />
  );
}

function DeliveryActions({ id, message, reload }: { id: string; message: HubMessage; reload: () => void }) {
  if (!useMayManage()) return null;
  const retry = async (letter: string) => {
    await api.post("/hub/v1/dead-letters/{id}/retry", { path: { id: letter } });
    showToast("The message is sent again.");
    reload();
  };
  const resend = async () => {
    const body = "It is sent once more with the same id, whatever became of it before.";
    if (await ask({ title: `Send this message to ${message.subscriber_name ?? "its subscriber"} again?`, body, confirm: "Send again" }) === null) return;
    const replay = await api.post("/hub/v1/messages/{id}/resend", { path: { id } });
    navigate(link("replays", replay.id));
  };
  const giveUp = async () => {
    const body = "The message is not sent any more. It becomes a dead letter, which can be retried later.";
    if (await ask({ title: "Give up this message?", body, confirm: "Give up", isDangerous: true }) === null) return;
    await api.post("/hub/v1/messages/{id}/dead-letter", { path: { id } });
    showToast("The message becomes a dead letter.");
    reload();
  };
  const letter = message.dead_letter_id;
  const isOpen = message.outcome === "pending" || message.outcome === "failed";
  return (
    <>
      {letter ? <ActionButton class="primary" label="Retry" onRun={() => retry(letter)} /> : <ActionButton label="Send again" onRun={resend} />}
      {isOpen && <ActionButton class="danger" label="Give up" onRun={giveUp} />}
    </>
  );
}
