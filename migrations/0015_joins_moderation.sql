-- schema: pillarbox_joins
-- Reads of moderation over HTTP: the bans of an event, the reason of a removal, and the audit trail.

-- The bans of an event, newest first.
create index event_bans_newest on pillarbox_joins.event_bans (event_id, created_at, id);

-- Moderation is rare, and joining is not. So these indexes of the history contain moderation only, and a registration
-- costs no more than before: the last kick or ban of a user, and the audit trail of all events and of one moderator.
create index history_moderated_user on pillarbox_joins.history (event_id, user_id, version)
    where action in ('kicked', 'banned', 'unbanned');
create index history_moderated_at on pillarbox_joins.history (at, event_id, version)
    where action in ('kicked', 'banned', 'unbanned');
create index history_moderated_by on pillarbox_joins.history (by, at, event_id, version)
    where action in ('kicked', 'banned', 'unbanned');
