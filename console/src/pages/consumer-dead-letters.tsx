import { api } from "../api/client";
import type { ConsumerDeadLetter } from "../api/types";
import { Empty } from "../components/async";
import { Card, Time } from "../components/basics";
import { BulkAction, type BulkStep } from "../components/bulk";
import { ask } from "../components/dialog";
import { ActionButton, TextField } from "../components/form";
import { ListView, usePages } from "../components/list";
import { showToast } from "../components/toasts";
import { link, setQuery } from "../lib/router";

const POLL_MS = 5_000;

/** Messages that a consumer of the log could not process; for operators. */
export function ConsumerDeadLetters({ query }: { query: URLSearchParams }) {
  const consumer = query.get("consumer") ?? "";
  const topic = query.get("topic") ?? "";
  const list = usePages<ConsumerDeadLetter>(`consumer-dead-letters ${consumer} ${topic}`, (page, signal) =>
    api.get("/admin/v1/dead-letters", { query: { consumer: consumer || undefined, topic: topic || undefined, ...page }, signal }), POLL_MS);
  const isEmpty = (list.data?.items.length ?? 0) === 0;
  const chosen = (to: string) => ({ consumer: consumer || undefined, topic: topic || undefined, to });
  const retryStep = ({ to, scope, signal }: BulkStep) => api.post("/admin/v1/dead-letters/retry", { body: chosen(to), scope, signal });
  const discardStep = ({ to, scope, signal }: BulkStep) => api.post("/admin/v1/dead-letters/discard", { body: chosen(to), scope, signal });
  return (
    <>
      <div class="filters">
        <TextField label="Consumer" value={consumer} onChange={(value) => setQuery({ consumer: value })} placeholder="notify.mail" />
        <TextField label="Topic" value={topic} onChange={(value) => setQuery({ topic: value })} placeholder="order.created" />
      </div>
      <Card flush title="Messages of the log" actions={(
          <div class="row">
            <BulkAction class="small" label="Retry all that match" doing="Retrying" done="retried" step={retryStep} onDone={list.reload} isHidden={isEmpty}
              question={{ title: "Retry all dead letters that match?", body: "The consumers process them again.", confirm: "Retry all" }} />
            <BulkAction label="Discard all that match" doing="Discarding" done="discarded" class="small danger" step={discardStep} onDone={list.reload} isHidden={isEmpty}
              question={{ title: "Discard all dead letters that match?", body: "They are deleted and can no longer be retried.", confirm: "Discard all", isDangerous: true, typeToConfirm: "discard" }} />
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
