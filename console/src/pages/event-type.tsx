import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { EventTypeWithVersions } from "../api/types";
import { Loaded } from "../components/async";
import { Card, CodeBlock, Page, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, Checkbox, FormError, TextField, useAction } from "../components/form";
import { showToast } from "../components/toasts";
import { formatJson } from "../lib/format";
import { parseJsonField } from "../lib/json";
import { useLive } from "../lib/live";
import { useMayChangeEventTypes } from "../lib/permissions";
import { link, navigate } from "../lib/router";
import { TypeBadges } from "./event-types";

export function EventTypePage({ name }: { name: string }) {
  const live = useLive(`event-type ${name}`, (signal) => api.get("/hub/v1/event-types/{name}", { path: { name }, signal }));
  return (
    <Page title={name} parent={{ label: "Event types", href: link("event-types") }} description={live.data?.description}
      actions={live.data && <TypeActions type={live.data} reload={live.reload} />}>
      <Loaded live={live}>{(type) => <TypeView type={type} reload={live.reload} />}</Loaded>
    </Page>
  );
}

function TypeActions({ type, reload }: { type: EventTypeWithVersions; reload: () => void }) {
  const path = { name: type.name };
  if (!useMayChangeEventTypes()) return null;
  const change = (body: { deprecated?: boolean; enforce?: boolean }) => async () => {
    await api.patch("/hub/v1/event-types/{name}", { path, body });
    reload();
  };
  const remove = async () => {
    const body = "Events of this type are no longer checked. Subscribers keep it in their lists.";
    if (await ask({ title: `Delete ${type.name}?`, body, confirm: "Delete", isDangerous: true }) === null) return;
    await api.delete("/hub/v1/event-types/{name}", { path });
    showToast(`${type.name} was deleted.`);
    navigate(link("event-types"));
  };
  return (
    <>
      <ActionButton label={type.enforce ? "Stop checking payloads" : "Check payloads"} onRun={change({ enforce: !type.enforce })} />
      <ActionButton label={type.deprecated ? "Not deprecated" : "Mark as deprecated"} onRun={change({ deprecated: !type.deprecated })} />
      <ActionButton class="danger" label="Delete" onRun={remove} />
    </>
  );
}

function TypeView({ type, reload }: { type: EventTypeWithVersions; reload: () => void }) {
  const mayManage = useMayChangeEventTypes();
  const versions = [...type.versions].sort((one, other) => other.version - one.version);
  return (
    <>
      <TypeBadges type={type} checked="payloads checked" />
      {versions.map((version, index) => (
        <Card key={version.version} title={`Version ${version.version}${index === 0 ? " (current)" : ""}`} actions={<span class="muted">Added <Time at={version.created_at} /></span>}>
          <div class="grid">
            <div class="stack-small"><h3>Schema</h3><CodeBlock label={`schema ${version.version}`} value={version.schema} /></div>
            <div class="stack-small">
              <h3>Examples</h3>
              {version.examples.length === 0 ? <p class="muted">None.</p>
                : version.examples.map((example, number) => <CodeBlock key={number} label={`example ${number + 1} of version ${version.version}`} value={example} />)}
            </div>
          </div>
        </Card>
      ))}
      {mayManage && <NewVersion type={type} reload={reload} />}
    </>
  );
}

function NewVersion({ type, reload }: { type: EventTypeWithVersions; reload: () => void }) {
  const newest = type.versions[type.versions.length - 1];
  const [schema, setSchema] = useState(() => formatJson(newest?.schema ?? { type: "object" }));
  const [force, setForce] = useState(false);
  const action = useAction();
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      const body = { schema: parseJsonField(schema, "/schema"), examples: [], force };
      await api.post("/hub/v1/event-types/{name}/versions", { path: { name: type.name }, body });
      showToast("The new version applies.");
      reload();
    });
  };
  return (
    <Card title="Add a version">
      <form class="form" onSubmit={submit}>
        <FormError action={action} shown={["/schema"]} />
        <TextField label="Schema" multiline rows={10} value={schema} onChange={setSchema} error={action.errorOf("/schema")} hint="A version may only add. A change that breaks receivers is refused." />
        <Checkbox label="Accept a breaking change" checked={force} onChange={setForce} />
        <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>Add the version</button></div>
      </form>
    </Card>
  );
}
