import { useState } from "preact/hooks";
import { ApiError, api } from "../api/client";
import type { NewSubscriber, Subscriber } from "../api/types";
import { Loaded } from "../components/async";
import { Card, Page } from "../components/basics";
import { Checkbox, FormError, SelectField, TextField, useAction, type Action } from "../components/form";
import { SecretNotice } from "../components/secret";
import { showToast } from "../components/toasts";
import { useLive } from "../lib/live";
import { link, navigate } from "../lib/router";

/** The fields as texts, as they are in the form. */
interface Draft {
  name: string;
  url: string;
  eventTypes: string;
  filter: string;
  orderingKey: string;
  backoff: string;
  onExhausted: string;
  format: string;
  timeout: string;
  maxInFlight: string;
  rateLimit: string;
  headers: string;
  verifyEndpoint: boolean;
}

const EMPTY: Draft = {
  name: "", url: "", eventTypes: "*", filter: "", orderingKey: "", backoff: "5, 30, 300", onExhausted: "skip", format: "raw",
  timeout: "10000", maxInFlight: "50", rateLimit: "", headers: "", verifyEndpoint: false,
};
const FIELDS = ["/name", "/url", "/event_types", "/filter", "/ordering_key", "/retry_backoff_seconds", "/timeout_ms", "/max_in_flight", "/rate_limit_per_second", "/headers"];

export function NewSubscriberPage() {
  const [draft, setDraft] = useState(EMPTY);
  const [created, setCreated] = useState<{ id: string; secret: string }>();
  const action = useAction();
  const create = () => action.run(async () => {
    const result = await api.post("/hub/v1/subscribers", { body: toBody(draft) });
    setCreated({ id: result.id, secret: result.secret });
  });
  const open = () => created && navigate(link("subscribers", created.id));
  return (
    <Page title="New subscriber" parent={{ label: "Subscribers", href: link("subscribers") }} description="An endpoint that receives events as signed webhooks.">
      {created
        ? <SecretNotice secret={created.secret} what="signing secret" onClose={open} />
        : <SubscriberForm draft={draft} onChange={setDraft} action={action} onSubmit={create} submit="Create" />}
    </Page>
  );
}

export function EditSubscriber({ id }: { id: string }) {
  const live = useLive(`edit ${id}`, (signal) => api.get("/hub/v1/subscribers/{id}", { path: { id }, signal }));
  return (
    <Page title={`Edit ${live.data?.name ?? "subscriber"}`} parent={{ label: live.data?.name ?? "Subscriber", href: link("subscribers", id) }}>
      <Loaded live={live}>{(subscriber) => <EditForm subscriber={subscriber} />}</Loaded>
    </Page>
  );
}

function EditForm({ subscriber }: { subscriber: Subscriber }) {
  const original = toDraft(subscriber);
  const [draft, setDraft] = useState(original);
  const action = useAction();
  const save = () => action.run(async () => {
    const body = changes(toBody(original), toBody(draft));
    await api.patch("/hub/v1/subscribers/{id}", { path: { id: subscriber.id }, body });
    showToast("Saved.");
    navigate(link("subscribers", subscriber.id));
  });
  return <SubscriberForm draft={draft} onChange={setDraft} action={action} onSubmit={save} submit="Save" isEdit />;
}

interface FormProps {
  draft: Draft;
  onChange: (draft: Draft) => void;
  action: Action;
  onSubmit: () => Promise<void>;
  submit: string;
  isEdit?: boolean;
}

function SubscriberForm({ draft, onChange, action, onSubmit, submit, isEdit = false }: FormProps) {
  const set = (field: keyof Draft) => (value: string) => onChange({ ...draft, [field]: value });
  const send = (event: Event) => {
    event.preventDefault();
    void onSubmit();
  };
  const error = action.errorOf;
  return (
    <form class="stack" onSubmit={send}>
      <FormError action={action} shown={FIELDS} />
      <Card title="Endpoint">
        <div class="form">
          <TextField label="Name" required value={draft.name} onChange={set("name")} error={error("/name")} placeholder="billing" />
          <TextField label="URL" required type="url" value={draft.url} onChange={set("url")} error={error("/url")} placeholder="https://example.com/hook" />
          <TextField label="Event types" required value={draft.eventTypes} onChange={set("eventTypes")} error={error("/event_types")}
            hint="Separated by commas: exact types, order.*, or * for all." />
          <Checkbox label="Send nothing until the endpoint has answered a challenge" checked={draft.verifyEndpoint} onChange={(verifyEndpoint) => onChange({ ...draft, verifyEndpoint })} />
        </div>
      </Card>
      <Card title="Selection and order">
        <div class="form">
          <TextField label="Filter" multiline value={draft.filter} onChange={set("filter")} error={error("/filter")}
            hint={<>JSON, all conditions must hold: <code>{'[{"pointer":"/amount","op":"gte","value":100}]'}</code>. Empty for all events.</>} />
          <div class="form-grid">
            <TextField label="Ordering key" value={draft.orderingKey} onChange={set("orderingKey")} error={error("/ordering_key")} hint="A JSON pointer into the payload. Empty for the event's own key." />
            <SelectField label="Format" value={draft.format} onChange={set("format")} options={[
              { value: "raw", label: "raw: the payload alone" }, { value: "standard", label: "standard: type, timestamp, data" }, { value: "cloudevents", label: "CloudEvents 1.0" },
            ]} />
          </div>
        </div>
      </Card>
      <Card title="Retries and limits">
        <div class="form-grid">
          <TextField label="Pauses between attempts (s)" value={draft.backoff} onChange={set("backoff")} error={error("/retry_backoff_seconds")} hint="After the first, second, third failure; one more is final." />
          <SelectField label="After the last attempt" value={draft.onExhausted} onChange={set("onExhausted")} options={[
            { value: "skip", label: "Dead letter, and the lane goes on" }, { value: "block", label: "Block the lane until someone decides" },
          ]} />
          <TextField label="Timeout (ms)" type="number" value={draft.timeout} onChange={set("timeout")} error={error("/timeout_ms")} />
          <TextField label="Requests in flight" type="number" value={draft.maxInFlight} onChange={set("maxInFlight")} error={error("/max_in_flight")} />
          <TextField label="Requests per second" type="number" value={draft.rateLimit} onChange={set("rateLimit")} error={error("/rate_limit_per_second")} hint="Empty for no limit." />
          <TextField label="Headers" multiline value={draft.headers} onChange={set("headers")} error={error("/headers")}
            hint={isEdit ? "One per line: Name: value. Empty keeps the stored ones, whose values are never shown." : "One per line: Name: value. Values are never shown again."} />
        </div>
      </Card>
      <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>{submit}</button></div>
    </form>
  );
}

function toDraft(subscriber: Subscriber): Draft {
  return {
    name: subscriber.name,
    url: subscriber.url,
    eventTypes: subscriber.event_types.join(", "),
    filter: subscriber.filter && subscriber.filter.length > 0 ? JSON.stringify(subscriber.filter, null, 2) : "",
    orderingKey: subscriber.ordering_key ?? "",
    backoff: subscriber.retry_backoff_seconds.join(", "),
    onExhausted: subscriber.on_exhausted,
    format: subscriber.format,
    timeout: String(subscriber.timeout_ms),
    maxInFlight: String(subscriber.max_in_flight),
    rateLimit: subscriber.rate_limit_per_second?.toString() ?? "",
    headers: "",
    verifyEndpoint: subscriber.verify_endpoint,
  };
}

/** The request. Texts that cannot be read are sent as they are, so that the API names the field and what it accepts. */
function toBody(draft: Draft): NewSubscriber {
  const list = (text: string) => text.split(/[,\s]+/).filter((part) => part !== "");
  const body = {
    name: draft.name,
    url: draft.url,
    event_types: list(draft.eventTypes),
    filter: draft.filter.trim() === "" ? null : parseJson(draft.filter),
    ordering_key: draft.orderingKey === "" ? null : draft.orderingKey,
    retry_backoff_seconds: list(draft.backoff).map(Number),
    on_exhausted: draft.onExhausted,
    format: draft.format,
    timeout_ms: Number(draft.timeout),
    max_in_flight: Number(draft.maxInFlight),
    rate_limit_per_second: draft.rateLimit === "" ? null : Number(draft.rateLimit),
    headers: draft.headers.trim() === "" ? undefined : parseHeaders(draft.headers),
    verify_endpoint: draft.verifyEndpoint,
  };
  return body as NewSubscriber;
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Fails with the line that is no header: the stored headers must not be replaced by a part of what was typed. */
function parseHeaders(text: string): Record<string, string> {
  const lines = text.split("\n").map((line) => line.trim());
  const wrong = lines.findIndex((line) => line !== "" && line.indexOf(":") < 1);
  if (wrong >= 0) {
    const detail = `line ${wrong + 1} must be a name and a value: X-Name: value`;
    throw new ApiError(422, "A header is invalid", "", [{ in: "body", pointer: "/headers", detail }]);
  }
  const entries = lines.filter((line) => line !== "");
  return Object.fromEntries(entries.map((line) => [line.slice(0, line.indexOf(":")).trim(), line.slice(line.indexOf(":") + 1).trim()]));
}

/** Only what was changed, so that a concurrent change of another field is kept. */
function changes(before: NewSubscriber, after: NewSubscriber): Partial<NewSubscriber> {
  const old = new Map(Object.entries(before));
  const isChanged = ([name, value]: [string, unknown]) => value !== undefined && JSON.stringify(old.get(name)) !== JSON.stringify(value);
  return Object.fromEntries(Object.entries(after).filter(isChanged)) as Partial<NewSubscriber>;
}
