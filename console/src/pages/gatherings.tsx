import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { Gathering } from "../api/types";
import { Empty } from "../components/async";
import { Card, Meter, Page, StateBadge, Time } from "../components/basics";
import { TextField } from "../components/form";
import { ListView, usePages } from "../components/list";
import { formatNumber } from "../lib/format";
import { link, setQuery } from "../lib/router";
import type { PageProps } from "../pages";
import { GatheringPage } from "./gathering";

const POLL_MS = 3_000;

export function GatheringsPage({ parts, query }: PageProps) {
  const [id, tab = ""] = parts;
  return id === undefined ? <GatheringList query={query} /> : <GatheringPage id={id} tab={tab} />;
}

function GatheringList({ query }: { query: URLSearchParams }) {
  const text = query.get("q") ?? "";
  const city = query.get("city") ?? "";
  const [draft, setDraft] = useState({ text, city });
  const list = usePages<Gathering>(`gatherings ${text} ${city}`, (page, signal) =>
    api.get("/event/v1/events", { query: { q: text || undefined, city: city || undefined, ...page }, signal }), POLL_MS);
  const search = (event: Event) => {
    event.preventDefault();
    setQuery({ q: draft.text.trim(), city: draft.city.trim() });
  };
  return (
    <Page title="Gatherings" description="Published gatherings, with their seats as they fill.">
      <form class="filters" role="search" onSubmit={search}>
        <TextField label="Title" value={draft.text} onChange={(value) => setDraft({ ...draft, text: value })} placeholder="Rust meetup" />
        <TextField label="City" value={draft.city} onChange={(value) => setDraft({ ...draft, city: value })} placeholder="Zürich" />
        <button type="submit" class="button">Search</button>
      </form>
      <Card flush>
        <ListView list={list} label="Gatherings" rowKey={(row) => row.id} columns={[
          { header: "Title", primary: true, cell: (row) => <a href={link("gatherings", row.id)}>{row.title}</a> },
          { header: "City", cell: (row) => row.city },
          { header: "Status", cell: (row) => <StateBadge state={row.status} /> },
          { header: "Seats", cell: (row) => <Seats active={row.active_participants} capacity={row.capacity} /> },
          { header: "Starts", cell: (row) => <Time at={row.start_time} /> },
        ]} empty={<Empty title="No gathering">{text || city ? "Nothing matches the search." : "Published gatherings appear here."}</Empty>} />
      </Card>
    </Page>
  );
}

export function Seats({ active, capacity }: { active: number; capacity: number }) {
  if (capacity === 0) return <span class="numeric">{formatNumber(active)}, unlimited</span>;
  const share = active / capacity;
  return (
    <div class="stack-small">
      <span class="numeric nowrap">{formatNumber(active)} of {formatNumber(capacity)}</span>
      <Meter share={share} label={`${active} of ${capacity} seats are taken`} tone={share >= 1 ? "warn" : "good"} />
    </div>
  );
}
