-- no-transaction
-- schema: pillarbox_joins
-- Reads of moderation over HTTP: the bans of an event, the reason of a removal, and the audit trail. The indexes are built
-- while the tables can be written, which is not possible in a transaction. A build that was interrupted leaves an index that
-- is not used, so each one is dropped first.

-- The bans of an event, newest first.
drop index concurrently if exists pillarbox_joins.event_bans_newest;
create index concurrently event_bans_newest on pillarbox_joins.event_bans (event_id, created_at, id);

-- Moderation is rare, and joining is not. So these indexes of the history contain moderation only, and a registration
-- costs no more than before: the last kick or ban of a user, and the audit trail of all events and of one moderator.
drop index concurrently if exists pillarbox_joins.history_moderated_user;
create index concurrently history_moderated_user on pillarbox_joins.history (event_id, user_id, version)
    where action in ('kicked', 'banned', 'unbanned');
drop index concurrently if exists pillarbox_joins.history_moderated_at;
create index concurrently history_moderated_at on pillarbox_joins.history (at, event_id, version)
    where action in ('kicked', 'banned', 'unbanned');
drop index concurrently if exists pillarbox_joins.history_moderated_by;
create index concurrently history_moderated_by on pillarbox_joins.history (by, at, event_id, version)
    where action in ('kicked', 'banned', 'unbanned');
