import { useState } from "preact/hooks";
import { api } from "../api/client";
import { actForTenant, caller, shownTenant } from "../api/session";
import type { Tenant } from "../api/types";
import { Empty, Loaded } from "../components/async";
import { Badge, Card, Identifier, Page, Tabs, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton, FormError, TextField, useAction, type Action } from "../components/form";
import { ListView, usePages } from "../components/list";
import { showToast } from "../components/toasts";
import { describePrincipal, isSettingsKey } from "../lib/format";
import { useLive } from "../lib/live";
import { link, navigate, setQuery } from "../lib/router";
import { useStore } from "../lib/store";
import type { PageProps } from "../pages";

export function TenantsPage({ parts, query }: PageProps) {
  const [name] = parts;
  if (name === "new") return <NewTenantPage />;
  if (name !== undefined && name !== "audit") return <TenantPage name={name} />;
  const create = <a class="button primary" href={link("tenants", "new")}>Create a tenant</a>;
  return (
    <Page title="Tenants" description="Customers of this installation. Tenants never see each other's data." actions={create}>
      <Tabs label="Parts" current={name ?? ""} tabs={[
        { id: "", label: "Tenants", href: link("tenants") }, { id: "audit", label: "Audit trail", href: link("tenants", "audit") },
      ]} />
      {name === undefined && (
        <div class="filters">
          <TextField label="Search" type="search" value={query.get("q") ?? ""} onChange={(value) => setQuery({ q: value })} placeholder="Name" />
        </div>
      )}
      <Card flush>{name === "audit" ? <AuditTrail /> : <TenantList search={query.get("q") ?? ""} />}</Card>
    </Page>
  );
}

function TenantList({ search }: { search: string }) {
  const list = usePages<Tenant>(`tenants ${search}`, (page, signal) => api.get("/admin/v1/tenants", { query: { q: search || undefined, ...page }, signal }));
  // The API lets keys of operators act for a tenant, but no user.
  const mayAct = useStore(caller)?.kind === "key";
  const switchTo = (name: string) => async () => {
    actForTenant(name === caller.get()?.tenant ? "" : name);
    navigate(link());
  };
  return (
    <ListView list={list} label="Tenants" rowKey={(row) => row.name} columns={[
      { header: "Name", primary: true, cell: (row) => <a href={link("tenants", row.name)}>{row.name}</a> },
      { header: "Display name", cell: (row) => row.display_name ?? <span class="muted">–</span> },
      { header: "State", cell: (row) => row.suspended_at ? <Badge tone="bad">suspended</Badge> : <Badge tone="good">active</Badge> },
      { header: "Subscriber limit", align: "right", cell: (row) => row.subscribers_max ?? "default" },
      { header: "Rate limit", align: "right", cell: (row) => row.events_per_second_max ? `${row.events_per_second_max} events/s` : "none" },
      { header: "Created", cell: (row) => <Time at={row.created_at} /> },
      ...(mayAct ? [{ header: "Actions", actions: true, cell: (row: Tenant) => row.name === shownTenant() ? null : <ActionButton class="small" label="Switch to it" onRun={switchTo(row.name)} /> }] : []),
    ]} empty={<Empty title="No tenant">{search === "" ? "Create one for each customer." : `No name contains "${search}".`}</Empty>} />
  );
}

function AuditTrail() {
  const list = usePages("audit", (page, signal) => api.get("/admin/v1/audit", { query: page, signal }));
  return (
    <ListView list={list} label="Audit trail" rowKey={(row) => row.id} columns={[
      { header: "Request", primary: true, cell: (row) => <code>{row.method} {row.route}</code> },
      { header: "Tenant", cell: (row) => row.tenant },
      { header: "Status", align: "right", cell: (row) => row.status ?? "interrupted" },
      { header: "Key", cell: (row) => isSettingsKey(row.key_id) ? describePrincipal(`key:${row.key_id}`) : <Identifier value={row.key_id} /> },
      { header: "When", cell: (row) => <Time at={row.at} /> },
    ]} empty={<Empty title="No requests yet">Requests that a key of main makes for a tenant are listed here.</Empty>} />
  );
}

interface Draft {
  name: string;
  displayName: string;
  subscribersMax: string;
  eventsPerSecondMax: string;
  payloadBytesMax: string;
}

function limits(draft: Draft) {
  const number = (text: string) => (text === "" ? null : Number(text));
  return {
    display_name: draft.displayName || null,
    subscribers_max: number(draft.subscribersMax),
    events_per_second_max: number(draft.eventsPerSecondMax),
    payload_bytes_max: number(draft.payloadBytesMax),
  };
}

function TenantFields({ draft, onChange, action }: { draft: Draft; onChange: (draft: Draft) => void; action: Action }) {
  const set = (field: keyof Draft) => (value: string) => onChange({ ...draft, [field]: value });
  return (
    <div class="form-grid">
      <TextField label="Display name" value={draft.displayName} onChange={set("displayName")} error={action.errorOf("/display_name")} />
      <TextField label="Subscriber limit" type="number" value={draft.subscribersMax} onChange={set("subscribersMax")} error={action.errorOf("/subscribers_max")} hint="Leave empty for the default." />
      <TextField label="Rate limit (events per second)" type="number" value={draft.eventsPerSecondMax} onChange={set("eventsPerSecondMax")} error={action.errorOf("/events_per_second_max")} hint="Leave empty for no limit." />
      <TextField label="Payload limit (bytes)" type="number" value={draft.payloadBytesMax} onChange={set("payloadBytesMax")} error={action.errorOf("/payload_bytes_max")} hint="Leave empty for 262,144 (256 KiB)." />
    </div>
  );
}

const FIELDS = ["/name", "/display_name", "/subscribers_max", "/events_per_second_max", "/payload_bytes_max"];

function NewTenantPage() {
  const [draft, setDraft] = useState<Draft>({ name: "", displayName: "", subscribersMax: "", eventsPerSecondMax: "", payloadBytesMax: "" });
  const action = useAction();
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      await api.post("/admin/v1/tenants", { body: { name: draft.name, ...limits(draft) } });
      showToast(`${draft.name} was created.`);
      navigate(link("tenants"));
    });
  };
  return (
    <Page title="New tenant" parent={{ label: "Tenants", href: link("tenants") }}>
      <form class="stack" onSubmit={submit}>
        <FormError action={action} shown={FIELDS} />
        <Card>
          <div class="form">
            <TextField label="Name" required value={draft.name} onChange={(name) => setDraft({ ...draft, name })} error={action.errorOf("/name")} placeholder="acme" hint="Part of addresses and headers; it cannot be changed." />
            <TenantFields draft={draft} onChange={setDraft} action={action} />
          </div>
        </Card>
        <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>Create</button></div>
      </form>
    </Page>
  );
}

function TenantPage({ name }: { name: string }) {
  const live = useLive(`tenant ${name}`, (signal) => api.get("/admin/v1/tenants/{tenant}", { path: { tenant: name }, signal }));
  return (
    <Page title={live.data?.display_name ?? name} parent={{ label: "Tenants", href: link("tenants") }}
      description={live.data && <span class="row"><code>{name}</code>{live.data.suspended_at ? <Badge tone="bad">suspended</Badge> : <Badge tone="good">active</Badge>}</span>}
      actions={live.data && <TenantActions tenant={live.data} reload={live.reload} />}>
      <Loaded live={live}>{(tenant) => <TenantForm key={tenant.version} tenant={tenant} reload={live.reload} />}</Loaded>
    </Page>
  );
}

function TenantActions({ tenant, reload }: { tenant: Tenant; reload: () => void }) {
  const path = { tenant: tenant.name };
  if (tenant.name === "main") return null;
  const suspend = async () => {
    const body = "Its keys and tokens are refused, and messages to its subscribers wait until it is resumed.";
    if (await ask({ title: `Suspend ${tenant.name}?`, body, confirm: "Suspend", isDangerous: true }) === null) return;
    await api.post("/admin/v1/tenants/{tenant}/suspend", { path });
    reload();
  };
  const resume = async () => {
    await api.post("/admin/v1/tenants/{tenant}/resume", { path });
    reload();
  };
  const remove = async () => {
    const body = "Its keys, subscribers, streams, replays and event types are deleted. Messages that wait are not sent. This cannot be undone.";
    if (await ask({ title: `Delete ${tenant.name}?`, body, confirm: "Delete", isDangerous: true, typeToConfirm: tenant.name }) === null) return;
    await api.delete("/admin/v1/tenants/{tenant}", { path });
    showToast(`${tenant.name} was deleted.`);
    navigate(link("tenants"));
  };
  return tenant.suspended_at
    ? <><ActionButton label="Resume" onRun={resume} /><ActionButton class="danger" label="Delete" onRun={remove} /></>
    : <ActionButton class="danger" label="Suspend" onRun={suspend} />;
}

function TenantForm({ tenant, reload }: { tenant: Tenant; reload: () => void }) {
  const [draft, setDraft] = useState<Draft>({
    name: tenant.name,
    displayName: tenant.display_name ?? "",
    subscribersMax: tenant.subscribers_max?.toString() ?? "",
    eventsPerSecondMax: tenant.events_per_second_max?.toString() ?? "",
    payloadBytesMax: tenant.payload_bytes_max?.toString() ?? "",
  });
  const action = useAction();
  const submit = (event: Event) => {
    event.preventDefault();
    void action.run(async () => {
      await api.patch("/admin/v1/tenants/{tenant}", { path: { tenant: tenant.name }, body: limits(draft) });
      showToast("Saved.");
      reload();
    });
  };
  return (
    <form class="stack" onSubmit={submit}>
      <FormError action={action} shown={FIELDS} />
      <Card title="Name and limits"><TenantFields draft={draft} onChange={setDraft} action={action} /></Card>
      <div class="row"><button type="submit" class="button primary" disabled={action.isBusy}>Save</button></div>
    </form>
  );
}
