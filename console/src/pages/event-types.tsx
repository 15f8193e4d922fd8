import { useState } from "preact/hooks";
import { api } from "../api/client";
import { shownTenant } from "../api/session";
import type { EventType } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Badge, Card, Page, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, Checkbox, FormError, TextField, useAction } from "../components/form";
import { ListView, usePages } from "../components/list";
import { useLive } from "../lib/live";
import { useMayChangeEventTypes } from "../lib/permissions";
import { parseJsonField } from "../lib/json";
import { link, navigate } from "../lib/router";
import type { PageProps } from "../pages";
import { EventTypePage } from "./event-type";

const EXAMPLE_SCHEMA = `{
  "type": "object",
  "required": ["id"],
  "properties": { "id": { "type": "integer" } }
}`;

export function EventTypesPage({ parts }: PageProps) {
  const [name] = parts;
  if (name === undefined) return <EventTypeList />;
  return name === "new" ? <NewEventTypePage /> : <EventTypePage name={name} />;
}

function EventTypeList() {
  const mayManage = useMayChangeEventTypes();
  const list = usePages<EventType>("event-types", (page, signal) => api.get("/hub/v1/event-types", { query: page, signal }));
  const create = <a class="button primary" href={link("event-types", "new")}>Add an event type</a>;
  return (
    <Page title="Event types" description="The catalogue: what the events mean, and which payloads they have." actions={mayManage && create}>
      <UnknownTypes />
      <Card flush>
        <ListView list={list} label="Event types" rowKey={(row) => row.name} columns={[
          { header: "Name", primary: true, cell: (row) => <a href={link("event-types", row.name)}><code>{row.name}</code></a> },
          { header: "Description", cell: (row) => row.description || <span class="muted">–</span> },
          { header: "Version", align: "right", cell: (row) => row.version || "none" },
          { header: "Payloads", cell: (row) => <TypeBadges type={row} /> },
          { header: "Changed", cell: (row) => <Time at={row.updated_at} /> },
        ]} empty={<Empty title="The catalogue is empty" actions={mayManage && create}>Every event is accepted. Add types to check payloads against a schema and to document them.</Empty>} />
      </Card>
    </Page>
  );
}

/** `checked` names what is checked, where no heading does. */
export function TypeBadges({ type, checked = "checked" }: { type: EventType; checked?: string }) {
  return (
    <span class="row">
      {type.enforce ? <Badge tone="good">{checked}</Badge> : <Badge>documented only</Badge>}
      {type.deprecated && <Badge tone="warn">deprecated</Badge>}
    </span>
  );
}

/** What happens to events whose type is not in the catalogue. */
function UnknownTypes() {
  const mayManage = useMayChangeEventTypes();
  const live = useLive("catalogue", (signal) => api.get("/hub/v1/catalogue", { signal }));
  const change = (body: { unknown_types?: "accept" | "refuse"; shared?: boolean }) => async () => {
    await api.patch("/hub/v1/catalogue", { body });
    live.reload();
  };
  const share = (isShared: boolean) => async () => {
    const body = isShared
      ? "Events of tenants without their own event types are no longer checked."
      : "It applies to every tenant without its own event types: their events are checked against these schemas.";
    const title = isShared ? "Stop sharing the catalogue?" : "Share the catalogue with all tenants?";
    if (await ask({ title, body, confirm: isShared ? "Stop sharing" : "Share" }) === null) return;
    await change({ shared: !isShared })();
  };
  return (
    <Loaded live={live}>
      {(catalogue) => {
        const isRefusing = catalogue.unknown_types === "refuse";
        if (catalogue.tenant !== shownTenant()) {
          return (
            <div class="notice">
              <div>
                These event types are shared by the tenant <strong>{catalogue.tenant}</strong>, and other types
                are {isRefusing ? "refused" : "accepted"}. A type of this tenant's own replaces all of them.
              </div>
            </div>
          );
        }
        return (
          <>
            <div class="notice">
              <div>Events whose type is not in the catalogue are <strong>{isRefusing ? "refused" : "accepted"}</strong>.</div>
              {mayManage && <ActionButton class="small" label={isRefusing ? "Accept them" : "Refuse them"} onRun={change({ unknown_types: isRefusing ? "accept" : "refuse" })} />}
            </div>
            {catalogue.tenant === "main" && (
              <div class="notice">
                <div>{catalogue.shared ? <>Tenants without their own event types <strong>use this catalogue</strong>.</> : <>This catalogue is used by <strong>main</strong> alone.</>}</div>
                {mayManage && <ActionButton class="small" label={catalogue.shared ? "Stop sharing it" : "Share it with all tenants"} onRun={share(catalogue.shared)} />}
              </div>
            )}
          </>
        );
      }}
    </Loaded>
  );
}

function NewEventTypePage() {
  const action = useAction();
  const [name, setName] = useState("");
  const [description, setDescription] = useState("");
  const [schema, setSchema] = useState(EXAMPLE_SCHEMA);
  const [enforce, setEnforce] = useState(true);
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      await api.post("/hub/v1/event-types", { body: { name, description, enforce, schema: parseJsonField(schema, "/schema") } });
      navigate(link("event-types", name));
    });
  };
  return (
    <Page title="New event type" parent={{ label: "Event types", href: link("event-types") }}>
      <form class="stack" onSubmit={submit}>
        <FormError action={action} shown={["/name", "/description", "/schema"]} />
        <Card>
          <div class="form">
            <TextField label="Name" required value={name} onChange={setName} error={action.errorOf("/name")} placeholder="order.shipped" />
            <TextField label="Description" value={description} onChange={setDescription} error={action.errorOf("/description")} placeholder="An order has left the warehouse." />
            <TextField label="Schema" multiline rows={10} value={schema} onChange={setSchema} error={action.errorOf("/schema")} hint="JSON Schema, draft 2020-12." />
            <Checkbox label="Refuse payloads that do not match" checked={enforce} onChange={setEnforce} />
          </div>
        </Card>
        <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>Add</button></div>
      </form>
    </Page>
  );
}
