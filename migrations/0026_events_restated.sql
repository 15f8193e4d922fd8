-- schema: pillarbox_events
-- The notify service names events in its texts, and may be new here: it does not know the events whose messages the log does not
-- retain any more. So all of them are restated once.

-- What is to be restated, in steps, by the order of the event ids.
create table pillarbox_events.restatement (
    -- The service that needs it.
    name       text primary key,
    -- The last event that was restated; null before the first.
    last_event uuid,
    done_at    timestamptz
);
-- An installation without events has nothing to restate.
insert into pillarbox_events.restatement (name) select 'notify' where exists (select from pillarbox_events.event);
