-- schema: pillarbox_joins
-- Registrations for events, waitlists and bans. Every transaction that changes anything of an event locks the event's
-- row in `event_capacity`, so the changes of one event are serialized across all processes.
create schema pillarbox_joins;

create type pillarbox_joins.join_status as enum ('active', 'waitlisted', 'canceled', 'expired', 'rejected');

-- An event as last reported by the events service, and its counts. Every batch of commands updates the row. Half of
-- each page is free and no index contains a column that changes with a batch, so that updates stay within their page
-- (HOT).
create table pillarbox_joins.event_capacity (
    event_id       uuid        primary key,
    owner_id       uuid        not null,
    status         text        not null check (status in ('draft', 'published', 'canceled')),
    -- 0 means unlimited; -1: the event is canceled and cannot be joined.
    capacity       integer     not null check (capacity >= -1),
    start_time     timestamptz not null,
    end_time       timestamptz not null,
    -- The version of the last update that was applied. Updates with the same or a lower version are ignored.
    event_version  bigint      not null,
    active_count   integer     not null default 0 check (active_count >= 0),
    waitlist_count integer     not null default 0 check (waitlist_count >= 0),
    next_seq       bigint      not null default 1,
    -- The version of the counts: increases with every change of the event's registrations.
    version        bigint      not null default 0,
    -- When registrations must be expired or promoted without a request; null if never.
    sweep_at       timestamptz,
    -- The trace of the last update that was applied. A later sweep that follows from it belongs to the same trace.
    update_trace   text,
    constraint event_capacity_canceled check ((status = 'canceled') = (capacity = -1))
) with (fillfactor = 50);
create index event_capacity_sweep on pillarbox_joins.event_capacity (sweep_at) where sweep_at is not null;

-- One row for each user and event: the current registration. There is no foreign key to `event_capacity`, because
-- every writer holds the lock of the event's row, and the check would cost a lookup for each row.
create table pillarbox_joins.joins (
    id           uuid                        primary key,
    event_id     uuid                        not null,
    user_id      uuid                        not null,
    status       pillarbox_joins.join_status not null,
    -- The sequence number in the event's order of joining. A user who joins again gets a new one.
    seq          bigint                      not null,
    created_at   timestamptz                 not null,
    updated_at   timestamptz                 not null,
    canceled_at  timestamptz,
    -- When the registration got a seat: at once, or by promotion.
    activated_at timestamptz,
    constraint joins_one_each unique (event_id, user_id)
);
-- Two partial indexes instead of one with the status: each is scanned in the order of seq, and positions are counted in
-- the one of the waitlist.
create index joins_waitlist_fifo on pillarbox_joins.joins (event_id, seq) where status = 'waitlisted';
create index joins_participants on pillarbox_joins.joins (event_id, seq) where status = 'active';
create index joins_user_history on pillarbox_joins.joins (user_id, created_at desc, id desc);

-- Every change, in order. Append-only.
create table pillarbox_joins.history (
    event_id    uuid        not null,
    -- The version of the event's counts after the change.
    version     bigint      not null,
    -- Null for `recounted`, a correction of the counts that concerns no user.
    user_id     uuid,
    action      text        not null,
    -- Null if the user has never joined.
    seq         bigint,
    from_status pillarbox_joins.join_status,
    to_status   pillarbox_joins.join_status,
    -- `user:<id>` or `key:<id>`; `events` if it followed from an update of the event; `system` if time passed.
    by          text        not null,
    reason      text,
    at          timestamptz not null,
    primary key (event_id, version),
    constraint history_action_check check (
        action in ('joined', 'canceled', 'promoted', 'kicked', 'banned', 'unbanned', 'expired', 'recounted')),
    constraint history_user check ((user_id is null) = (action = 'recounted'))
);
-- Moderation is rare, and joining is not. So these indexes of the history contain moderation only, and do not slow down a
-- registration: the last kick or ban of a user, and the audit trail of all events and of one moderator.
create index history_moderated_user on pillarbox_joins.history (event_id, user_id, version)
    where action in ('kicked', 'banned', 'unbanned');
create index history_moderated_at on pillarbox_joins.history (at, event_id, version)
    where action in ('kicked', 'banned', 'unbanned');
create index history_moderated_by on pillarbox_joins.history (by, at, event_id, version)
    where action in ('kicked', 'banned', 'unbanned');

create function pillarbox_joins.refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'pillarbox_joins.history is append-only'
        using hint = 'Insert a new entry instead.';
end
$$;
create trigger history_append_only before update or delete or truncate on pillarbox_joins.history
    for each statement execute function pillarbox_joins.refuse_change();

create table pillarbox_joins.event_bans (
    id         uuid        primary key,
    event_id   uuid        not null,
    user_id    uuid        not null,
    reason     text,
    -- `user:<id>` or `key:<id>`.
    banned_by  text        not null,
    -- Null for a permanent ban.
    expires_at timestamptz,
    created_at timestamptz not null,
    constraint event_bans_one_each unique (event_id, user_id)
);
-- The bans of an event, newest first.
create index event_bans_newest on pillarbox_joins.event_bans (event_id, created_at, id);
