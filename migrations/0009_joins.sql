-- schema: pillarbox_joins
-- Who takes part in an event, who waits, and who may not. Whoever changes anything here holds the event's row in
-- `event_capacity`, so all of an event's joins change one after the other, whichever process asks.
create schema pillarbox_joins;

create type pillarbox_joins.join_status as enum ('active', 'waitlisted', 'canceled', 'expired', 'rejected');

-- An event as its messages told of it, and how many have joined. A row is updated with every batch: half of the page is
-- kept free and no index is on what changes, so that an update stays in its page.
create table pillarbox_joins.event_capacity (
    event_id       uuid        primary key,
    owner_id       uuid        not null,
    status         text        not null check (status in ('draft', 'published', 'canceled')),
    -- 0 is unlimited; -1: canceled, nobody comes in.
    capacity       integer     not null check (capacity >= -1),
    start_time     timestamptz not null,
    end_time       timestamptz not null,
    -- Of the news that this is: older news change nothing.
    event_version  bigint      not null,
    active_count   integer     not null default 0 check (active_count >= 0),
    waitlist_count integer     not null default 0 check (waitlist_count >= 0),
    next_seq       bigint      not null default 1,
    -- Of the counts: grows with every change of the event's joins.
    version        bigint      not null default 0,
    -- When there is something to do that nobody will ask for: people to be told that it is over, or to move up.
    sweep_at       timestamptz,
    constraint event_capacity_canceled check ((status = 'canceled') = (capacity = -1))
) with (fillfactor = 50);
create index event_capacity_sweep on pillarbox_joins.event_capacity (sweep_at) where sweep_at is not null;

-- One row for each person and event, as it is now. No foreign key: who writes here holds the event's row, and a check would
-- be a look-up for each row.
create table pillarbox_joins.joins (
    id           uuid                        primary key,
    event_id     uuid                        not null,
    user_id      uuid                        not null,
    status       pillarbox_joins.join_status not null,
    -- The place in the event's order; who joins again gets a new one.
    seq          bigint                      not null,
    created_at   timestamptz                 not null,
    updated_at   timestamptz                 not null,
    canceled_at  timestamptz,
    -- When a seat was had: at once, or by moving up.
    activated_at timestamptz,
    constraint joins_one_each unique (event_id, user_id)
);
-- Two indexes and not one with the status in it: each is walked by seq, and the waitlist's is counted in.
create index joins_waitlist_fifo on pillarbox_joins.joins (event_id, seq) where status = 'waitlisted';
create index joins_participants on pillarbox_joins.joins (event_id, seq) where status = 'active';
create index joins_user_history on pillarbox_joins.joins (user_id, created_at desc, id desc);

-- Every change, in its order.
create table pillarbox_joins.history (
    event_id    uuid        not null,
    -- The version of the event's counts that the change made.
    version     bigint      not null,
    user_id     uuid        not null,
    action      text        not null
                check (action in ('joined', 'canceled', 'promoted', 'kicked', 'banned', 'unbanned', 'expired')),
    -- Null: had not joined.
    seq         bigint,
    from_status pillarbox_joins.join_status,
    to_status   pillarbox_joins.join_status,
    -- `user:<id>` or `key:<id>`; `events` for what followed from an event's news, `system` for what is done by itself.
    by          text        not null,
    reason      text,
    at          timestamptz not null,
    primary key (event_id, version)
);

create function pillarbox_joins.refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'history is only appended to';
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
    -- Null: for ever.
    expires_at timestamptz,
    created_at timestamptz not null,
    constraint event_bans_one_each unique (event_id, user_id)
);
