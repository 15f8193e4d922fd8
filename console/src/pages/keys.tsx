import { useState } from "preact/hooks";
import { api } from "../api/client";
import { caller, shownTenant } from "../api/session";
import type { ApiKey, PortalToken } from "../api/types";
import { Empty } from "../components/async";
import { Badge, Card, Page, Tabs, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, FormError, SelectField, TextField, useAction } from "../components/form";
import { ListView, usePages } from "../components/list";
import { SecretNotice } from "../components/secret";
import { TenantField } from "../components/tenant-field";
import { showToast } from "../components/toasts";
import { useNow } from "../lib/live";
import { link } from "../lib/router";
import { useStore } from "../lib/store";
import type { PageProps } from "../pages";

export function KeysPage({ parts }: PageProps) {
  const isOperator = useStore(caller)?.is_operator === true;
  const tab = isOperator ? parts[0] ?? "" : "portal";
  return (
    <Page title="Keys" description="Keys are for programs; portal tokens let a customer's employees use this console for a while.">
      {isOperator && (
        <Tabs label="Kinds of keys" current={tab} tabs={[
          { id: "", label: "API keys", href: link("keys") }, { id: "portal", label: "Portal tokens", href: link("keys", "portal") },
        ]} />
      )}
      {tab === "portal" ? <PortalTokens /> : <ApiKeys />}
    </Page>
  );
}

function ApiKeys() {
  const [secret, setSecret] = useState("");
  const list = usePages<ApiKey>("keys", (page, signal) => api.get("/admin/v1/keys", { query: page, signal }));
  const revoke = (key: ApiKey) => async () => {
    const body = "Programs that use it are refused at once. This cannot be undone.";
    if (await ask({ title: `Revoke ${key.name}?`, body, confirm: "Revoke", isDangerous: true }) === null) return;
    await api.delete("/admin/v1/keys/{id}", { path: { id: key.id } });
    showToast(`${key.name} was revoked.`);
    list.reload();
  };
  return (
    <>
      {secret !== "" && <SecretNotice secret={secret} what="key" onClose={() => setSecret("")} />}
      <NewKey onCreated={(key) => { setSecret(key); list.reload(); }} />
      <Card flush>
        <ListView list={list} label="API keys" rowKey={(row) => row.id} columns={[
          { header: "Name", primary: true, cell: (row) => <>{row.name} <code class="muted">{row.hint}</code></> },
          { header: "Role", cell: (row) => <Badge plain>{row.role}</Badge> },
          { header: "Tenant", cell: (row) => row.tenant },
          { header: "Created", cell: (row) => <Time at={row.created_at} /> },
          { header: "Expires", cell: (row) => row.revoked_at ? <Badge tone="bad">revoked</Badge> : row.expires_at ? <Expiry at={row.expires_at} /> : <span class="muted">never</span> },
          { header: "Actions", actions: true, cell: (row) => row.revoked_at ? null : <ActionButton class="small danger" label="Revoke" onRun={revoke(row)} /> },
        ]} empty={<Empty title="No key" />} />
      </Card>
    </>
  );
}

function Expiry({ at }: { at: string }) {
  return Date.parse(at) <= useNow() ? <><Badge tone="bad">expired</Badge> <Time at={at} /></> : <Time at={at} />;
}

const ROLES: { value: ApiKey["role"]; label: string }[] = [
  { value: "ingest", label: "ingest: posts events" },
  { value: "manage", label: "manage: manages subscribers" },
  { value: "admin", label: "admin: everything" },
];

function NewKey({ onCreated }: { onCreated: (key: string) => void }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState<ApiKey["role"]>("ingest");
  const [tenant, setTenant] = useState(shownTenant() || "main");
  const [expires, setExpires] = useState("");
  const action = useAction();
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      const expiresAt = expires === "" ? undefined : new Date(expires).toISOString();
      const created = await api.post("/admin/v1/keys", { body: { name, role, tenant, expires_at: expiresAt } });
      setName("");
      setExpires("");
      onCreated(created.key);
    });
  };
  return (
    <Card title="New key">
      <form class="form" onSubmit={submit}>
        <FormError action={action} shown={["/name", "/role", "/tenant", "/expires_at"]} />
        <div class="form-grid">
          <TextField label="Name" required value={name} onChange={setName} error={action.errorOf("/name")} placeholder="orders service" />
          <SelectField label="Role" value={role} onChange={(value) => setRole(ROLES.find((one) => one.value === value)?.value ?? "ingest")} options={ROLES} error={action.errorOf("/role")} />
          <TenantField value={tenant} onChange={setTenant} error={action.errorOf("/tenant")} />
          <TextField label="Expires" type="datetime-local" value={expires} onChange={setExpires} error={action.errorOf("/expires_at")} hint="Your local time. Leave empty for a key that never expires." />
        </div>
        <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>Create the key</button></div>
      </form>
    </Card>
  );
}

function PortalTokens() {
  const [portalLink, setPortalLink] = useState("");
  const list = usePages<PortalToken>("portal-tokens", (page, signal) => api.get("/hub/v1/portal-tokens", { query: page, signal }));
  const create = (access: PortalToken["access"]) => async () => {
    const created = await api.post("/hub/v1/portal-tokens", { body: { access } });
    setPortalLink(`${location.origin}${location.pathname}#token=${created.token}`);
    list.reload();
  };
  const revoke = (id: string) => async () => {
    const body = "Users who signed in with it are signed out. This cannot be undone.";
    if (await ask({ title: "Revoke this token?", body, confirm: "Revoke", isDangerous: true }) === null) return;
    await api.delete("/hub/v1/portal-tokens/{id}", { path: { id } });
    showToast("The token was revoked.");
    list.reload();
  };
  return (
    <>
      {portalLink !== "" && <SecretNotice secret={portalLink} what="portal link" onClose={() => setPortalLink("")} />}
      <Card title={`Portal tokens of ${shownTenant() || "this tenant"}`} flush actions={
        <span class="row">
          <ActionButton class="small" label="Create a read link" onRun={create("read")} />
          <ActionButton class="small" label="Create a manage link" onRun={create("manage")} />
        </span>
      }>
        <ListView list={list} label="Portal tokens" rowKey={(row) => row.id} columns={[
          { header: "Token", primary: true, cell: (row) => row.name ?? <code>{row.id.slice(0, 8)}</code> },
          { header: "Access", cell: (row) => <Badge plain>{row.access}</Badge> },
          { header: "Created", cell: (row) => <Time at={row.created_at} /> },
          { header: "Expires", cell: (row) => <Expiry at={row.expires_at} /> },
          { header: "Actions", actions: true, cell: (row) => <ActionButton class="small danger" label="Revoke" onRun={revoke(row.id)} /> },
        ]} empty={<Empty title="No valid token">A link signs a customer's employee in for an hour. It can be opened in a browser or embedded in your own page with ?embed=1.</Empty>} />
      </Card>
    </>
  );
}
