import { api } from "../api/client";
import type { HubAttempt, HubMessage } from "../api/types";
import { AttemptEntries } from "../components/attempts";
import { Empty, Loaded } from "../components/async";
import { Card, Details, Identifier, Page, StateBadge, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, SelectField } from "../components/form";
import { ListView, usePages } from "../components/list";
import type { Column } from "../components/table";
import { showToast } from "../components/toasts";
import { useLive } from "../lib/live";
import { useMayManage } from "../lib/permissions";
import { link, navigate, setQuery } from "../lib/router";
import { subscriberOptions, useSubscriberNames } from "../lib/subscribers";
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
  const names = useSubscriberNames();
  return (
    <Page title="Deliveries" description="One event for one subscriber, newest first.">
      <div class="filters">
        <SelectField label="Subscriber" value={subscriber} onChange={(value) => setQuery({ subscriber: value })} options={subscriberOptions(names, "All subscribers")} />
        <SelectField label="Outcome" value={outcome ?? ""} onChange={(value) => setQuery({ outcome: value })}
          options={[{ value: "", label: "All outcomes" }, ...OUTCOMES.map((name) => ({ value: name, label: name }))]} />
      </div>
      <Card flush><Deliveries subscriber={subscriber} outcome={outcome} names={names} /></Card>
    </Page>
  );
}

interface DeliveriesProps {
  subscriber?: string;
  outcome?: ListedOutcome;
  /** Without names the column of the subscriber is left out. */
  names?: Map<string, string>;
}

/** The deliveries of one subscriber or of all, refreshed while they are shown. */
export function Deliveries({ subscriber = "", outcome, names }: DeliveriesProps) {
  const list = usePages<HubMessage>(`deliveries ${subscriber} ${outcome}`, (page, signal) =>
    api.get("/hub/v1/messages", { query: { subscriber_id: subscriber || undefined, outcome, ...page }, signal }), subscriber === "" ? POLL_ALL_MS : POLL_MS);
  const columns: Column<HubMessage>[] = [
    { header: "Event", primary: true, cell: (row) => <a href={deliveryLink(row)}>{row.event_type ?? "unknown type"}</a> },
    { header: "Outcome", cell: (row) => <StateBadge state={row.outcome} title={row.last_error ?? undefined} /> },
    { header: "Attempts", align: "right", cell: (row) => row.attempts },
    { header: "Response", cell: (row) => row.last_status ? `${row.last_status}` : row.last_error ?? <span class="muted">–</span> },
    { header: "Ordering key", cell: (row) => row.ordering_key ? <code class="truncate">{row.ordering_key}</code> : <span class="muted">–</span> },
    { header: "Next attempt", cell: (row) => <Time at={row.next_attempt_at} /> },
    { header: "Created", cell: (row) => <Time at={row.created_at} /> },
  ];
  if (names !== undefined) {
    const nameOf = (row: HubMessage) => names.get(row.subscriber_id) ?? row.subscriber_id.slice(0, 8);
    columns.splice(1, 0, { header: "Subscriber", cell: (row) => <a href={link("subscribers", row.subscriber_id)}>{nameOf(row)}</a> });
  }
  return (
    <ListView list={list} label="Deliveries" columns={columns} rowKey={(row) => `${row.id ?? row.event_id} ${row.retry_of ?? ""} ${row.replay_id ?? ""}`}
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
  const names = useSubscriberNames();
  return (
    <Page title={live.data?.message.event_type ?? "Delivery"} parent={{ label: "Deliveries", href: link("deliveries") }} description={<Identifier value={id} />}
      actions={live.data && <DeliveryActions id={id} message={live.data.message} reload={live.reload} />}>
      <Loaded live={live}>
        {({ message, attempts }) => (
          <div class="grid">
            <Card title="Attempts">
              {attempts.length === 0 && !message.next_attempt_at ? <Empty title="No attempt yet">The message waits for its turn.</Empty> : (
                <ol class="timeline">
                  <li class="info"><strong>Created</strong><div class="timeline-time"><Time at={message.created_at} /></div></li>
                  <AttemptEntries attempts={attempts} />
                  {message.next_attempt_at && <li class="warn"><strong>Next attempt</strong> <Time at={message.next_attempt_at} /></li>}
                </ol>
              )}
            </Card>
            <Card title="Message"><DeliveryDetails message={message} name={names.get(message.subscriber_id)} /></Card>
          </div>
        )}
      </Loaded>
    </Page>
  );
}

function DeliveryDetails({ message, name }: { message: HubMessage; name: string | undefined }) {
  return (
    <Details entries={[
      ["Outcome", <StateBadge state={message.outcome} />],
      ["Event", message.event_id && <Identifier value={message.event_id} href={link("events", message.event_id)} />],
      ["Subscriber", <a href={link("subscribers", message.subscriber_id)}>{name ?? message.subscriber_id}</a>],
      ["Lane", message.lane && <code>{message.lane}</code>],
      ["Number in lane", message.seq],
      ["Replay", message.replay_id && <a href={link("replays", message.replay_id)}>{message.replay_id}</a>],
      ["Last error", message.last_error],
      ["Posted", <Time at={message.received_at} />],
    ]} />
  );
}

function DeliveryActions({ id, message, reload }: { id: string; message: HubMessage; reload: () => void }) {
  if (!useMayManage()) return null;
  const resend = async () => {
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
  const isOpen = message.outcome === "pending" || message.outcome === "failed";
  return (
    <>
      <ActionButton label="Send again" onRun={resend} />
      {isOpen && <ActionButton class="danger" label="Give up" onRun={giveUp} />}
    </>
  );
}
