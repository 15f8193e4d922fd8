import { useRef } from "preact/hooks";
import { ApiError, api } from "../api/client";
import { caller } from "../api/session";
import type { HubAttempt, HubEventWithOutcomes, HubOutcome } from "../api/types";
import { AttemptEntries } from "../components/attempts";
import { Empty, Loaded } from "../components/async";
import { Card, CodeBlock, Details, DueTime, Identifier, Notice, Page, StateBadge, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton } from "../components/form";
import { Table } from "../components/table";
import { showToast } from "../components/toasts";
import { plural } from "../lib/format";
import { useLive, useLiveWithBackoff, type Live } from "../lib/live";
import { useMayManage } from "../lib/permissions";
import { link, navigate } from "../lib/router";
import { useStore } from "../lib/store";

const POLL_MS = 2_000;
/** Attempts are loaded for so many subscribers; the others are listed with their outcome. */
const TIMELINES_MAX = 20;

interface DeliveryHistory {
  event: HubEventWithOutcomes;
  attempts: Map<string, HubAttempt[]>;
}

export function EventPage({ id }: { id: string }) {
  const history = useDeliveryHistory(id);
  const mayManage = useMayManage();
  const resend = async () => {
    const sent = history.data?.event.outcomes.filter(({ attempts }) => attempts > 0).length ?? 0;
    const body = `It goes, with the same id, to every subscriber that it matches now. Until now it was sent to ${plural(sent, "subscriber")}.`;
    if (await ask({ title: "Send this event again?", body, confirm: "Send again" }) === null) return;
    const replay = await api.post("/hub/v1/replays", { body: { event_ids: [id] } });
    showToast("The event is being sent again to all its subscribers.");
    if ("id" in replay) navigate(link("replays", replay.id));
  };
  const retry = async () => {
    await api.post("/hub/v1/events/{id}/retry", { path: { id } });
    showToast("The event is accepted now and will be sent.");
    history.reload();
  };
  const isRejected = history.data?.event.status === "rejected";
  return (
    <Page title={history.data?.event.event_type ?? "Event"} parent={{ label: "Events", href: link("events") }} description={<Identifier value={id} />}
      actions={mayManage && (isRejected ? <ActionButton label="Check again" onRun={retry} /> : <ActionButton label="Send again" onRun={resend} />)}>
      <Loaded live={history}>{(data) => <EventHistory history={data} />}</Loaded>
      <LogConsumers id={id} />
    </Page>
  );
}

/** The event and its attempts. Without a change, a poll is one request, and the next one follows later. */
function useDeliveryHistory(id: string): Live<DeliveryHistory> {
  const last = useRef<DeliveryHistory>();
  const load = async (signal: AbortSignal) => (last.current = await loadHistory(id, last.current, signal));
  return useLiveWithBackoff(`event ${id}`, load, POLL_MS, ({ event }) => untilNextAttempt(event));
}

/** The time until something is due to happen, with a moment for the attempt itself. */
function untilNextAttempt(event: HubEventWithOutcomes): number {
  const pauses = event.outcomes.flatMap(({ next_attempt_at: at }) => (at ? [Date.parse(at) - Date.now() + POLL_MS] : []));
  // What is overdue waits for something else, such as a paused subscriber.
  return Math.min(Infinity, ...pauses.filter((pause) => pause > POLL_MS));
}

/** Loads the event, and the attempts of the messages that were sent since `previous`. */
async function loadHistory(id: string, previous: DeliveryHistory | undefined, signal: AbortSignal): Promise<DeliveryHistory> {
  const event = await api.get("/hub/v1/events/{id}", { path: { id }, signal });
  const before = new Map(previous?.event.outcomes.map((outcome) => [outcome.message_id, sendingsOf(outcome)]));
  const sent = event.outcomes.filter((outcome) => outcome.message_id && outcome.attempts > 0).slice(0, TIMELINES_MAX);
  const loaded = await Promise.all(sent.map(async (outcome): Promise<[string, HubAttempt[]]> => {
    const message = outcome.message_id ?? "";
    const known = previous?.attempts.get(message);
    if (known !== undefined && before.get(message) === sendingsOf(outcome)) return [message, known];
    const found = await api.get("/hub/v1/messages/{id}/attempts", { path: { id: message }, signal });
    return [message, found.items];
  }));
  return { event, attempts: new Map(loaded) };
}

/** Changes with each attempt. A replay counts its attempts from 1, so their number alone may be the same. */
function sendingsOf(outcome: HubOutcome): string {
  return `${outcome.attempts} ${outcome.last_attempt_at} ${outcome.outcome}`;
}

function EventHistory({ history: { event, attempts } }: { history: DeliveryHistory }) {
  return (
    <div class="grid">
      <div class="stack">
        <Card title="Delivery history">
          <ol class="timeline">
            <li class="info">
              <strong>Posted</strong> by <code>{event.source}</code>
              <div class="timeline-time"><Time at={event.received_at} /></div>
            </li>
            <li class={event.status === "pending" ? "" : "info"}>
              <strong>{fanOutText(event)}</strong>
            </li>
            {event.status === "completed" && event.outcomes.length > 0 && <li class="good"><strong>Completed</strong>: every message is delivered or dead</li>}
          </ol>
        </Card>
        {event.rejection && (
          <Card title="Why it is rejected">
            <Table label="Errors" rows={event.rejection.errors} rowKey={(error) => error.pointer + error.detail} columns={[
              { header: "Where", primary: true, cell: (error) => <code>{error.pointer}</code> },
              { header: "Error", cell: (error) => error.detail },
            ]} />
          </Card>
        )}
        {event.outcomes.length === 0
          ? event.status !== "pending" && event.status !== "rejected" && <Card><NoSubscriber event={event} /></Card>
          : event.outcomes.map((outcome) => (
            <SubscriberHistory key={outcome.subscriber_id} outcome={outcome} attempts={attempts.get(outcome.message_id ?? "") ?? []} />
          ))}
      </div>
      <Card title="Event">
        <div class="stack">
          <Details entries={[
            ["Type", <code>{event.event_type}</code>],
            ["Status", <StateBadge state={event.status} />],
            ["Ordering key", event.ordering_key ? <code>{event.ordering_key}</code> : "none"],
            ["Posted", <Time at={event.received_at} />],
          ]} />
          {event.payload === undefined ? <Notice>The payload is no longer stored.</Notice> : <CodeBlock label="payload" value={event.payload} />}
        </div>
      </Card>
    </div>
  );
}

function fanOutText(event: HubEventWithOutcomes): string {
  if (event.status === "pending") return "Waits for fan-out to its subscribers and streams";
  if (event.rejection) return event.rejection.version === undefined ? "Rejected: it is not sent" : `Rejected by version ${event.rejection.version} of its event type: it is not sent`;
  if (event.outcome === "unmatched") return "Matched no subscriber and no stream";
  if (event.outcomes.length === 0) return "Matched a stream, or subscribers that were deleted since";
  return `Matched ${plural(event.outcomes.filter(({ outcome }) => outcome !== "filtered" && outcome !== "inactive").length, "subscriber")}`;
}

function NoSubscriber({ event }: { event: HubEventWithOutcomes }) {
  if (event.outcome === "matched") {
    return <Empty title="No subscriber that still exists">Either only <a href={link("streams")}>streams</a> contain the event, or what it matched was deleted since.</Empty>;
  }
  return (
    <Empty title="No subscriber and no stream for this type">
      Create a subscriber for <code>{event.event_type}</code>, then send the event again. A stream contains only events that are posted after it was created.
    </Empty>
  );
}

function SubscriberHistory({ outcome, attempts }: { outcome: HubOutcome; attempts: HubAttempt[] }) {
  const title = <a href={link("subscribers", outcome.subscriber_id)}>{outcome.name}</a>;
  return (
    <Card title={title} actions={<StateBadge state={outcome.outcome} />}>
      <ol class="timeline">
        <AttemptEntries attempts={attempts} />
        {outcome.next_attempt_at && <li class="warn"><strong>Next attempt</strong> <DueTime at={outcome.next_attempt_at} /></li>}
        {outcome.outcome === "pending" && <li class="info"><strong>Waits</strong> for its turn</li>}
        {outcome.outcome === "dead" && <li class="bad"><strong>Given up</strong>: {outcome.dead_letter_id ? <a href={link("dead-letters", outcome.dead_letter_id)}>open the dead letter</a> : "its dead letter was discarded"}{outcome.blocks_lane && "; later messages with its ordering key wait"}</li>}
        {outcome.outcome === "filtered" && <li>The filter of the subscriber does not match the payload.</li>}
        {outcome.outcome === "inactive" && <li>The subscriber was disabled when the event was posted.</li>}
      </ol>
      {outcome.message_id && <a href={link("deliveries", outcome.message_id)}>Open the delivery</a>}
    </Card>
  );
}

/** What the consumers of the log did with the message; for operators. */
function LogConsumers({ id }: { id: string }) {
  const signedIn = useStore(caller);
  const isOperator = signedIn?.is_operator === true;
  const live = useLive(`log-message ${id}`, async (signal) => {
    if (!isOperator) return null;
    try {
      return await api.get("/admin/v1/log/{event_id}", { path: { event_id: id }, signal });
    } catch (cause) {
      if (cause instanceof ApiError && cause.status === 404) return null;
      throw cause;
    }
  });
  if (!live.data || live.data.consumers.length === 0) return null;
  return (
    <Card title="Consumers of the log" flush>
      <Table label="Consumers of the log" rows={live.data.consumers} rowKey={(row) => row.consumer} columns={[
        { header: "Consumer", primary: true, cell: (row) => <code>{row.consumer}</code> },
        { header: "Status", cell: (row) => <StateBadge state={row.status} /> },
        { header: "Attempts", align: "right", cell: (row) => row.attempts },
        { header: "Processed", cell: (row) => <Time at={row.sent_at} /> },
        { header: "Last error", cell: (row) => row.last_error ?? <span class="muted">–</span> },
      ]} />
    </Card>
  );
}
