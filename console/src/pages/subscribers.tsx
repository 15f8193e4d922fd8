import { api } from "../api/client";
import type { Subscriber } from "../api/types";
import { Empty } from "../components/async";
import { Badge, Card, Page, Time } from "../components/basics";
import { SelectField, TextField } from "../components/form";
import { ListView, usePages } from "../components/list";
import { useMayManage } from "../lib/permissions";
import { link, setQuery } from "../lib/router";
import type { PageProps } from "../pages";
import { SubscriberPage } from "./subscriber";
import { EditSubscriber, NewSubscriberPage } from "./subscriber-form";

const POLL_MS = 5_000;

export function SubscribersPage({ parts, query }: PageProps) {
  const [id, part] = parts;
  if (id === undefined) return <SubscriberList query={query} />;
  if (id === "new") return <NewSubscriberPage />;
  return part === "edit" ? <EditSubscriber id={id} /> : <SubscriberPage id={id} tab={query.get("tab") ?? ""} />;
}

function SubscriberList({ query }: { query: URLSearchParams }) {
  const active = query.get("active") ?? "";
  const search = query.get("q") ?? "";
  const mayManage = useMayManage();
  const list = usePages<Subscriber>(`subscribers ${active} ${search}`, (page, signal) =>
    api.get("/hub/v1/subscribers", { query: { q: search || undefined, is_active: active === "" ? undefined : active === "true", ...page }, signal }), POLL_MS);
  const create = <a class="button primary" href={link("subscribers", "new")}>Create a subscriber</a>;
  return (
    <Page title="Subscribers" description="Endpoints that receive events as webhooks." actions={mayManage && create}>
      <div class="filters">
        <TextField label="Search" type="search" value={search} onChange={(value) => setQuery({ q: value })} placeholder="Name" />
        <SelectField label="State" value={active} onChange={(value) => setQuery({ active: value })} options={[
          { value: "", label: "All" }, { value: "true", label: "Enabled" }, { value: "false", label: "Disabled" },
        ]} />
      </div>
      <Card flush>
        <ListView list={list} label="Subscribers" rowKey={(row) => row.id} columns={[
          { header: "Name", primary: true, cell: (row) => <a href={link("subscribers", row.id)}>{row.name}</a> },
          { header: "State", cell: (row) => <SubscriberState subscriber={row} /> },
          { header: "URL", cell: (row) => <code class="truncate" title={row.url}>{row.url}</code> },
          { header: "Event types", cell: (row) => <EventTypeList types={row.event_types} /> },
          { header: "Changed", cell: (row) => <Time at={row.updated_at} /> },
        ]} empty={
          search !== "" || active !== "" ? <Empty title="No subscriber matches">Change the search or the state.</Empty> : <Empty title="No subscriber" actions={mayManage && create}>
            A subscriber is the address of a server that receives events. Create one, send a test, and see the attempt appear.
          </Empty>
        } />
      </Card>
    </Page>
  );
}

/**
 * What the configuration says. The health, which the attempts decide, is on the page of the subscriber: so nothing is green
 * here, as an endpoint that is enabled may fail.
 */
export function SubscriberState({ subscriber }: { subscriber: Subscriber }) {
  if (subscriber.unopened) return <Badge tone="bad">key missing</Badge>;
  if (!subscriber.is_active) return <Badge tone="bad">disabled</Badge>;
  if (subscriber.paused_at) return <Badge tone="warn">paused</Badge>;
  if (subscriber.unverified_since) return <Badge tone="warn">not verified</Badge>;
  return <Badge>enabled</Badge>;
}

export function EventTypeList({ types }: { types: string[] }) {
  const shown = types.slice(0, 3).join(", ");
  return <code class="truncate" title={types.join(", ")}>{types.length > 3 ? `${shown} and ${types.length - 3} more` : shown}</code>;
}
