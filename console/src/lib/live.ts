// Loading data and refreshing it while the page is visible. Only the newest answer is stored, so an open page does not
// grow; the previous one stays on screen until the next has arrived, so nothing flickers.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "../api/client";

const INTERVAL_MS_MAX = 60_000;

export interface Live<T> {
  data: T | undefined;
  error: ApiError | undefined;
  /** True until the first answer or error for the current inputs. */
  isLoading: boolean;
  reload: () => void;
}

interface State<T> {
  key: string;
  data: T | undefined;
  error: ApiError | undefined;
}

/**
 * Calls `load` now, whenever `key` changes, and every `everyMs` while the tab is visible (0: never again). The interval
 * counts from the end of a request, and doubles with each failure, so a struggling server is not asked more. A function
 * tells the interval after each answer.
 */
export function useLive<T>(key: string, load: (signal: AbortSignal) => Promise<T>, everyMs: number | (() => number) = 0): Live<T> {
  const [state, setState] = useState<State<T>>({ key, data: undefined, error: undefined });
  const [round, setRound] = useState(0);
  const loader = useRef(load);
  loader.current = load;
  const interval = useRef(everyMs);
  interval.current = everyMs;
  const intervalMs = () => typeof interval.current === "function" ? interval.current() : interval.current;

  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    // At most one request at a time, so that an older answer cannot replace a newer one.
    let isRunning = false;
    let failures = 0;
    const run = async () => {
      timer = 0;
      isRunning = true;
      try {
        const data = await loader.current(controller.signal);
        if (controller.signal.aborted) return;
        failures = 0;
        setState({ key, data, error: undefined });
      } catch (cause) {
        if (controller.signal.aborted) return;
        failures += 1;
        const error = toApiError(cause);
        setState((previous) => ({ key, data: previous.key === key ? previous.data : undefined, error }));
      }
      isRunning = false;
      schedule();
    };
    const schedule = () => {
      if (intervalMs() === 0 || document.hidden) return;
      timer = window.setTimeout(run, intervalMs() * 2 ** Math.min(failures, 4));
    };
    const onVisibility = () => {
      if (document.hidden) {
        clearTimeout(timer);
        timer = 0;
      } else if (intervalMs() > 0 && timer === 0 && !isRunning) {
        timer = window.setTimeout(run, 0);
      }
    };
    void run();
    document.addEventListener("visibilitychange", onVisibility);
    return () => {
      controller.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisibility);
    };
  }, [key, typeof everyMs === "function" ? "function" : everyMs, round]);

  const reload = useCallback(() => setRound((current) => current + 1), []);
  const isCurrent = state.key === key;
  const data = isCurrent ? state.data : undefined;
  const error = isCurrent ? state.error : undefined;
  return { data, error, isLoading: data === undefined && error === undefined, reload };
}

/**
 * Like `useLive`, for an answer that is large and may stay the same for long, such as one with a payload: the interval
 * doubles while the answers are equal, up to a minute. `untilDueMs` says after how long something is expected to change.
 */
export function useLiveWithBackoff<T>(key: string, load: (signal: AbortSignal) => Promise<T>, everyMs: number, untilDueMs: (data: T) => number = () => Infinity): Live<T> {
  const last = useRef<{ key: string; data: T; content: string; intervalMs: number }>();
  const loadAndCompare = async (signal: AbortSignal) => {
    const data = await load(signal);
    const content = JSON.stringify(data);
    const isSame = last.current?.key === key && last.current.content === content;
    last.current = { key, data, content, intervalMs: isSame ? Math.min(last.current!.intervalMs * 2, INTERVAL_MS_MAX) : everyMs };
    return data;
  };
  return useLive(key, loadAndCompare, () => last.current?.key === key ? Math.min(last.current.intervalMs, untilDueMs(last.current.data)) : everyMs);
}

export function toApiError(cause: unknown): ApiError {
  if (cause instanceof ApiError) return cause;
  return new ApiError(0, "The page could not process the answer", cause instanceof Error ? cause.message : String(cause));
}

const TICK_MS = 5_000;

/** The current time in milliseconds, updated every few seconds while the tab is visible. */
export function useNow(): number {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const timer = window.setInterval(() => {
      if (!document.hidden) setNow(Date.now());
    }, TICK_MS);
    return () => clearInterval(timer);
  }, []);
  return now;
}
