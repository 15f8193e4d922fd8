-- schema: pillarbox_hub
-- The webhook hub. A delivery that succeeds only appends rows; the tables whose rows change (lane, command, dead_letter)
-- contain exceptions and stay small.
create schema pillarbox_hub;

-- ---- subscribers

create table pillarbox_hub.subscriber (
    id                    uuid        primary key,
    tenant                text        not null,
    name                  text        not null check (length(name) between 1 and 100),
    url                   text        not null check (length(url) between 1 and 2000),
    -- Exact types, or prefixes such as `order.*`.
    event_types           text[]      not null check (cardinality(event_types) between 1 and 100),
    -- Conditions on the payload; null: every payload matches.
    filter                jsonb,
    -- A JSON pointer into the payload; null: the ordering key of the event is used.
    ordering_key          text,
    retry_backoff_seconds integer[]   not null,
    retry_statuses        smallint[]  not null,
    on_exhausted          text        not null check (on_exhausted in ('skip', 'block')),
    timeout_ms            integer     not null check (timeout_ms between 100 and 60000),
    max_in_flight         integer     not null check (max_in_flight between 1 and 1000),
    rate_limit_per_second integer     check (rate_limit_per_second between 1 and 100000),
    -- Encrypted, like the secrets, because they may contain a password.
    headers               bytea,
    format                text        not null check (format in ('raw', 'standard', 'cloudevents')),
    is_active             boolean     not null,
    -- Why the hub switched it off; null if its owner did.
    inactive_reason       text,
    paused_at             timestamptz,
    version               bigint      not null default 1,
    created_at            timestamptz not null,
    updated_at            timestamptz not null,
    -- The dispatcher that owns this shard sends to the subscriber.
    shard                 smallint    not null check (shard between 0 and 15)
);
create index subscriber_tenant on pillarbox_hub.subscriber (tenant, id);

-- The secrets that sign deliveries: the newest and, for an overlap after a rotation, the previous ones.
create table pillarbox_hub.secret (
    id         uuid        primary key,
    subscriber uuid        not null references pillarbox_hub.subscriber on delete cascade,
    sealed     bytea       not null,
    created_at timestamptz not null,
    -- Null: the secret does not expire.
    expires_at timestamptz
);
create index secret_subscriber on pillarbox_hub.secret (subscriber);

-- Counts the changes to the two tables above. Fan-out and dispatchers compare the version with the one they have loaded.
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

-- ---- hub messages

-- One row for each event and matching subscriber. Only fan-out inserts, one transaction after the other, so n has no gap and
-- a higher n has committed later. So a reader that remembers the highest n it has seen misses nothing.
create table pillarbox_hub.message (
    n           bigint      not null,
    at          timestamptz not null,
    subscriber  uuid        not null,
    -- Messages of one lane are sent one after the other; null: the message waits for no other.
    lane        text,
    -- The number within the lane, from 1 and without a gap.
    seq         bigint,
    -- The log entry with the content.
    log_shard   smallint    not null,
    log_id      bigint      not null,
    log_at      timestamptz not null,
    -- The dead letter that this message retries. It has the content even if the log no longer does.
    dead_letter uuid
) partition by range (at);
create index message_subscriber_n on pillarbox_hub.message (subscriber, n);
create index message_lane on pillarbox_hub.message (subscriber, lane, n) where lane is not null;
-- For the outcomes of an event. BRIN, because rows are inserted in about the order of log_id.
create index message_log_id on pillarbox_hub.message using brin (log_id) with (pages_per_range = 16, autosummarize = on);
create table pillarbox_hub.message_overflow partition of pillarbox_hub.message default;

-- The batches of fan-out: the range of numbers and the subscribers with new messages or commands. Dispatchers poll it.
create table pillarbox_hub.fanout_batch (
    n_to        bigint      primary key,
    n_from      bigint      not null,
    subscribers uuid[]      not null,
    at          timestamptz not null
);

-- Subscribers that an event matched by its type, but that got no message: filtered out, or switched off.
create table pillarbox_hub.skipped (
    log_id   bigint      not null,
    at       timestamptz not null,
    filtered uuid[]      not null,
    inactive uuid[]      not null
) partition by range (at);
create index skipped_log_id on pillarbox_hub.skipped using brin (log_id) with (pages_per_range = 16, autosummarize = on);
create table pillarbox_hub.skipped_overflow partition of pillarbox_hub.skipped default;

-- ---- outcomes

-- Every attempt. The last one of a completed message is delivered or dead.
create table pillarbox_hub.attempt (
    at         timestamptz not null,
    subscriber uuid        not null,
    n          bigint      not null,
    attempt    smallint    not null,
    outcome    text        not null check (outcome in ('delivered', 'failed', 'dead')),
    status     smallint,
    latency_ms integer     not null,
    -- The class of the failure, and its text.
    error      text,
    detail     text,
    -- The beginning of the response body.
    excerpt    text
) partition by range (at);
create index attempt_subscriber_n on pillarbox_hub.attempt (subscriber, n);
create table pillarbox_hub.attempt_overflow partition of pillarbox_hub.attempt default;

-- All messages of a subscriber up to n have a final outcome or belong to a detached lane. Positions are appended and the
-- highest one counts: an update per save would bloat the table. Messages beyond it may be completed; the attempts tell.
create table pillarbox_hub.position (
    subscriber uuid        not null,
    n          bigint      not null,
    at         timestamptz not null
) partition by range (at);
create index position_subscriber_n on pillarbox_hub.position (subscriber, n);
create table pillarbox_hub.position_overflow partition of pillarbox_hub.position default;

-- Detached lanes: the subscriber's position no longer waits for their messages.
create table pillarbox_hub.lane (
    subscriber   uuid        not null,
    -- The next message of the lane, or the last completed one. The earlier ones of the lane have a final outcome; some of
    -- the later ones may, too (the attempts tell).
    head         bigint      not null,
    -- Null: a single message without an ordering key.
    lane         text,
    attempts     smallint    not null,
    -- Null: blocked until an operator retries or dead-letters the head.
    next_at      timestamptz,
    -- The head is a dead letter that an operator retries.
    manual_retry boolean     not null,
    primary key (subscriber, head)
);
create unique index lane_name on pillarbox_hub.lane (subscriber, lane) where lane is not null;

-- Operator commands. The dispatcher that owns the subscriber executes and deletes them.
create table pillarbox_hub.command (
    id         bigint generated always as identity primary key,
    subscriber uuid   not null,
    n          bigint not null,
    action     text   not null check (action in ('dead_letter', 'retry')),
    by         text   not null
);
create index command_subscriber on pillarbox_hub.command (subscriber);

create table pillarbox_hub.dead_letter (
    id                  uuid        primary key,
    tenant              text        not null,
    subscriber          uuid        not null,
    n                   bigint      not null,
    lane                text,
    -- Null, like event_snapshot, if the log no longer had the event.
    event_id            uuid,
    event_type          text,
    log_shard           smallint    not null,
    log_id              bigint      not null,
    log_at              timestamptz not null,
    -- Event and subscriber at the time the message was given up. json keeps the payload byte for byte.
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
-- For the metric that counts the dead letters that were not retried, up to a bound for each subscriber.
create index dead_letter_unretried on pillarbox_hub.dead_letter (subscriber) where manual_retry_at is null;
create index dead_letter_log_id on pillarbox_hub.dead_letter (log_id);
create unique index dead_letter_message on pillarbox_hub.dead_letter (subscriber, n);

-- Creates the partitions of today and the given number of days ahead. Returns how many it created. Fails quickly instead of
-- queueing for a lock, because everything else would queue behind it.
create function pillarbox_hub.make_partitions(days integer) returns integer
language plpgsql
set timezone = 'UTC'
as $$
declare
    parent  text;
    day     date;
    name    text;
    is_used boolean;
    created integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    foreach parent in array array['message', 'skipped', 'attempt', 'position'] loop
        for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            continue when to_regclass('pillarbox_hub.' || name) is not null;
            -- A partition cannot be created while the default partition has rows of its day; they stay there.
            execute format('select exists (select from pillarbox_hub.%I where at >= %L and at < %L)',
                parent || '_overflow', day::timestamptz, (day + 1)::timestamptz) into is_used;
            continue when is_used;
            execute format('create table pillarbox_hub.%I partition of pillarbox_hub.%I for values from (%L) to (%L)',
                name, parent, day::timestamptz, (day + 1)::timestamptz);
            created := created + 1;
        end loop;
    end loop;
    return created;
end
$$;

select pillarbox_hub.make_partitions(7);
