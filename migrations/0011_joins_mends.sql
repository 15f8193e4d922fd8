-- schema: pillarbox_joins
-- Of the news that the event is known from: what is done later, by a sweep, belongs to the same trace.
alter table pillarbox_joins.event_capacity add column news_trace text;

-- Counts that were put right are a step of the history, too; it is nobody's. `not valid`: no row from before is looked at,
-- since all of them fit.
alter table pillarbox_joins.history alter column user_id drop not null;
alter table pillarbox_joins.history drop constraint history_action_check;
alter table pillarbox_joins.history add constraint history_action_check check (
    action in ('joined', 'canceled', 'promoted', 'kicked', 'banned', 'unbanned', 'expired', 'recounted')) not valid;
alter table pillarbox_joins.history add constraint history_user check ((user_id is null) = (action = 'recounted')) not valid;
