import { useState } from "preact/hooks";
import { formatNumber, plural } from "../lib/format";
import { toApiError } from "../lib/live";
import { ask } from "./dialog";
import { showToast } from "./toasts";

interface BulkActionProps {
  label: string;
  /** "Retrying" */
  doing: string;
  /** "retried" */
  done: string;
  question: Parameters<typeof ask>[0];
  /** Processes a part of the selection; `more` tells whether something is left. */
  step: () => Promise<{ count: number; more: boolean }>;
  onDone: () => void;
  class?: string;
}

/** Repeats a request that processes a part of a selection until nothing is left, and shows how far it has come. */
export function BulkAction({ label, doing, done, question, step, onDone, class: className = "" }: BulkActionProps) {
  const [count, setCount] = useState<number>();
  const run = async () => {
    if (await ask(question) === null) return;
    let total = 0;
    setCount(0);
    try {
      for (;;) {
        const result = await step();
        total += result.count;
        setCount(total);
        // Without progress another request would change nothing either.
        if (!result.more || result.count === 0) break;
      }
      showToast(`${plural(total, "message")} ${done}.`);
    } catch (cause) {
      showToast(`${plural(total, "message")} ${done}, then: ${toApiError(cause).message}`, "bad");
    }
    setCount(undefined);
    onDone();
  };
  return (
    <button type="button" class={`button ${className}`} disabled={count !== undefined} onClick={run}>
      {count === undefined ? label : `${doing}: ${formatNumber(count)}`}
    </button>
  );
}
