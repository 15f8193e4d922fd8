import { useRef, useState } from "preact/hooks";
import { ApiError, api } from "../api/client";
import { caller } from "../api/session";
import type { ChosenDeadLetters, DeadLetter, HubAttempt } from "../api/types";
import { AttemptEntries } from "../components/attempts";
import { Empty, Loaded } from "../components/async";
import { Badge, Card, CodeBlock, Details, Identifier, Page, Tabs, Time } from "../components/basics";
import { BulkAction, type BulkStep } from "../components/bulk";
import { ask, type Question } from "../components/dialog";
import { ActionButton, SelectField, TextField } from "../components/form";
import { GivenUpField, givenUpPeriod, givenUpRange, startOf, type GivenUpPeriod } from "../components/given-up";
import { ListView, usePages } from "../components/list";
import { SubscriberField } from "../components/subscriber-field";
import { showToast } from "../components/toasts";
import { atLeast, describePrincipal } from "../lib/format";
import { useLive, useLiveWithBackoff } from "../lib/live";
import { useMayManage } from "../lib/permissions";
import { link, navigate, setQuery } from "../lib/router";
import { useStore } from "../lib/store";
import type { PageProps } from "../pages";
import { ConsumerDeadLetters } from "./consumer-dead-letters";

const POLL_MS = 3_000;
const REASONS: DeadLetter["reason"][] = ["exhausted", "refused", "gone", "manual", "expired"];
/** How many dead letters a question counts. */
const COUNTED_MAX = 100;

interface Selection {
  subscriber_id?: string;
  event_type?: string;
  reason?: DeadLetter["reason"];
  from?: string;
}

export function DeadLettersPage({ parts, query }: PageProps) {
  const [id] = parts;
  const isOperator = useStore(caller)?.is_operator === true;
  if (id !== undefined && id !== "consumers") return <DeadLetterPage id={id} />;
  return (
    <Page title="Dead letters" description="Messages that were given up. Repair the cause, then retry them.">
      {isOperator && (
        <Tabs label="Kinds of dead letters" current={id ?? ""} tabs={[
          { id: "", label: "Webhooks", href: link("dead-letters") },
          { id: "consumers", label: "Consumers of the log", href: link("dead-letters", "consumers") },
        ]} />
      )}
      {id === "consumers" ? <ConsumerDeadLetters query={query} /> : <WebhookDeadLetters query={query} />}
    </Page>
  );
}

function WebhookDeadLetters({ query }: { query: URLSearchParams }) {
  const mayManage = useMayManage();
  const subscriber = query.get("subscriber") ?? "";
  const type = query.get("type") ?? "";
  const reason = REASONS.find((name) => name === query.get("reason"));
  const retried = query.get("retried") ?? "false";
  const period = givenUpPeriod(query);
  const select = (): Selection => ({
    subscriber_id: subscriber || undefined, event_type: type || undefined, reason, from: startOf(period),
  });
  const list = usePages<DeadLetter>(`dead-letters ${subscriber} ${type} ${reason} ${retried} ${period.value}`, (page, signal) =>
    api.get("/hub/v1/dead-letters", { query: { ...select(), retried: retried === "" ? undefined : retried === "true", ...page }, signal }), POLL_MS);
  const isEmpty = (list.data?.items.length ?? 0) === 0;
  return (
    <>
      <Filters subscriber={subscriber} type={type} reason={reason ?? ""} retried={retried} period={period} />
      <Card flush title="Messages to subscribers" actions={mayManage && <BulkActions select={select} isHidden={isEmpty || retried === "true"} reload={list.reload} />}>
        <ListView list={list} label="Dead letters" rowKey={(row) => row.id} columns={[
          { header: "Event", primary: true, cell: (row) => <a href={link("dead-letters", row.id)}>{row.event_type ?? "unknown type"}</a> },
          { header: "Subscriber", cell: (row) => <a href={link("subscribers", row.subscriber_id)}>{row.subscriber_name}</a> },
          { header: "Reason", cell: (row) => <Badge tone="bad">{row.reason}</Badge> },
          { header: "Detail", cell: (row) => <span class="truncate" title={row.detail}>{row.detail}</span> },
          { header: "Attempts", align: "right", cell: (row) => row.attempts },
          { header: "Given up", cell: (row) => <Time at={row.moved_to_dlq_at} /> },
          { header: "Actions", actions: true, cell: (row) => <RowActions letter={row} reload={list.reload} /> },
        ]} empty={<Empty title="No dead letter">{retried === "false" ? "Nothing was given up, or everything was retried." : "No dead letter matches."}</Empty>} />
      </Card>
    </>
  );
}

interface FiltersProps {
  subscriber: string;
  type: string;
  reason: string;
  retried: string;
  period: GivenUpPeriod;
}

function Filters({ subscriber, type, reason, retried, period }: FiltersProps) {
  return (
    <div class="filters">
      <SubscriberField value={subscriber} onChange={(value) => setQuery({ subscriber: value })} />
      <TextField label="Event type" value={type} onChange={(value) => setQuery({ type: value })} placeholder="order.paid" />
      <SelectField label="Reason" value={reason} onChange={(value) => setQuery({ reason: value })}
        options={[{ value: "", label: "Any reason" }, ...REASONS.map((name) => ({ value: name, label: name }))]} />
      <SelectField label="Retried" value={retried} onChange={(value) => setQuery({ retried: value })} options={[
        { value: "false", label: "Not retried" }, { value: "true", label: "Retried" },
      ]} />
      <GivenUpField period={period} />
    </div>
  );
}

function BulkActions({ select, isHidden, reload }: { select: () => Selection; isHidden: boolean; reload: () => void }) {
  // As it was when the question was asked: the steps must not move the range.
  const asked = useRef<Selection>({});
  const question = (words: Omit<Question, "body" | "title">, verb: string, consequence: string) => async (to: string, signal: AbortSignal) => {
    asked.current = select();
    const { items, next_cursor } = await api.get("/hub/v1/dead-letters", { query: { ...asked.current, to, retried: false, limit: COUNTED_MAX }, signal });
    const title = `${verb} ${atLeast(items.length, Boolean(next_cursor), "dead letter")}?`;
    return { ...words, title, body: <SelectionDetails selection={asked.current} letters={items} hasMore={Boolean(next_cursor)} consequence={consequence} /> };
  };
  const retryStep = async ({ to, scope, signal }: BulkStep) => {
    const body: ChosenDeadLetters = { ...asked.current, to };
    const result = await api.post("/hub/v1/dead-letters/retry", { body, scope, signal });
    return { count: result.retried, more: result.more };
  };
  const discardStep = async ({ to, scope, signal }: BulkStep) => {
    const body: ChosenDeadLetters = { ...asked.current, to };
    const result = await api.post("/hub/v1/dead-letters/discard", { body, scope, signal });
    return { count: result.discarded, more: result.more };
  };
  return (
    <div class="row">
      <BulkAction class="small" label="Retry all that match" doing="Retrying" done="retried" step={retryStep} onDone={reload} isHidden={isHidden}
        question={question({ confirm: "Retry all" }, "Retry", "Each is sent again with the same id: one that blocks its ordering key at once, any other after the messages with its key that wait already.")} />
      <BulkAction label="Discard all that match" doing="Discarding" done="discarded" step={discardStep} onDone={reload} isHidden={isHidden} class="small danger"
        question={question({ confirm: "Discard all", isDangerous: true, typeToConfirm: "discard" }, "Discard", "They are deleted and can no longer be retried.")} />
    </div>
  );
}

interface SelectionDetailsProps {
  selection: Selection;
  /** The newest of them. */
  letters: DeadLetter[];
  hasMore: boolean;
  consequence: string;
}

/** To whom the chosen dead letters belong, and when they were given up. */
function SelectionDetails({ selection, letters, hasMore, consequence }: SelectionDetailsProps) {
  const names = [...new Set(letters.map((letter) => letter.subscriber_name))].join(", ");
  return (
    <div class="stack">
      <p>{consequence}</p>
      <Details entries={[
        [selection.subscriber_id ? "Subscriber" : "Subscribers", `${names || "none"}${hasMore && !selection.subscriber_id ? " and maybe others" : ""}`],
        ["Event type", selection.event_type],
        ["Reason", selection.reason],
        ["Given up", givenUpRange(letters.map((letter) => letter.moved_to_dlq_at), hasMore)],
      ]} />
    </div>
  );
}

function RowActions({ letter, reload }: { letter: DeadLetter; reload: () => void }) {
  const mayManage = useMayManage();
  if (letter.manual_retry_at) return <span class="muted">retried <Time at={letter.manual_retry_at} /></span>;
  if (!mayManage) return null;
  return (
    <>
      <ActionButton class="small" label="Retry" onRun={() => retryOne(letter, reload)} />
      <ActionButton class="small danger" label="Discard" onRun={() => discardOne(letter, reload)} />
    </>
  );
}

async function retryOne(letter: DeadLetter, done: () => void): Promise<void> {
  await api.post("/hub/v1/dead-letters/{id}/retry", { path: { id: letter.id } });
  showToast("The message is sent again.");
  done();
}

async function discardOne(letter: DeadLetter, done: () => void): Promise<void> {
  const body = "It is deleted and can no longer be retried.";
  if (await ask({ title: "Discard this dead letter?", body, confirm: "Discard", isDangerous: true }) === null) return;
  await api.post("/hub/v1/dead-letters/{id}/discard", { path: { id: letter.id } });
  showToast("The dead letter was discarded.");
  done();
}

function DeadLetterPage({ id }: { id: string }) {
  const live = useLiveWithBackoff(`dead-letter ${id}`, (signal) => api.get("/hub/v1/dead-letters/{id}", { path: { id }, signal }), POLL_MS);
  const mayManage = useMayManage();
  const [isGone, setGone] = useState(false);
  const leave = () => {
    setGone(true);
    navigate(link("dead-letters"));
  };
  const letter = live.data;
  const isRetried = Boolean(letter?.manual_retry_at);
  const reason = isRetried ? "Already retried" : undefined;
  const actions = letter && mayManage && !isGone && (
    <>
      <ActionButton class="primary" label="Retry" onRun={() => retryOne(letter, live.reload)} disabled={isRetried} title={reason} />
      <ActionButton class="danger" label="Discard" onRun={() => discardOne(letter, leave)} disabled={isRetried} title={reason} />
    </>
  );
  return (
    <Page title={letter?.event_type ?? "Dead letter"} parent={{ label: "Dead letters", href: link("dead-letters") }} description={<Identifier value={id} />} actions={actions}>
      <Loaded live={live}>{(found) => <DeadLetterView letter={found} />}</Loaded>
    </Page>
  );
}

/** The attempts of the message; none if they were deleted, which a dead letter survives. */
async function loadAttempts(message: string | undefined, signal: AbortSignal): Promise<HubAttempt[]> {
  if (message === undefined) return [];
  try {
    return (await api.get("/hub/v1/messages/{id}/attempts", { path: { id: message }, signal })).items;
  } catch (cause) {
    if (cause instanceof ApiError && cause.status === 404) return [];
    throw cause;
  }
}

function DeadLetterView({ letter }: { letter: DeadLetter }) {
  const message = letter.message_id;
  const attempts = useLive(`attempts ${message}`, (signal) => loadAttempts(message, signal), POLL_MS);
  return (
    <div class="grid">
      <Card title="Attempts">
        <Loaded live={attempts}>
          {(found) => found.length === 0
            ? <Empty title="No attempt is stored">The attempts of a subscriber are deleted with it.</Empty>
            : <ol class="timeline"><AttemptEntries attempts={found} letter={letter.id} /></ol>}
        </Loaded>
      </Card>
      <Card title="Dead letter">
        <div class="stack">
          <Details entries={[
            ["Reason", <Badge tone="bad">{letter.reason}</Badge>],
            ["Detail", letter.detail],
            ["Given up", <Time at={letter.moved_to_dlq_at} />],
            ["Retried", letter.manual_retry_at ? <><Time at={letter.manual_retry_at} /> by {describePrincipal(letter.manual_retry_by ?? "")}</> : "no"],
            ["Event", letter.event_id && <Identifier value={letter.event_id} href={link("events", letter.event_id)} />],
            ["Subscriber", <a href={link("subscribers", letter.subscriber_id)}>{letter.subscriber_name}</a>],
            ["Ordering key", letter.lane && <code>{letter.lane}</code>],
            ["Delivery", message && <a href={link("deliveries", message)}>Open the delivery</a>],
            ["Replay", letter.replay_id && <Identifier value={letter.replay_id} href={link("replays", letter.replay_id)} />],
          ]} />
          {letter.event?.payload !== undefined && <CodeBlock label="payload" value={letter.event.payload} />}
        </div>
      </Card>
    </div>
  );
}
