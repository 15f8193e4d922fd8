import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { Subscriber } from "../api/types";
import { Loaded } from "../components/async";
import { Card, Page } from "../components/basics";
import { Checkbox, FormError, SelectField, TextField, useAction, type Action } from "../components/form";
import { SecretNotice } from "../components/secret";
import { showToast } from "../components/toasts";
import { useLive } from "../lib/live";
import { link, navigate } from "../lib/router";
import { EMPTY, FIELDS, STORED_SECRET, changes, toBody, toDraft, type Draft } from "./subscriber-draft";

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
            hint={<>JSON, all conditions must hold: <code>{'[{"pointer":"/amount","op":"gte","value":100}]'}</code>. Leave empty for all events.</>} />
          <div class="form-grid">
            <TextField label="Ordering key" value={draft.orderingKey} onChange={set("orderingKey")} error={error("/ordering_key")} hint="A JSON pointer into the payload. Leave empty for the event's own key." />
            <SelectField label="Format" value={draft.format} onChange={set("format")} options={[
              { value: "raw", label: "raw: the payload alone" }, { value: "standard", label: "standard: type, timestamp, data" }, { value: "cloudevents", label: "CloudEvents 1.0" },
            ]} />
          </div>
        </div>
      </Card>
      <Card title="Batches">
        <div class="form-grid">
          <TextField label="Messages per request" type="number" value={draft.batchMax} onChange={set("batchMax")} error={error("/batch/max") ?? error("/batch")}
            hint="Up to 100, in one JSON array. Empty: each message has a separate request." />
          <TextField label="Wait for more messages (ms)" type="number" value={draft.batchWait} onChange={set("batchWait")} error={error("/batch/wait_ms")}
            hint="A request that is not full waits so long, up to 5,000." />
        </div>
      </Card>
      <Card title="Credentials">
        <AuthFields draft={draft} set={set} action={action} isEdit={isEdit} />
      </Card>
      <Card title="Retries and limits">
        <div class="form">
          <div class="form-grid">
            <TextField label="Pauses between attempts (s)" value={draft.backoff} onChange={set("backoff")} error={error("/retry_backoff_seconds")} hint="One pause per retry. After the last retry fails, the message is given up." />
            <SelectField label="After the last attempt" value={draft.onExhausted} onChange={set("onExhausted")} options={[
              { value: "skip", label: "Dead letter, and later messages go on" }, { value: "block", label: "Messages with the same ordering key wait until someone decides" },
            ]} />
          </div>
          <div class="form-grid">
            <TextField label="Timeout (ms)" type="number" value={draft.timeout} onChange={set("timeout")} error={error("/timeout_ms")} />
            <TextField label="Requests in flight" type="number" value={draft.maxInFlight} onChange={set("maxInFlight")} error={error("/max_in_flight")} />
            <TextField label="Requests per second" type="number" value={draft.rateLimit} onChange={set("rateLimit")} error={error("/rate_limit_per_second")} hint="Leave empty for no limit." />
          </div>
          <div class="form-grid">
            <TextField label="Retry rules" multiline value={draft.retryRules} onChange={set("retryRules")} error={error("/retry_rules")} placeholder={"404: retry\n422: dead_letter"}
              hint={<>The action after a status, one per line: <code>404</code> or <code>4xx</code>, and <code>retry</code>, <code>dead_letter</code> or <code>disable</code>. Empty: 429 and 5xx are retried.</>} />
            <TextField label="Headers" multiline value={draft.headers} onChange={set("headers")} error={error("/headers")}
              hint={isEdit ? "One per line: Name: value. Empty keeps the stored ones, whose values are never shown." : "One per line: Name: value. Values are never shown again."} />
          </div>
        </div>
      </Card>
      <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>{submit}</button></div>
    </form>
  );
}

interface AuthProps {
  draft: Draft;
  set: (field: keyof Draft) => (value: string) => void;
  action: Action;
  isEdit: boolean;
}

/** What the endpoint requires besides the signature. */
function AuthFields({ draft, set, action, isEdit }: AuthProps) {
  const error = (field: string) => action.errorOf(`/auth/${field}`);
  const secretHint = isEdit ? `${STORED_SECRET} stands for the stored one.` : "It is never shown again.";
  return (
    <div class="form">
      <SelectField label="Authentication" value={draft.authType} onChange={set("authType")} error={error("type")} hint="Every request is signed. Some endpoints require credentials as well." options={[
        { value: "", label: "None besides the signature" }, { value: "oauth2", label: "OAuth 2.0 client credentials" }, { value: "mtls", label: "TLS client certificate (mTLS)" },
      ]} />
      {draft.authType === "oauth2" && (
        <div class="form-grid">
          <TextField label="Token URL" type="url" required value={draft.tokenUrl} onChange={set("tokenUrl")} error={error("token_url")} placeholder="https://id.example.com/token" />
          <TextField label="Client id" required value={draft.clientId} onChange={set("clientId")} error={error("client_id")} />
          <TextField label="Client secret" type="password" required autocomplete="off" value={draft.clientSecret} onChange={set("clientSecret")} error={error("client_secret")} hint={secretHint} />
          <TextField label="Scope" value={draft.scope} onChange={set("scope")} error={error("scope")} hint="Optional." />
          <TextField label="Audience" value={draft.audience} onChange={set("audience")} error={error("audience")} hint="Optional." />
        </div>
      )}
      {draft.authType === "mtls" && (
        <div class="form-grid">
          <TextField label="Certificate" multiline required value={draft.certificate} onChange={set("certificate")} error={error("certificate")} hint="PEM, with the intermediate certificates." />
          <TextField label="Private key" multiline required value={draft.privateKey} onChange={set("privateKey")} error={error("private_key")} hint={`PEM, not encrypted. ${secretHint}`} />
        </div>
      )}
    </div>
  );
}
