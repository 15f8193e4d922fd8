-- no-transaction
-- schema: pillarbox_events
-- The indexes of the audit trail and of prefixes in search. They are built while the tables can be written, which is not
-- possible in a transaction. A build that was interrupted leaves an index that is not used, so each one is dropped first.

-- The audit trail, newest first: of all events, and of one user or API key. Maintenance also finds the events that were
-- published lately. There are few rows per event, so the indexes are small.
drop index concurrently if exists pillarbox_events.status_change_at;
create index concurrently status_change_at on pillarbox_events.status_change (at, event_id, version);
drop index concurrently if exists pillarbox_events.status_change_by;
create index concurrently status_change_by on pillarbox_events.status_change (changed_by, at, event_id, version);

-- The beginnings of words in titles. The column `search` contains the stems of words: `evenin` is not the beginning of
-- `even`, which `evening` is stored as. An expression and not another stored column: adding one would rewrite the table.
-- Not a partial index, although only published events are found: PostgreSQL would use no statistics of its expression,
-- take every prefix for a common one, and walk along all events instead.
drop index concurrently if exists pillarbox_events.event_title_words;
create index concurrently event_title_words on pillarbox_events.event
    using gin (to_tsvector('pg_catalog.simple', title));
-- The statistics of the expression; those of an empty table would be worse than none.
do $$
begin
    if exists (select from pillarbox_events.event) then
        analyze pillarbox_events.event;
    end if;
end
$$;
