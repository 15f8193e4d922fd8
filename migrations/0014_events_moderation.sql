-- schema: pillarbox_events
-- Moderation by admins, the audit trail, prefixes in search, and new events in the trending feed.

-- Why the status was changed; admins must give a reason. `by_key`: `changed_by` is the id of an API key and not of a user.
-- The previous version writes neither column, which is correct for its changes: only owners made them.
alter table pillarbox_events.status_change
    add column reason text check (length(reason) between 1 and 500),
    add column by_key boolean not null default false;

-- The audit trail, newest first: of all events, and of one user or API key. Maintenance also finds the events that were
-- published lately. There are few rows per event, so the indexes are small.
create index status_change_at on pillarbox_events.status_change (at, event_id, version);
create index status_change_by on pillarbox_events.status_change (changed_by, at, event_id, version);

-- The beginnings of words in titles. The column `search` contains the stems of words: `evenin` is not the beginning of
-- `even`, which `evening` is stored as. An expression and not another stored column: adding one would rewrite the table.
-- Not a partial index, although only published events are found: PostgreSQL would use no statistics of its expression,
-- take every prefix for a common one, and walk along all events instead.
create index event_title_words on pillarbox_events.event using gin (to_tsvector('pg_catalog.simple', title));
-- The statistics of the expression; those of an empty table would be worse than none.
do $$
begin
    if exists (select from pillarbox_events.event) then
        analyze pillarbox_events.event;
    end if;
end
$$;

-- When events that were published after the scoring were last added to the epoch; null: not yet.
alter table pillarbox_events.trending_epoch add column extended_at timestamptz;
