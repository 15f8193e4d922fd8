// The settings of a subscriber as texts of the form, and as the request.
import type { NewSubscriber, Subscriber } from "../api/types";
import { fieldError, parseJsonField } from "../lib/json";

/** What the API shows in place of a secret, and accepts for "as it is stored". */
export const STORED_SECRET = "***";

/** The fields as texts, as they are in the form. */
export interface Draft {
  name: string;
  url: string;
  eventTypes: string;
  filter: string;
  orderingKey: string;
  backoff: string;
  retryRules: string;
  onExhausted: string;
  format: string;
  batchMax: string;
  batchWait: string;
  timeout: string;
  maxInFlight: string;
  rateLimit: string;
  headers: string;
  verifyEndpoint: boolean;
  authType: string;
  tokenUrl: string;
  clientId: string;
  clientSecret: string;
  scope: string;
  audience: string;
  certificate: string;
  privateKey: string;
}

export const EMPTY: Draft = {
  name: "", url: "", eventTypes: "*", filter: "", orderingKey: "", backoff: "5, 30, 300", retryRules: "", onExhausted: "skip", format: "raw",
  batchMax: "", batchWait: "0", timeout: "10000", maxInFlight: "50", rateLimit: "", headers: "", verifyEndpoint: false,
  authType: "", tokenUrl: "", clientId: "", clientSecret: "", scope: "", audience: "", certificate: "", privateKey: "",
};

/** The fields that show their errors themselves. */
export const FIELDS = [
  "/name", "/url", "/event_types", "/filter", "/ordering_key", "/retry_backoff_seconds", "/retry_rules", "/batch", "/timeout_ms", "/max_in_flight",
  "/rate_limit_per_second", "/headers", "/auth",
];

export function toDraft(subscriber: Subscriber): Draft {
  const auth = subscriber.auth;
  return {
    name: subscriber.name,
    url: subscriber.url,
    eventTypes: subscriber.event_types.join(", "),
    filter: subscriber.filter && subscriber.filter.length > 0 ? JSON.stringify(subscriber.filter, null, 2) : "",
    orderingKey: subscriber.ordering_key ?? "",
    backoff: subscriber.retry_backoff_seconds.join(", "),
    retryRules: Object.entries(subscriber.retry_rules).map(([status, rule]) => `${status}: ${rule}`).join("\n"),
    onExhausted: subscriber.on_exhausted,
    format: subscriber.format,
    batchMax: subscriber.batch?.max.toString() ?? "",
    batchWait: subscriber.batch?.wait_ms.toString() ?? "0",
    timeout: String(subscriber.timeout_ms),
    maxInFlight: String(subscriber.max_in_flight),
    rateLimit: subscriber.rate_limit_per_second?.toString() ?? "",
    headers: "",
    verifyEndpoint: subscriber.verify_endpoint,
    authType: auth?.type ?? "",
    tokenUrl: auth?.token_url ?? "",
    clientId: auth?.client_id ?? "",
    clientSecret: auth?.client_secret ?? "",
    scope: auth?.scope ?? "",
    audience: auth?.audience ?? "",
    certificate: auth?.certificate ?? "",
    privateKey: auth?.private_key ?? "",
  };
}

/** The request. Fails with the field whose text cannot be read; numbers are checked by the API. */
export function toBody(draft: Draft): NewSubscriber {
  const list = (text: string) => text.split(/[,\s]+/).filter((part) => part !== "");
  const body = {
    name: draft.name,
    url: draft.url,
    event_types: list(draft.eventTypes),
    filter: draft.filter.trim() === "" ? null : parseJsonField(draft.filter, "/filter"),
    ordering_key: draft.orderingKey === "" ? null : draft.orderingKey,
    retry_backoff_seconds: list(draft.backoff).map(Number),
    retry_rules: parseLines(draft.retryRules, "/retry_rules", "a status and what to do: 404: retry"),
    on_exhausted: draft.onExhausted,
    format: draft.format,
    batch: draft.batchMax === "" ? null : { max: Number(draft.batchMax), wait_ms: Number(draft.batchWait) },
    timeout_ms: Number(draft.timeout),
    max_in_flight: Number(draft.maxInFlight),
    rate_limit_per_second: draft.rateLimit === "" ? null : Number(draft.rateLimit),
    // The stored headers must not be replaced by a part of what was typed.
    headers: draft.headers.trim() === "" ? undefined : parseLines(draft.headers, "/headers", "a name and a value: X-Name: value"),
    verify_endpoint: draft.verifyEndpoint,
    auth: authOf(draft),
  };
  return body as NewSubscriber;
}

function authOf(draft: Draft): object | null {
  const given = (text: string) => text.trim() === "" ? undefined : text.trim();
  if (draft.authType === "oauth2") {
    return {
      type: "oauth2", token_url: given(draft.tokenUrl), client_id: given(draft.clientId), client_secret: given(draft.clientSecret),
      scope: given(draft.scope), audience: given(draft.audience),
    };
  }
  // PEM files end with a line break, which belongs to them.
  return draft.authType === "mtls" ? { type: "mtls", certificate: draft.certificate, private_key: draft.privateKey } : null;
}

/** Lines of a name and a value, separated by a colon. Fails with the line that is none. */
function parseLines(text: string, pointer: string, expected: string): Record<string, string> {
  const lines = text.split("\n").map((line) => line.trim());
  const wrong = lines.findIndex((line) => line !== "" && line.indexOf(":") < 1);
  if (wrong >= 0) throw fieldError(pointer, `line ${wrong + 1} must be ${expected}`);
  const entries = lines.filter((line) => line !== "");
  return Object.fromEntries(entries.map((line) => [line.slice(0, line.indexOf(":")).trim(), line.slice(line.indexOf(":") + 1).trim()]));
}

/** Only what was changed, so that a concurrent change of another field stays. */
export function changes(before: NewSubscriber, after: NewSubscriber): Partial<NewSubscriber> {
  const old = new Map(Object.entries(before));
  const isChanged = ([name, value]: [string, unknown]) => value !== undefined && JSON.stringify(old.get(name)) !== JSON.stringify(value);
  return Object.fromEntries(Object.entries(after).filter(isChanged)) as Partial<NewSubscriber>;
}
