-- schema: pillarbox
-- Chosen message ids that are never the ids of other messages, and what happens when the filter of a consumer changes.

-- ---- 1. Message ids that producers choose

-- The digest of key, aggregate and payload: the same id with other content is an error of the producer, not a repetition.
-- Null for ids that were posted before this migration.
alter table pillarbox.chosen_id add column digest bytea;

-- As before, but an id of version 7 is refused, and so is a repeated id with other content.
create or replace function pillarbox.post(
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
    content   bytea;
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
        -- All ids that Pillarbox generates have version 7, so that no chosen id can be the id of another message.
        if get_byte(uuid_send(message_id), 6) >> 4 = 7 then
            raise exception 'message_id must not be a UUID of version 7, which Pillarbox generates for other messages'
                using errcode = 'invalid_parameter_value',
                      hint = 'Pass a random UUID (version 4), or derive one from an id of yours (version 5).';
        end if;
        -- Not the headers: a repetition may belong to another trace.
        content := sha256(convert_to(json_build_array(key, aggregate_type, aggregate_id, payload)::text, 'UTF8'));
        insert into pillarbox.chosen_id (message_id, tenant, topic, digest) values (posted_id, tenant, topic, content)
        on conflict do nothing;
        if not found then
            select chosen.tenant, chosen.topic, chosen.digest into first from pillarbox.chosen_id as chosen
            where chosen.message_id = posted_id;
            if first.tenant <> tenant or first.topic <> topic then
                raise exception 'message_id % was posted before with the topic % in the tenant %: choose another id for '
                    'another message', posted_id, first.topic, first.tenant using errcode = 'invalid_parameter_value';
            end if;
            if first.digest <> content then
                raise exception 'message_id % was posted before with another payload, key or aggregate: choose another id '
                    'for another message, or repeat the same arguments', posted_id using errcode = 'invalid_parameter_value';
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

-- ---- 2. Changes of filters

-- The former filters of consumers: up to the time `read_to`, the consumer has read the log with this filter. What the filter
-- did not match has not been processed, although the consumer has passed it.
create table pillarbox.filter_change (
    id          bigint      generated always as identity primary key,
    consumer    text        not null,
    changed_at  timestamptz not null default now(),
    read_to     timestamptz not null,
    included    text        not null,
    excluded    text,
    -- A replay is needed from this time on, of messages that this filter did not match: another route may have had them, and
    -- may not have published them before it changed, too. It is requested, and this becomes null, when no shard worker has a
    -- former filter any more.
    replay_from timestamptz
);
create index filter_change_consumer on pillarbox.filter_change (consumer, read_to);

-- The digest of the filter with which the worker reads. Null for workers of the previous version, which have another one.
alter table pillarbox.shard_worker add column filter text;

-- Messages that this filter matches are not replayed. The previous version would repeat them, with the same ids.
alter table pillarbox.replay
    add column former_included text,
    add column former_excluded text;

-- Whether a consumer that has passed a message had a filter that matches it. The current filter is not checked.
create function pillarbox.was_selected(
    consumer text, source text, topic text, aggregate_type text, shard smallint, at timestamptz
) returns boolean
language sql stable
as $$
    select coalesce(
        (select pillarbox.subject($2, $3, $4) ~ former.included
                and (former.excluded is null or pillarbox.subject($2, $3, $4) !~ former.excluded)
         from pillarbox.filter_change as former
         where former.consumer = $1 and former.read_to > $6
         order by former.read_to limit 1), true)
        -- A replay after the change has read it with a newer filter.
        or exists (
            select from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
            where replay.consumer = $1 and replay.from_at <= $6 and replay.to_at > $6
              and replay_shard.shard = $5 and replay_shard.done
              and replay.requested_at >= (select min(changed_at) from pillarbox.filter_change as former
                                          where former.consumer = $1 and former.read_to > $6))
$$;

-- ---- 3. Status view

-- As before, but what is stored about an earlier message with the same id is not shown for this one. An id that a producer
-- chooses is free again when nothing refers to it any more.
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
  on parked.consumer = cursor.consumer and parked.message_id = log.message_id and parked.run = 0 and parked.log_id = log.id
left join lateral (
    select * from pillarbox.dead_letter
    where dead_letter.consumer = cursor.consumer and dead_letter.message_id = log.message_id and dead_letter.log_id = log.id
    order by dead_letter.id desc limit 1
) dead on true
left join lateral (
    select * from pillarbox.discarded
    where discarded.consumer = cursor.consumer and discarded.message_id = log.message_id
      -- An earlier message had the same id. A margin of one hour: the clock may have been set back.
      and discarded.discarded_at >= log.at - interval '1 hour'
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
