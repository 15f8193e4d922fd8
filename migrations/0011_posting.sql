-- schema: pillarbox
-- Posts of jsonb and text, message ids that a producer chooses, and messages that no queue took.
-- contracts: nothing. The first version of the function `post` is renamed in the database only: the program never calls it,
-- callers find the new one under the same name, and what refers to the function itself keeps it.

-- ---- 1. Message ids that producers choose

-- A post with an id that is in this table is a repetition, and no second message. The log itself has no unique index on
-- message_id: it is partitioned by time, which every unique index would have to contain, and each index slows down every
-- post. So only the posts that choose an id pay for it. Rows are deleted when the log no longer has their message.
create table pillarbox.chosen_id (
    message_id uuid        primary key,
    -- When it was posted: such an id need not contain a time, and the log is searched by time.
    at         timestamptz not null default clock_timestamp(),
    -- The same id with another topic or tenant is an error of the producer, not a repetition.
    tenant     text        not null,
    topic      text        not null
);
create index chosen_id_at on pillarbox.chosen_id (at);

-- ---- 2. post

-- A function cannot get another parameter, and with two functions for json, calls would be ambiguous. The first version stays
-- under another name, for views and functions that were created with a reference to it. See the end of this section.
alter function pillarbox.post rename to post_first_version;

-- For payloads of the type json, and the implementation for all types. With a message_id, a second post with the same id is no
-- message and returns the id; it waits for the transaction of the first one, and posts the message if that rolls back.
create function pillarbox.post(
    topic          text,
    payload        json,
    key            text  default null,
    aggregate_type text  default null,
    aggregate_id   text  default null,
    headers        jsonb default '{}',
    tenant         text  default 'main',
    message_id     uuid  default null
) returns uuid
language plpgsql security definer
-- Settings of the caller's session must not change how this function runs.
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    posted_id uuid := coalesce(message_id, pillarbox.uuid_v7());
    first     record;
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
    if length(key) not between 1 and 255 then
        raise exception 'key must have 1 to 255 characters; for a message without a key, omit it or pass null'
            using errcode = 'invalid_parameter_value';
    end if;
    if length(aggregate_type) not between 1 and 100 then
        raise exception 'aggregate_type must have 1 to 100 characters' using errcode = 'invalid_parameter_value';
    end if;
    if length(aggregate_id) not between 1 and 255 then
        raise exception 'aggregate_id must have 1 to 255 characters' using errcode = 'invalid_parameter_value';
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
    if message_id is not null then
        insert into pillarbox.chosen_id (message_id, tenant, topic) values (posted_id, tenant, topic)
        on conflict do nothing;
        if not found then
            select chosen.tenant, chosen.topic into first from pillarbox.chosen_id as chosen
            where chosen.message_id = posted_id;
            if first.tenant <> tenant or first.topic <> topic then
                raise exception 'message_id % was posted before with the topic % in the tenant %: choose another id for '
                    'another message', posted_id, first.topic, first.tenant using errcode = 'invalid_parameter_value';
            end if;
            return posted_id;
        end if;
    end if;
    insert into pillarbox.log (shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, payload)
    values (pillarbox.shard_of(tenant, coalesce(key, posted_id::text)), posted_id, 'sql', tenant, topic,
        key, aggregate_type,
        case when aggregate_id ~ '^(0|-?[1-9][0-9]{0,17})$' then aggregate_id::json else to_json(aggregate_id) end,
        coalesce(headers, '{}'), payload);
    return posted_id;
end
$$;

-- The functions below only pass their arguments on. They have no rights of their own, and every name in them is qualified, so
-- PostgreSQL can merge them into the statement of the caller, and they cost nothing.

create function pillarbox.post(
    topic          text,
    payload        jsonb,
    key            text  default null,
    aggregate_type text  default null,
    aggregate_id   text  default null,
    headers        jsonb default '{}',
    tenant         text  default 'main',
    message_id     uuid  default null
) returns uuid
language sql
as $$
    select pillarbox.post(topic, payload::pg_catalog.json, key, aggregate_type, aggregate_id, headers, tenant, message_id)
$$;

-- For literals and for parameters without a type, which would match both json and jsonb: PostgreSQL prefers text to either.
create function pillarbox.post(
    topic          text,
    payload        text,
    key            text  default null,
    aggregate_type text  default null,
    aggregate_id   text  default null,
    headers        jsonb default '{}',
    tenant         text  default 'main',
    message_id     uuid  default null
) returns uuid
language sql
as $$
    select pillarbox.post(topic, payload::pg_catalog.json, key, aggregate_type, aggregate_id, headers, tenant, message_id)
$$;

create or replace function pillarbox.post_first_version(
    topic          text,
    payload        json,
    key            text  default null,
    aggregate_type text  default null,
    aggregate_id   text  default null,
    headers        jsonb default '{}',
    tenant         text  default 'main'
) returns uuid
language sql security invoker
as $$
    select pillarbox.post(topic, payload, key, aggregate_type, aggregate_id, headers, tenant, null::pg_catalog.uuid)
$$;

-- Whoever may call the first version may call all of them, and nobody else.
do $$
declare
    new_function text;
    allowed      record;
begin
    foreach new_function in array array[
        'pillarbox.post(text, json, text, text, text, jsonb, text, uuid)',
        'pillarbox.post(text, jsonb, text, text, text, jsonb, text, uuid)',
        'pillarbox.post(text, text, text, text, text, jsonb, text, uuid)'
    ] loop
        execute format('revoke all on function %s from public', new_function);
        for allowed in
            select case acl.grantee when 0 then 'public' else acl.grantee::regrole::text end as role, acl.is_grantable
            from pg_proc cross join lateral aclexplode(pg_proc.proacl) as acl
            where pg_proc.oid = 'pillarbox.post_first_version'::regproc
              and acl.grantee <> pg_proc.proowner and acl.privilege_type = 'EXECUTE'
        loop
            execute format('grant execute on function %s to %s%s', new_function, allowed.role,
                case when allowed.is_grantable then ' with grant option' else '' end);
        end loop;
    end loop;
end
$$;

-- ---- 3. Messages that no queue took

-- When the consumer was created: a consumer that was dropped and created again has nothing to do with older rows of
-- `unrouted`.
alter table pillarbox.cursor add column created_at timestamptz not null default now();

-- Messages that a route published and RabbitMQ returned, because no queue was bound for them. The route was not required, so it
-- has passed them. Partitioned by day, because a route without any queue adds a row for every message.
create table pillarbox.unrouted (
    consumer text        not null,
    log_id   bigint      not null,
    at       timestamptz not null default clock_timestamp()
) partition by range (at);
create index unrouted_consumer_log_id on pillarbox.unrouted (consumer, log_id);
create table pillarbox.unrouted_overflow partition of pillarbox.unrouted default;

-- As before, and the partitions of `unrouted`.
create or replace function pillarbox.make_reader_partitions(days integer) returns integer
language plpgsql
set timezone = 'UTC'
as $$
declare
    day    date;
    parent text;
    used   boolean;
    made   integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
        foreach parent in array array['position', 'unrouted'] loop
            continue when to_regclass('pillarbox.' || parent || '_' || to_char(day, 'YYYYMMDD')) is not null;
            execute format('select exists (select from pillarbox.%I where at >= %L and at < %L)',
                parent || '_overflow', day::timestamptz, (day + 1)::timestamptz) into used;
            continue when used;
            execute format('create table pillarbox.%I partition of pillarbox.%I for values from (%L) to (%L)',
                parent || '_' || to_char(day, 'YYYYMMDD'), parent, day::timestamptz, (day + 1)::timestamptz);
            made := made + 1;
        end loop;
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

-- ---- 4. Status view

-- As before, with the status `unrouted`, and with the time of the next retry of a parked message (null: it waits for an
-- earlier message of its key).
create or replace view pillarbox.outbox_status as
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
           when newest.passed and unrouted.is_unrouted then 'unrouted'
           when newest.passed then 'sent'
           else 'pending'
       end                      as status,
       case when newest.passed and parked.id is null and dead.id is null and discarded.message_id is null
                 and not unrouted.is_unrouted
            then sent.at end    as sent_at,
       coalesce(parked.attempts, dead.attempts, discarded.attempts, case when newest.passed then 1 else 0 end) as attempts,
       coalesce(parked.last_error, dead.last_error, discarded.last_error,
                case when newest.passed and unrouted.is_unrouted then 'no queue was bound for it' end) as last_error,
       -- Query by these two columns and created_at to find a message quickly: message_id has no index.
       log.shard,
       log.id                   as log_id,
       case when not parked.discarded then parked.next_at end as next_retry_at
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
) sent on true
cross join lateral (
    select exists (
        select from pillarbox.unrouted
        where unrouted.consumer = cursor.consumer and unrouted.log_id = log.id
          -- A margin of one hour: the clock may have been set back.
          and unrouted.at >= greatest(cursor.created_at, log.at - interval '1 hour')
    ) as is_unrouted
) unrouted;
