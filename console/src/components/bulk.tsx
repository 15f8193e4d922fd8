import { useEffect, useRef, useState } from "preact/hooks";
import { currentScope, type RequestScope } from "../api/session";
import { formatNumber, plural } from "../lib/format";
import { restoreFocus } from "../lib/focus";
import { toApiError } from "../lib/live";
import { ask, type Question } from "./dialog";
import { showToast } from "./toasts";

/** What every step of one bulk action has in common. */
export interface BulkStep {
  /** The session and the tenant for which the action was confirmed. */
  scope: RequestScope;
  signal: AbortSignal;
  /** When the question was opened, in RFC 3339: messages that are given up later were not part of it. */
  to: string;
}

interface BulkActionProps {
  label: string;
  /** "Retrying" */
  doing: string;
  /** "retried" */
  done: string;
  /** Loaded when the button is clicked: it says how many there are. `to`: see `BulkStep`. */
  question: (to: string, signal: AbortSignal) => Promise<Question>;
  /** Processes a part of the selection; `more` tells whether something is left. */
  step: (common: BulkStep) => Promise<{ count: number; more: boolean }>;
  onDone: () => void;
  /** Hides the button, except while the action runs. */
  isHidden?: boolean;
  class?: string;
}

/**
 * Repeats a request that processes a part of a selection until nothing is left, and shows how far it has come. It stops
 * when the page is left, when another tenant is chosen, and when the session ends.
 */
export function BulkAction({ label, doing, done, question, step, onDone, isHidden = false, class: className = "" }: BulkActionProps) {
  const [count, setCount] = useState<number>();
  const current = useRef<AbortController>();
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => () => current.current?.abort(), []);
  const run = async () => {
    const controller = new AbortController();
    const { signal } = controller;
    const scope = currentScope();
    const stop = () => controller.abort();
    scope.sessionEnded.addEventListener("abort", stop);
    current.current = controller;
    const to = new Date().toISOString();
    try {
      const asked = await question(to, signal);
      if (signal.aborted || await ask(asked) === null || signal.aborted) return;
      await repeat(signal, () => step({ scope, signal, to }), done, setCount);
    } catch (cause) {
      if (!signal.aborted) showToast(toApiError(cause).message, "bad");
      return;
    } finally {
      scope.sessionEnded.removeEventListener("abort", stop);
    }
    if (signal.aborted) return;
    setCount(undefined);
    onDone();
    restoreFocus(button.current);
  };
  if (isHidden && count === undefined) return null;
  return (
    <button ref={button} type="button" class={`button ${className}`} disabled={count !== undefined} onClick={run}>
      {count === undefined ? label : `${doing}: ${formatNumber(count)}`}
    </button>
  );
}

/** Calls `step` until nothing is left or `signal` is aborted, and tells the user the result. */
async function repeat(signal: AbortSignal, step: () => ReturnType<BulkActionProps["step"]>, done: string, onCount: (total: number) => void): Promise<void> {
  let total = 0;
  let hasMore = true;
  onCount(0);
  try {
    while (hasMore && !signal.aborted) {
      const result = await step();
      total += result.count;
      // Without progress another request would change nothing either.
      hasMore = result.more && result.count > 0;
      if (!signal.aborted) onCount(total);
    }
  } catch (cause) {
    if (!signal.aborted) return showToast(`${plural(total, "message")} ${done}, then: ${toApiError(cause).message}`, "bad");
  }
  // The request that was interrupted may have been processed, so the number is a minimum.
  if (hasMore && signal.aborted) showToast(`Stopped: at least ${plural(total, "message")} ${done}.`, "bad");
  else showToast(`${plural(total, "message")} ${done}.`);
}
