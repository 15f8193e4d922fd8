import { useRef } from "preact/hooks";
import { api } from "../api/client";
import type { ConsumerDeadLetter } from "../api/types";
import { Empty } from "../components/async";
import { Card, Details, Time } from "../components/basics";
import { BulkAction, type BulkStep } from "../components/bulk";
import { ask, type Question } from "../components/dialog";
import { ActionButton, TextField } from "../components/form";
import { GivenUpField, givenUpPeriod, givenUpRange, startOf } from "../components/given-up";
import { ListView, usePages } from "../components/list";
import { showToast } from "../components/toasts";
import { atLeast, plural } from "../lib/format";
import { link, setQuery } from "../lib/router";

const POLL_MS = 5_000;
/** How many dead letters a question counts. */
const COUNTED_MAX = 100;

interface Selection {
  consumer?: string;
  topic?: string;
  from?: string;
}

/** Messages that a consumer of the log could not process; for operators. */
export function ConsumerDeadLetters({ query }: { query: URLSearchParams }) {
  const consumer = query.get("consumer") ?? "";
  const topic = query.get("topic") ?? "";
  const period = givenUpPeriod(query);
  const select = (): Selection => ({ consumer: consumer || undefined, topic: topic || undefined, from: startOf(period) });
  const list = usePages<ConsumerDeadLetter>(`consumer-dead-letters ${consumer} ${topic} ${period.value}`, (page, signal) =>
    api.get("/admin/v1/dead-letters", { query: { ...select(), ...page }, signal }), POLL_MS);
  const isEmpty = (list.data?.items.length ?? 0) === 0;
  // As it was when the question was asked: the steps must not move the range.
  const asked = useRef<Selection>({});
  const retryStep = ({ to, scope, signal }: BulkStep) => api.post("/admin/v1/dead-letters/retry", { body: { ...asked.current, to }, scope, signal });
  const discardStep = ({ to, scope, signal }: BulkStep) => api.post("/admin/v1/dead-letters/discard", { body: { ...asked.current, to }, scope, signal });
  const question = (words: Omit<Question, "body" | "title">, verb: string, consequence: string) => async (to: string, signal: AbortSignal) => {
    asked.current = select();
    const { items, next_cursor } = await api.get("/admin/v1/dead-letters", { query: { ...asked.current, to, limit: COUNTED_MAX }, signal });
    const hasMore = Boolean(next_cursor);
    const title = `${verb} ${await countLetters(items, hasMore, asked.current, signal)}?`;
    return { ...words, title, body: <SelectionDetails selection={asked.current} letters={items} hasMore={hasMore} consequence={consequence} /> };
  };
  return (
    <>
      <div class="filters">
        <TextField label="Consumer" value={consumer} onChange={(value) => setQuery({ consumer: value })} placeholder="notify.mail" />
        <TextField label="Topic" value={topic} onChange={(value) => setQuery({ topic: value })} placeholder="order.created" />
        <GivenUpField period={period} />
      </div>
      <Card flush title="Messages of the log" actions={(
          <div class="row">
            <BulkAction class="small" label="Retry all that match" doing="Retrying" done="retried" step={retryStep} onDone={list.reload} isHidden={isEmpty}
              question={question({ confirm: "Retry all" }, "Retry", "The consumers process them again.")} />
            <BulkAction label="Discard all that match" doing="Discarding" done="discarded" class="small danger" step={discardStep} onDone={list.reload} isHidden={isEmpty}
              question={question({ confirm: "Discard all", isDangerous: true, typeToConfirm: "discard" }, "Discard", "They are deleted and can no longer be retried.")} />
          </div>
        )}>
        <ListView list={list} label="Dead letters of consumers" rowKey={(row) => String(row.id)} columns={[
          { header: "Topic", primary: true, cell: (row) => <a href={link("log", "messages", row.message.event_id)}>{row.message.topic}</a> },
          { header: "Consumer", cell: (row) => <code>{row.consumer}</code> },
          { header: "Last error", cell: (row) => <span class="truncate" title={row.last_error}>{row.last_error}</span> },
          { header: "Attempts", align: "right", cell: (row) => row.attempts },
          { header: "Given up", cell: (row) => <Time at={row.died_at} /> },
          { header: "Actions", actions: true, cell: (row) => <RowActions id={row.id} reload={list.reload} /> },
        ]} empty={<Empty title="No dead letter">Every consumer has processed its messages.</Empty>} />
      </Card>
    </>
  );
}

/** The API counts the dead letters of a consumer, but not those of another selection. */
async function countLetters(letters: ConsumerDeadLetter[], hasMore: boolean, selection: Selection, signal: AbortSignal): Promise<string> {
  const isWholeConsumer = selection.consumer !== undefined && selection.topic === undefined && selection.from === undefined;
  if (!hasMore || !isWholeConsumer) return atLeast(letters.length, hasMore, "dead letter");
  const { items } = await api.get("/admin/v1/consumers", { signal });
  const counted = items.find(({ consumer }) => consumer === selection.consumer)?.dead;
  return counted === undefined ? atLeast(letters.length, hasMore, "dead letter") : plural(counted, "dead letter");
}

interface SelectionDetailsProps {
  selection: Selection;
  /** The oldest of them. */
  letters: ConsumerDeadLetter[];
  hasMore: boolean;
  consequence: string;
}

/** To which consumers the chosen dead letters belong, and when they were given up. */
function SelectionDetails({ selection, letters, hasMore, consequence }: SelectionDetailsProps) {
  const names = [...new Set(letters.map((letter) => letter.consumer))].join(", ");
  return (
    <div class="stack">
      <p>{consequence}</p>
      <Details entries={[
        [selection.consumer ? "Consumer" : "Consumers", `${names || "none"}${hasMore && !selection.consumer ? " and maybe others" : ""}`],
        ["Topic", selection.topic],
        ["Given up", givenUpRange(letters.map((letter) => letter.died_at), hasMore)],
      ]} />
    </div>
  );
}

function RowActions({ id, reload }: { id: number; reload: () => void }) {
  const retry = async () => {
    await api.post("/admin/v1/dead-letters/{id}/retry", { path: { id } });
    showToast("The consumer processes the message again.");
    reload();
  };
  const discard = async () => {
    const body = "It is deleted and can no longer be retried.";
    if (await ask({ title: "Discard this dead letter?", body, confirm: "Discard", isDangerous: true }) === null) return;
    await api.post("/admin/v1/dead-letters/{id}/discard", { path: { id } });
    showToast("The dead letter was discarded.");
    reload();
  };
  return (
    <>
      <ActionButton class="small" label="Retry" onRun={retry} />
      <ActionButton class="small danger" label="Discard" onRun={discard} />
    </>
  );
}
