-- schema: pillarbox
-- The log, its consumers, and the idempotency keys of HTTP requests.
--
--   1. Helper functions      4. Consumers and leases      7. Replays
--   2. The log               5. Inbox                     8. Idempotency
--   3. Cluster identity      6. Failed messages           9. Status view
--
-- The schema itself is created by the migrator, which stores its own table in it.
-- Successful processing only appends rows (positions, inbox). The tables whose rows change are small.

-- ---- 1. Helper functions

-- A UUID of version 7. The time at its start keeps indexes on it dense and lets the inbox be partitioned by day.
create function pillarbox.uuid_v7() returns uuid
language sql volatile parallel safe
as $$
    select encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                from 1 for 6),
            52, 1), 53, 1), 'hex')::uuid
$$;

-- The lowest UUID of version 7 for a point in time.
create function pillarbox.uuid_at(instant timestamptz) returns uuid
language sql immutable parallel safe
as $$
    select (lpad(to_hex((extract(epoch from instant) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

-- The shard of a key. All messages of a key are in one shard, and a shard has one reader at a time, so the messages of
-- a key stay in order with any number of replicas. The number of shards must not change once the log has rows.
create function pillarbox.shard_of(tenant text, key text) returns smallint
language sql immutable parallel safe
as $$
    select (hashtextextended(key, hashtextextended(tenant, 0)) & 15)::smallint
$$;

-- Every shard number. Must match `shard_of`.
create function pillarbox.shards() returns setof smallint
language sql immutable parallel safe rows 16
as $$
    select generate_series(0, 15)::smallint
$$;

-- The text that the regular expressions of a consumer's filter are matched against.
create function pillarbox.subject(source text, topic text, aggregate_type text) returns text
language sql immutable parallel safe
as $$
    select source || ' ' || topic || ' ' || coalesce(aggregate_type, '')
$$;

-- ---- 2. The log

create sequence pillarbox.log_id;

-- Every message, inserted in the same transaction as the change that it reports. Append-only: no row is updated or
-- deleted; retention drops whole partitions.
create table pillarbox.log (
    -- `xid` must stay the first column, before `id`: defaults are evaluated in column order, so a row gets its
    -- transaction id before its id. Readers rely on this: every row of a transaction that got its transaction id after the
    -- sequence was read has a higher id than the value that was read.
    xid            xid8        not null default pg_current_xact_id(),
    id             bigint      not null default nextval('pillarbox.log_id'),
    shard          smallint    not null check (shard between 0 and 15),
    message_id     uuid        not null,
    source         text        not null,
    tenant         text        not null,
    topic          text        not null check (topic ~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$' and length(topic) <= 200),
    key            text        check (length(key) between 1 and 255),
    aggregate_type text        check (length(aggregate_type) between 1 and 100),
    -- A JSON number or string. 5 and "5" are different ids, and consumers receive the same JSON type that was posted.
    aggregate_id   json        check (octet_length(aggregate_id::text) between 1 and 1024),
    headers        jsonb       not null default '{}',
    -- json, not jsonb: the payload is delivered byte for byte as it was posted.
    payload        json        not null check (octet_length(payload::text) <= 262144),
    -- clock_timestamp(), not now(): in a long transaction, the time of the insert and not of the transaction's start.
    at             timestamptz not null default clock_timestamp()
) partition by range (at);

create index log_shard_id on pillarbox.log (shard, id);
-- For transactions that commit late: the rows that one transaction inserted into one shard, in order.
create index log_xid_shard_id on pillarbox.log (xid, shard, id);

-- Receives rows for days without a partition, so that a post never fails because a partition is missing.
create table pillarbox.log_overflow partition of pillarbox.log default;

-- Creates the partitions of today and of the next `days` days, and returns how many it created. It fails after 200 ms
-- if it cannot lock the table, so that posts do not queue behind it; the caller tries again later.
create function pillarbox.make_log_partitions(days integer) returns integer
language plpgsql
-- Days must begin at the same instant for every caller.
set timezone = 'UTC'
as $$
declare
    day  date;
    name text;
    made integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
        name := 'log_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('pillarbox.' || name) is not null;
        -- A day that already has rows in the overflow stays there: moving them would block every post meanwhile.
        continue when exists (select from pillarbox.log_overflow where at >= day and at < day + 1);
        execute format('create table pillarbox.%I (like pillarbox.log including defaults including constraints)', name);
        execute format('alter table pillarbox.log attach partition pillarbox.%I for values from (%L) to (%L)',
            name, day::timestamptz, (day + 1)::timestamptz);
        made := made + 1;
    end loop;
    return made;
end
$$;

select pillarbox.make_log_partitions(7);

-- An acknowledged post is on disk, even if the session turned synchronous_commit off for its other writes.
create function pillarbox.post_durably() returns trigger
language plpgsql
as $$
begin
    perform set_config('synchronous_commit', 'on', true);
    return null;
end
$$;

create trigger post_durably before insert on pillarbox.log
    for each statement execute function pillarbox.post_durably();

-- The whole API for producers in any language. Call it in the transaction of the change that the message reports; it
-- returns the message's id. An aggregate_id that is a whole number is stored as a JSON number, any other as a JSON
-- string.
create function pillarbox.post(
    topic          text,
    payload        json,
    key            text  default null,
    aggregate_type text  default null,
    aggregate_id   text  default null,
    headers        jsonb default '{}',
    tenant         text  default 'main'
) returns uuid
language plpgsql security definer
-- Settings of the caller's session must not change how this function runs.
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    message_id uuid := pillarbox.uuid_v7();
begin
    if topic is null or topic !~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$' or length(topic) > 200 then
        raise exception 'topic must have at most 200 letters, digits and _, in parts joined by dots'
            using errcode = 'invalid_parameter_value';
    end if;
    if payload is null then
        raise exception 'payload must be a JSON value; to post no content, post the JSON null'
            using errcode = 'invalid_parameter_value';
    end if;
    if octet_length(payload::text) > 262144 then
        raise exception 'payload has % bytes; at most 262144 are accepted', octet_length(payload::text)
            using errcode = 'invalid_parameter_value', hint = 'Store larger content elsewhere and post a reference to it.';
    end if;
    -- The cast to jsonb rejects escapes of NUL and of lone surrogates, which text columns and most consumers cannot
    -- represent. The cast is expensive, so it runs only if the payload contains such an escape sequence.
    if position('\u' in payload::text) > 0 then
        perform payload::jsonb;
    end if;
    if tenant is null or tenant !~ '^[a-z0-9][a-z0-9_-]{0,62}$' then
        raise exception 'tenant must have 1 to 63 of a-z, 0-9, - and _, with a letter or digit first'
            using errcode = 'invalid_parameter_value';
    end if;
    -- Only string values: nested or large headers could exceed what a reader's JSON parser accepts and stop it for
    -- good.
    if jsonb_typeof(coalesce(headers, '{}')) <> 'object' or octet_length(headers::text) > 16384 then
        raise exception 'headers must be a JSON object of at most 16384 bytes' using errcode = 'invalid_parameter_value';
    end if;
    if exists (select from jsonb_each(coalesce(headers, '{}')) header where jsonb_typeof(header.value) <> 'string') then
        raise exception 'headers must have strings as values' using errcode = 'invalid_parameter_value';
    end if;
    if length(aggregate_id) not between 1 and 255 then
        raise exception 'aggregate_id must have 1 to 255 characters' using errcode = 'invalid_parameter_value';
    end if;
    insert into pillarbox.log (shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, payload)
    values (pillarbox.shard_of(tenant, coalesce(key, message_id::text)), message_id, 'sql', tenant, topic,
        key, aggregate_type,
        case when aggregate_id ~ '^(0|-?[1-9][0-9]{0,17})$' then aggregate_id::json else to_json(aggregate_id) end,
        coalesce(headers, '{}'), payload);
    return message_id;
end
$$;

revoke all on function pillarbox.post from public;
revoke all on function pillarbox.make_log_partitions from public;

-- Roles belong to the cluster, so another database may have created this one already. If the migrating role may not
-- create roles, the operator creates pillarbox_producer and grants it the same privileges.
do $$
begin
    begin
        create role pillarbox_producer nologin;
    exception
        when duplicate_object or unique_violation then null;
        when insufficient_privilege then
            raise warning 'not allowed to create the role pillarbox_producer; create it and grant it to your producers';
    end;
    if exists (select from pg_roles where rolname = 'pillarbox_producer') then
        grant usage on schema pillarbox to pillarbox_producer;
        grant execute on function pillarbox.post to pillarbox_producer;
    end if;
end
$$;

-- References into old log entries: retention drops nothing that was posted at or after `from_at`.
create table pillarbox.retention_hold (
    holder  text        primary key,
    from_at timestamptz not null
);

-- ---- 3. Cluster identity

-- Which cluster and database the log was written in. Transaction ids do not survive a logical restore or pg_upgrade,
-- and a copy must not send what the original sends. A log that finds itself elsewhere is silent until `pillarbox
-- recover`. Messages up to `floor` were restored: their xids mean nothing here, so they are never read by xid.
create table pillarbox.cluster_identity (
    only_one          boolean     primary key default true check (only_one),
    -- Null: this role may not read the system identifier.
    system_identifier bigint,
    -- Null: no process has started on this database yet.
    database_oid      oid,
    floor             pg_snapshot not null default '3:3:',
    floor_id          bigint      not null default 0,
    floor_at          timestamptz not null default 'epoch',
    -- When a restore was noticed; null again once an operator has run `pillarbox recover`.
    restored_at       timestamptz,
    -- The log's table. A restored dump creates it anew, even in the same database. Null: not recorded yet.
    log_oid           oid
);

create function pillarbox.system_identifier() returns bigint
language plpgsql stable
as $$
begin
    return (select system_identifier from pg_control_system());
exception
    when insufficient_privilege then return null;
end
$$;

insert into pillarbox.cluster_identity default values;

-- ---- 4. Consumers and leases

create table pillarbox.cursor (
    consumer   text        primary key check (consumer ~ '^[a-z0-9][a-z0-9_.-]{0,99}$'),
    kind       text        not null check (kind in ('relay', 'handler')),
    -- Regular expressions over the subject: a message is for this consumer if it matches `included` and not `excluded`.
    included   text        not null,
    excluded   text,
    -- The newest run. 0 is live; each `replay --again` starts another.
    run        integer     not null default 0,
    -- When the consumer was created or last reset. Retention waits for it from then on.
    since      timestamptz not null default now(),
    -- Lapsed: it was too far behind. Retention no longer waits for it, and it reads nothing until an operator resets
    -- it.
    lapsed_at  timestamptz
);

-- A running process. Its heartbeat extends `until`, and with it every lease of the process.
create table pillarbox.replica (
    id    uuid        primary key,
    name  text        not null,
    until timestamptz not null
);

-- A loop of one process that works on some shards of one consumer. This row is the fence: a shard worker locks it in
-- every transaction that saves something, and a process that takes over the shards of an expired shard worker deletes
-- its row first. So a former owner cannot commit.
create table pillarbox.shard_worker (
    consumer text not null,
    owner    uuid not null,
    replica  uuid not null,
    primary key (consumer, owner)
);

-- One owner per shard keeps the messages of a key in order with any number of replicas. `epoch` counts changes of the
-- owner.
create table pillarbox.lease (
    consumer text     not null,
    shard    smallint not null,
    owner    uuid,
    epoch    bigint   not null default 0,
    primary key (consumer, shard)
);

create sequence pillarbox.position_n;

-- How far a consumer has read: in `shards`, everything that is visible in the snapshot `old`, and of the messages that
-- became visible between `old` and `new`, those up to the shard's entry in `last_ids`. Rows are appended and the
-- highest `n` wins: a row that is updated in place gets slow while a long transaction pins xmin. The history tells when
-- a message was sent.
create table pillarbox.position (
    n        bigint      not null default nextval('pillarbox.position_n'),
    at       timestamptz not null default clock_timestamp(),
    consumer text        not null,
    shards   smallint[]  not null,
    last_ids bigint[]    not null,
    old      pg_snapshot not null,
    old_id   bigint      not null,
    old_at   timestamptz not null,
    new      pg_snapshot not null,
    new_id   bigint      not null,
    new_at   timestamptz not null
) partition by range (at);

create index position_consumer_n on pillarbox.position (consumer, n);
create index position_consumer_at on pillarbox.position (consumer, at);
create table pillarbox.position_overflow partition of pillarbox.position default;

-- The newest position of a consumer in a shard and the partition that stores it; no row if it has none.
create function pillarbox.latest_position(consumer text, shard smallint)
returns table (n bigint, old pg_snapshot, old_id bigint, old_at timestamptz, new pg_snapshot, new_id bigint,
               new_at timestamptz, last_id bigint, partition_oid oid)
language sql stable
as $$
    select n, old, old_id, old_at, new, new_id, new_at, last_ids[array_position(shards, $2)], tableoid
    from pillarbox.position
    where position.consumer = $1 and $2 = any (shards)
    order by n desc limit 1
$$;

-- ---- 5. Inbox

-- Messages that a handler has already processed. Partitioned by the day inside the message's id, never by the day of
-- processing: a redelivery after midnight must find the same row.
create table pillarbox.inbox (
    consumer   text    not null,
    message_id uuid    not null,
    run        integer not null default 0,
    primary key (consumer, message_id, run)
) partition by range (message_id);

create table pillarbox.inbox_overflow partition of pillarbox.inbox default;

-- The same for ids of other producers. They can be any text and contain no time, so these rows are deleted by age.
create table pillarbox.inbox_foreign (
    consumer   text        not null,
    message_id text        not null,
    at         timestamptz not null default now(),
    primary key (consumer, message_id)
);
create index inbox_foreign_at on pillarbox.inbox_foreign (at);

-- Creates the partitions of `position` and `inbox`, in the same way as make_log_partitions.
create function pillarbox.make_reader_partitions(days integer) returns integer
language plpgsql
set timezone = 'UTC'
as $$
declare
    day  date;
    made integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
        if to_regclass('pillarbox.position_' || to_char(day, 'YYYYMMDD')) is null
            and not exists (select from pillarbox.position_overflow where at >= day and at < day + 1)
        then
            execute format('create table pillarbox.%I partition of pillarbox.position for values from (%L) to (%L)',
                'position_' || to_char(day, 'YYYYMMDD'), day::timestamptz, (day + 1)::timestamptz);
            made := made + 1;
        end if;
        if to_regclass('pillarbox.inbox_' || to_char(day, 'YYYYMMDD')) is null
            and not exists (select from pillarbox.inbox_overflow
                            where message_id >= pillarbox.uuid_at(day) and message_id < pillarbox.uuid_at(day + 1))
        then
            execute format('create table pillarbox.%I partition of pillarbox.inbox for values from (%L) to (%L)',
                'inbox_' || to_char(day, 'YYYYMMDD'), pillarbox.uuid_at(day), pillarbox.uuid_at(day + 1));
            made := made + 1;
        end if;
    end loop;
    return made;
end
$$;

select pillarbox.make_reader_partitions(7);

-- ---- 6. Failed messages

-- Messages that a consumer could not process, with their whole content: retention may drop the log entry earlier than the
-- parked message. Later messages of the same key are parked, too, and wait for the failed one (next_at is null). Only the
-- owner of the shard processes these rows.
create table pillarbox.parked (
    -- The order in which the messages were read, which can differ from the order of `log_id`.
    id             bigint      generated always as identity primary key,
    consumer       text        not null,
    shard          smallint    not null,
    run            integer     not null,
    attempts       integer     not null,
    next_at        timestamptz,
    last_error     text,
    parked_at      timestamptz not null default now(),
    -- An operator discarded the message; the owner of the shard deletes the row.
    discarded      boolean     not null default false,
    log_id         bigint      not null,
    message_id     uuid        not null,
    source         text        not null,
    tenant         text        not null,
    topic          text        not null,
    key            text,
    aggregate_type text,
    aggregate_id   json,
    headers        jsonb       not null,
    payload        json        not null,
    at             timestamptz not null,
    unique (consumer, message_id, run)
);
create index parked_due on pillarbox.parked (consumer, shard, next_at) where next_at is not null;
create index parked_key on pillarbox.parked (consumer, tenant, key, id) where key is not null;

-- Messages that were given up after their retries. A dead letter no longer blocks the later messages of its key.
create table pillarbox.dead_letter (
    id             bigint      generated always as identity primary key,
    consumer       text        not null,
    shard          smallint    not null,
    run            integer     not null,
    attempts       integer     not null,
    last_error     text        not null,
    died_at        timestamptz not null default now(),
    log_id         bigint      not null,
    message_id     uuid        not null,
    source         text        not null,
    tenant         text        not null,
    topic          text        not null,
    key            text,
    aggregate_type text,
    aggregate_id   json,
    headers        jsonb       not null,
    payload        json        not null,
    at             timestamptz not null
);
create index dead_letter_consumer on pillarbox.dead_letter (consumer, id);
create index dead_letter_message on pillarbox.dead_letter (message_id);

-- Parked messages and dead letters that an operator discarded: the consumer has passed them without processing them.
-- These rows are retained as long as the inbox.
create table pillarbox.discarded (
    consumer     text        not null,
    message_id   uuid        not null,
    attempts     integer     not null,
    last_error   text,
    discarded_at timestamptz not null default now(),
    primary key (consumer, message_id)
);
create index discarded_at on pillarbox.discarded (discarded_at);

-- ---- 7. Replays

create table pillarbox.replay (
    id           bigint      generated always as identity primary key,
    consumer     text        not null,
    run          integer     not null,
    from_at      timestamptz not null,
    to_at        timestamptz not null,
    requested_at timestamptz not null default now(),
    -- Set when an operator cancels the replay: the rows of its unfinished shards are deleted, and processed messages are
    -- not undone.
    canceled_at  timestamptz
);

create table pillarbox.replay_shard (
    replay   bigint   not null,
    shard    smallint not null,
    last_id  bigint   not null default 0,
    done     boolean  not null default false,
    -- No message of the range has this id or a higher one. Null: not determined yet, or the log ends within the range.
    until_id bigint,
    primary key (replay, shard)
);

-- ---- 8. Idempotency

-- Responses to HTTP requests, by the Idempotency-Key that the caller chose. A row commits together with the effect of
-- its request, so a crash leaves both or neither.
create table pillarbox.idempotency (
    -- Digest of the scope (the caller) and the key: 16 bytes cost a third less than the texts.
    id          bytea       primary key check (octet_length(id) = 16),
    -- Digest of method, path and body. The same key with a different request is an error of the caller.
    fingerprint bytea       not null check (octet_length(fingerprint) = 16),
    status      smallint    not null,
    -- Null if the response contained a secret, which is never stored.
    body        bytea,
    expires_at  timestamptz not null
);

create index idempotency_expires_at on pillarbox.idempotency (expires_at);

-- ---- 9. Status view

-- The status of each message for each consumer whose filter it matches: pending, sent (and when), parked, dead or
-- discarded.
create view pillarbox.outbox_status as
select log.message_id,
       'evt_' || log.message_id as event_id,
       log.topic                as event_type,
       log.aggregate_type,
       log.aggregate_id,
       log.tenant,
       log.at                   as created_at,
       cursor.consumer,
       case
           when dead.id is not null then 'dead'
           when parked.id is not null and not parked.discarded then 'parked'
           when parked.id is not null or discarded.message_id is not null then 'discarded'
           when newest.passed then 'sent'
           else 'pending'
       end                      as status,
       case when newest.passed and parked.id is null and dead.id is null and discarded.message_id is null
            then sent.at end    as sent_at,
       coalesce(parked.attempts, dead.attempts, discarded.attempts, case when newest.passed then 1 else 0 end) as attempts,
       coalesce(parked.last_error, dead.last_error, discarded.last_error) as last_error,
       -- Query by these two columns and created_at to find a message quickly: message_id has no index.
       log.shard,
       log.id                   as log_id
from pillarbox.log
join pillarbox.cursor
  on pillarbox.subject(log.source, log.topic, log.aggregate_type) ~ cursor.included
 and (cursor.excluded is null or pillarbox.subject(log.source, log.topic, log.aggregate_type) !~ cursor.excluded)
left join pillarbox.parked
  on parked.consumer = cursor.consumer and parked.message_id = log.message_id and parked.run = 0
left join lateral (
    select * from pillarbox.dead_letter
    where dead_letter.consumer = cursor.consumer and dead_letter.message_id = log.message_id
    order by dead_letter.id desc limit 1
) dead on true
left join lateral (
    select * from pillarbox.discarded
    where discarded.consumer = cursor.consumer and discarded.message_id = log.message_id
      -- A later replay has processed it after all.
      and not exists (
          select from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
          where replay.consumer = cursor.consumer and replay.requested_at > discarded.discarded_at
            and replay.from_at <= log.at and replay.to_at > log.at
            and replay_shard.shard = log.shard and replay_shard.done)
) discarded on true
left join lateral (
    select log.id <= (select floor_id from pillarbox.cluster_identity)
        or pg_visible_in_snapshot(log.xid, latest.old)
        or (pg_visible_in_snapshot(log.xid, latest.new) and log.id <= latest.last_id) as passed
    from pillarbox.latest_position(cursor.consumer, log.shard) as latest
) newest on true
left join lateral (
    select position.at from pillarbox.position
    where newest.passed and position.consumer = cursor.consumer and log.shard = any (position.shards)
      and position.at >= log.at
      and (pg_visible_in_snapshot(log.xid, position.old)
           or (pg_visible_in_snapshot(log.xid, position.new)
               and log.id <= position.last_ids[array_position(position.shards, log.shard)]))
    order by position.at limit 1
) sent on true;
