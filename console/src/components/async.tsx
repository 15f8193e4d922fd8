// The states of data that is being loaded: loading, failed with what to do next, empty, there.
import type { ComponentChildren } from "preact";
import type { ApiError } from "../api/client";
import type { Live } from "../lib/live";
import { Notice } from "./basics";

export function Skeleton() {
  return (
    <div class="skeleton" role="status" aria-label="Loading">
      <span /><span /><span />
    </div>
  );
}

export function ErrorBox({ error, onRetry }: { error: ApiError; onRetry?: () => void }) {
  return (
    <Notice tone="bad">
      <div class="stack-small">
        <strong>{error.title}</strong>
        {error.detail !== "" && <span>{error.detail}</span>}
        <span class="muted">{whatToDo(error)}</span>
        {error.traceId !== "" && error.status >= 500 && <span>Trace id for the server's log: <code>{error.traceId}</code></span>}
        {onRetry && <div class="row"><button type="button" class="button small" onClick={onRetry}>Try again</button></div>}
      </div>
    </Notice>
  );
}

function whatToDo(error: ApiError): string {
  if (error.status === 403) return "Sign in with a key or as a user that has this permission, or choose another tenant.";
  if (error.status === 404) return "It may have been deleted, or it belongs to another tenant.";
  if (error.status === 429) return "Wait for a moment: the limit of requests was reached.";
  if (error.status >= 500) return "The server's log tells the cause. The page tries again by itself.";
  return "";
}

export function Empty({ title, children, actions }: { title: string; children?: ComponentChildren; actions?: ComponentChildren }) {
  return (
    <div class="empty">
      <h3>{title}</h3>
      {children !== undefined && <p>{children}</p>}
      {actions !== undefined && <div class="row">{actions}</div>}
    </div>
  );
}

interface LoadedProps<T> {
  live: Live<T>;
  children: (data: T) => ComponentChildren;
}

/** Shows the data, also an older one while the server does not respond, together with the error. */
export function Loaded<T>({ live, children }: LoadedProps<T>) {
  return (
    <>
      {live.error !== undefined && <ErrorBox error={live.error} onRetry={live.reload} />}
      {live.isLoading && <Skeleton />}
      {live.data !== undefined && children(live.data)}
    </>
  );
}
