-- schema: pillarbox
-- What operators needed besides: replays that end where they are to end and can be called off, and messages that were
-- thrown away shown as such.

-- Where a consumer is in a shard: its newest position there, if it has one, and in which partition that stands.
create function pillarbox.place(consumer text, shard smallint)
returns table (n bigint, old pg_snapshot, old_id bigint, old_at timestamptz, new pg_snapshot, new_id bigint,
               new_at timestamptz, last_id bigint, kept_in oid)
language sql stable
as $$
    select n, old, old_id, old_at, new, new_id, new_at, last_ids[array_position(shards, $2)], tableoid
    from pillarbox.position
    where position.consumer = $1 and $2 = any (shards)
    order by n desc limit 1
$$;

-- Every shard, for who asks for all of them. As many as `shard_of` knows.
create function pillarbox.shards() returns setof smallint
language sql immutable parallel safe rows 16
as $$
    select generate_series(0, 15)::smallint
$$;

-- Called off: the shards that it had not finished are gone, and what it had repeated stays repeated.
alter table pillarbox.replay add column canceled_at timestamptz;

-- Nothing of the range is at or above this id. Null: not found yet, or the log does not go on behind the range.
alter table pillarbox.replay_shard add column until_id bigint;

-- What an operator has thrown away: its consumer has passed it, and has not done it. Kept as long as an inbox.
create table pillarbox.discarded (
    consumer     text        not null,
    message_id   uuid        not null,
    attempts     integer     not null,
    last_error   text,
    discarded_at timestamptz not null default now(),
    primary key (consumer, message_id)
);
create index discarded_at on pillarbox.discarded (discarded_at);

-- What each consumer has made of each message that is for it: pending, sent (and when), parked, dead or discarded.
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
           when parked.place is not null and not parked.discarded then 'parked'
           when parked.place is not null or aside.message_id is not null then 'discarded'
           when newest.passed then 'sent'
           else 'pending'
       end                      as status,
       case when newest.passed and parked.place is null and dead.id is null and aside.message_id is null
            then sent.at end    as sent_at,
       coalesce(parked.attempts, dead.attempts, aside.attempts, case when newest.passed then 1 else 0 end) as attempts,
       coalesce(parked.last_error, dead.last_error, aside.last_error) as last_error,
       -- By these a message is found quickly: (shard, id) has an index, its message_id has none.
       log.shard,
       log.id                   as log_id
from pillarbox.log
join pillarbox.cursor
  on pillarbox.subject(log.source, log.topic, log.aggregate_type) ~ cursor.wants
 and (cursor.leaves is null or pillarbox.subject(log.source, log.topic, log.aggregate_type) !~ cursor.leaves)
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
      -- A replay since then has done it after all.
      and not exists (
          select from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
          where replay.consumer = cursor.consumer and replay.requested_at > discarded.discarded_at
            and replay.from_at <= log.at and replay.to_at > log.at
            and replay_shard.shard = log.shard and replay_shard.done)
) aside on true
left join lateral (
    select log.id <= (select floor_id from pillarbox.home)
        or pg_visible_in_snapshot(log.xid, place.old)
        or (pg_visible_in_snapshot(log.xid, place.new) and log.id <= place.last_id) as passed
    from pillarbox.place(cursor.consumer, log.shard)
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
