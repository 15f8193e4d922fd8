-- schema: pillarbox
-- The view as before, and with it where in the log a message stands: (shard, id) has an index, its message_id has none.
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
           when parked.place is not null then 'parked'
           when newest.passed then 'sent'
           else 'pending'
       end                      as status,
       case when newest.passed and parked.place is null and dead.id is null then sent.at end as sent_at,
       coalesce(parked.attempts, dead.attempts, case when newest.passed then 1 else 0 end) as attempts,
       coalesce(parked.last_error, dead.last_error) as last_error,
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
    select log.id <= (select floor_id from pillarbox.home)
        or pg_visible_in_snapshot(log.xid, position.old)
        or (pg_visible_in_snapshot(log.xid, position.new)
            and log.id <= position.last_ids[array_position(position.shards, log.shard)]) as passed
    from pillarbox.position
    where position.consumer = cursor.consumer and log.shard = any (position.shards)
    order by position.n desc limit 1
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
