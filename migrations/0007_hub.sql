-- schema: pillarbox_hub
-- The hub: who is sent what, and what came of it. What succeeds is only appended to; rows that change are few.
create schema pillarbox_hub;

-- ---- who is sent what

create table pillarbox_hub.subscriber (
    id                    uuid        primary key,
    tenant                text        not null,
    name                  text        not null check (length(name) between 1 and 100),
    url                   text        not null check (length(url) between 1 and 2000),
    -- Exact, or a prefix: `order.*`.
    event_types           text[]      not null check (cardinality(event_types) between 1 and 100),
    -- Conditions on the payload; null: none.
    filter                jsonb,
    -- A JSON pointer into the payload; null: the key that the event came with.
    ordering_key          text,
    retry_backoff_seconds integer[]   not null,
    retry_statuses        smallint[]  not null,
    on_exhausted          text        not null check (on_exhausted in ('skip', 'block')),
    timeout_ms            integer     not null check (timeout_ms between 100 and 60000),
    max_in_flight         integer     not null check (max_in_flight between 1 and 1000),
    rate_limit_per_second integer     check (rate_limit_per_second between 1 and 100000),
    -- Sealed, like the secrets: they may hold a password.
    headers               bytea,
    format                text        not null check (format in ('raw', 'standard', 'cloudevents')),
    is_active             boolean     not null,
    -- Why it was switched off, if it was not its owner who did that.
    inactive_reason       text,
    paused_at             timestamptz,
    version               bigint      not null default 1,
    created_at            timestamptz not null,
    updated_at            timestamptz not null,
    -- Whose dispatcher sends to it.
    shard                 smallint    not null check (shard between 0 and 15)
);
create index subscriber_tenant on pillarbox_hub.subscriber (tenant, id);

-- What its deliveries are signed with: the newest, and after a rotation the ones before it for a while.
create table pillarbox_hub.secret (
    id         uuid        primary key,
    subscriber uuid        not null references pillarbox_hub.subscriber on delete cascade,
    sealed     bytea       not null,
    created_at timestamptz not null,
    -- Null: in use.
    expires_at timestamptz
);
create index secret_subscriber on pillarbox_hub.secret (subscriber);

-- Counts the changes to the two tables above: who has seen this number has seen them all.
create table pillarbox_hub.directory (
    only_one boolean primary key default true check (only_one),
    version  bigint  not null
);
insert into pillarbox_hub.directory (version) values (1);

create function pillarbox_hub.count_change() returns trigger
language plpgsql
as $$
begin
    update pillarbox_hub.directory set version = version + 1;
    return null;
end
$$;
create trigger subscriber_changed after insert or update or delete on pillarbox_hub.subscriber
    for each statement execute function pillarbox_hub.count_change();
create trigger secret_changed after insert or update or delete on pillarbox_hub.secret
    for each statement execute function pillarbox_hub.count_change();

-- ---- what is to be sent

-- One row for each event and subscriber that match, in the order of sending. Fan-out alone writes here, one transaction
-- after the other, so n has no gap and what has a higher n committed later.
create table pillarbox_hub.message (
    n           bigint      not null,
    at          timestamptz not null,
    subscriber  uuid        not null,
    -- Messages of one lane are sent one after the other; null: no other is waited for.
    lane        text,
    -- The place in its lane, from 1 and without a gap.
    seq         bigint,
    -- Where in the log.
    log_shard   smallint    not null,
    log_id      bigint      not null,
    log_at      timestamptz not null,
    -- It is sent again on request; this has its content.
    dead_letter uuid
) partition by range (at);
create index message_subscriber_n on pillarbox_hub.message (subscriber, n);
create index message_lane on pillarbox_hub.message (subscriber, lane, n) where lane is not null;
-- For people who ask what became of an event. Rows come in about the order of the log.
create index message_log_id on pillarbox_hub.message using brin (log_id) with (pages_per_range = 16, autosummarize = on);
create table pillarbox_hub.message_overflow partition of pillarbox_hub.message default;

-- What each batch of fan-out made, and for whom: dispatchers follow it.
create table pillarbox_hub.fanned (
    n_to        bigint      primary key,
    n_from      bigint      not null,
    subscribers uuid[]      not null,
    at          timestamptz not null
);

-- Who an event would have gone to, but for a filter or because they are switched off.
create table pillarbox_hub.unsent (
    log_id   bigint      not null,
    at       timestamptz not null,
    filtered uuid[]      not null,
    inactive uuid[]      not null
) partition by range (at);
create index unsent_log_id on pillarbox_hub.unsent using brin (log_id) with (pages_per_range = 16, autosummarize = on);
create table pillarbox_hub.unsent_overflow partition of pillarbox_hub.unsent default;

-- ---- what came of it

-- Every attempt. The last of a message has an outcome that ends it: delivered or dead.
create table pillarbox_hub.attempt (
    at         timestamptz not null,
    subscriber uuid        not null,
    n          bigint      not null,
    attempt    smallint    not null,
    outcome    text        not null check (outcome in ('delivered', 'failed', 'dead')),
    status     smallint,
    latency_ms integer     not null,
    -- What kind of failure, and what is known of it.
    error      text,
    detail     text,
    -- How the answer's body begins.
    excerpt    text
) partition by range (at);
create index attempt_subscriber_n on pillarbox_hub.attempt (subscriber, n);
create table pillarbox_hub.attempt_overflow partition of pillarbox_hub.attempt default;

-- Everything of a subscriber up to n has its outcome, or stands in a lane below. Appended, the highest counts; without
-- one, the attempts tell.
create table pillarbox_hub.position (
    subscriber uuid        not null,
    n          bigint      not null,
    at         timestamptz not null
) partition by range (at);
create index position_subscriber_n on pillarbox_hub.position (subscriber, n);
create table pillarbox_hub.position_overflow partition of pillarbox_hub.position default;

-- Lanes that wait, and the subscriber's position has gone past them.
create table pillarbox_hub.lane (
    subscriber uuid        not null,
    -- The message that is next; those of the lane before it have their outcome.
    head       bigint      not null,
    -- Null: a message without a lane, alone.
    lane       text,
    attempts   smallint    not null,
    -- Null: it is blocked until someone retries or skips its dead letter.
    next_at    timestamptz,
    -- Its head has died, and is sent again all the same.
    again      boolean     not null,
    primary key (subscriber, head)
);
create unique index lane_name on pillarbox_hub.lane (subscriber, lane) where lane is not null;

-- What people want done with a message; who sends to the subscriber does it.
create table pillarbox_hub.command (
    id         bigint generated always as identity primary key,
    subscriber uuid   not null,
    n          bigint not null,
    what       text   not null check (what in ('dead_letter', 'retry')),
    by         text   not null
);
create index command_subscriber on pillarbox_hub.command (subscriber);

create table pillarbox_hub.dead_letter (
    id                  uuid        primary key,
    tenant              text        not null,
    subscriber          uuid        not null,
    n                   bigint      not null,
    lane                text,
    -- Null, as is its snapshot: the log no longer had it.
    event_id            uuid,
    event_type          text,
    log_shard           smallint    not null,
    log_id              bigint      not null,
    log_at              timestamptz not null,
    -- As they were when it died.
    event_snapshot      json,
    subscriber_snapshot jsonb       not null,
    reason              text        not null check (reason in ('exhausted', 'refused', 'gone', 'manual', 'expired')),
    detail              text        not null,
    attempts            smallint    not null,
    moved_to_dlq_at     timestamptz not null,
    manual_retry_by     text,
    manual_retry_at     timestamptz,
    check ((manual_retry_by is null) = (manual_retry_at is null))
);
create index dead_letter_tenant on pillarbox_hub.dead_letter (tenant, id);
create index dead_letter_subscriber on pillarbox_hub.dead_letter (subscriber, id);
create index dead_letter_log_id on pillarbox_hub.dead_letter (log_id);
create unique index dead_letter_message on pillarbox_hub.dead_letter (subscriber, n);

-- Makes the partitions of today and of so many days ahead; returns how many it made.
create function pillarbox_hub.make_partitions(days integer) returns integer
language plpgsql
set timezone = 'UTC'
as $$
declare
    parent text;
    day    date;
    name   text;
    taken  boolean;
    made   integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    foreach parent in array array['message', 'unsent', 'attempt', 'position'] loop
        for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            continue when to_regclass('pillarbox_hub.' || name) is not null;
            -- Rows that overflowed stay where they are.
            execute format('select exists (select from pillarbox_hub.%I where at >= %L and at < %L)',
                parent || '_overflow', day::timestamptz, (day + 1)::timestamptz) into taken;
            continue when taken;
            execute format('create table pillarbox_hub.%I partition of pillarbox_hub.%I for values from (%L) to (%L)',
                name, parent, day::timestamptz, (day + 1)::timestamptz);
            made := made + 1;
        end loop;
    end loop;
    return made;
end
$$;

select pillarbox_hub.make_partitions(7);
