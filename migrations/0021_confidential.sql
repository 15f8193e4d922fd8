-- schema: pillarbox
-- Confidential messages: their payloads are removed from the log when nobody needs them any more.

-- The messages with a confidential payload that may still be somewhere in the database. Only posts with an expiry add a row, so
-- that other posts cost nothing. A row is deleted when the payload is blanked and no consumer can store another copy of it.
create table pillarbox.confidential (
    log_id     bigint      primary key,
    shard      smallint    not null,
    -- Selects the partition of the log.
    at         timestamptz not null,
    message_id uuid        not null,
    tenant     text        not null,
    key        text,
    -- From this time on the payload is of no use, and is blanked even if a consumer has not processed the message.
    until      timestamptz not null,
    -- When the payload was blanked although a consumer had not processed the message. That consumer may have read it before, and
    -- park a copy later, so the row stays until the consumer has passed the message.
    blanked_at timestamptz
);
-- For account deletion: everything of one key.
create index confidential_key on pillarbox.confidential (tenant, key) where key is not null;
-- Expired payloads are blanked first, however many messages wait for a consumer that is stuck.
create index confidential_until on pillarbox.confidential (until) where blanked_at is null;

-- What these messages still wait for: the consumers that have yet to read them, live or in a replay, or that have parked them or
-- given them up (a dead letter can be retried). A consumer that has lapsed or that no process runs counts as well. A message
-- that no consumer matches waits for one that is registered later; its row here has no consumer. The cost depends on the number
-- of messages and consumers, not on the size of the log.
create function pillarbox.confidential_pending(ids bigint[])
returns table (log_id bigint, message_id uuid, consumer text, state text)
language sql stable
as $$
    with wanted as materialized (
        select confidential.log_id, confidential.shard, confidential.at, confidential.message_id, logged.xid, logged.subject
        from pillarbox.confidential
        left join lateral (
            select log.xid, pillarbox.subject(log.source, log.topic, log.aggregate_type) as subject
            from pillarbox.log
            where log.shard = confidential.shard and log.id = confidential.log_id and log.at = confidential.at limit 1
        ) logged on true
        where confidential.log_id = any (ids)
    ), reader as materialized (
        select cursor.consumer, cursor.included, cursor.excluded, used.shard, latest.old, latest.new, latest.last_id
        from (select distinct wanted.shard from wanted) as used
        cross join pillarbox.cursor
        left join lateral pillarbox.latest_position(cursor.consumer, used.shard) as latest on true
    ), matching as materialized (
        select wanted.log_id, wanted.message_id, wanted.at, wanted.xid, reader.*
        from wanted join reader on reader.shard = wanted.shard
         and wanted.subject ~ reader.included and (reader.excluded is null or wanted.subject !~ reader.excluded)
    )
    select matching.log_id, matching.message_id, matching.consumer, 'unread'
    from matching
    -- The same condition as in the view outbox_status.
    where not coalesce(matching.log_id <= (select floor_id from pillarbox.cluster_identity)
                       or pg_visible_in_snapshot(matching.xid, matching.old)
                       or (pg_visible_in_snapshot(matching.xid, matching.new) and matching.log_id <= matching.last_id), false)
    union all
    select wanted.log_id, wanted.message_id, null, 'unread'
    from wanted
    where wanted.subject is not null and not exists (select from matching where matching.log_id = wanted.log_id)
    union all
    -- The filter of a route has changed, and its replay is not requested yet.
    select wanted.log_id, wanted.message_id, changed.consumer, 'replay'
    from wanted join pillarbox.filter_change as changed on changed.replay_from <= wanted.at
    union all
    select matching.log_id, matching.message_id, matching.consumer, 'replay'
    from matching
    where exists (
        select from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
        where replay.consumer = matching.consumer and replay_shard.shard = matching.shard and not replay_shard.done
          and replay_shard.last_id < matching.log_id and replay.from_at <= matching.at and replay.to_at > matching.at)
    union all
    -- By consumer, because parked messages have no index on the message alone.
    select wanted.log_id, wanted.message_id, parked.consumer, 'parked'
    from wanted cross join pillarbox.cursor
    join pillarbox.parked on parked.consumer = cursor.consumer and parked.message_id = wanted.message_id
     and parked.log_id = wanted.log_id and not parked.discarded
    union all
    select wanted.log_id, wanted.message_id, dead_letter.consumer, 'dead'
    from wanted
    join pillarbox.dead_letter on dead_letter.message_id = wanted.message_id and dead_letter.log_id = wanted.log_id
$$;

-- Replaces the payloads of these messages, in the log and in its copies. With a reason, it also records the consumers that lose
-- a message by it, so that its status there is `discarded` and not `sent`. The marker must match `mailbox::log::BLANKED`.
create function pillarbox.blank_confidential(ids bigint[], reason text) returns void
language sql
as $$
    insert into pillarbox.discarded (consumer, message_id, attempts, last_error)
    select distinct pending.consumer, pending.message_id, 0, reason from pillarbox.confidential_pending(ids) as pending
    where reason is not null and pending.consumer is not null and pending.state in ('unread', 'parked')
    on conflict do nothing;

    update pillarbox.log set payload = '{"blanked":true}' from pillarbox.confidential
    where confidential.log_id = any (ids) and log.shard = confidential.shard and log.id = confidential.log_id
      and log.at = confidential.at and log.payload::text <> '{"blanked":true}';

    update pillarbox.parked set payload = '{"blanked":true}' from pillarbox.confidential cross join pillarbox.cursor
    where confidential.log_id = any (ids) and parked.consumer = cursor.consumer
      and parked.message_id = confidential.message_id and parked.log_id = confidential.log_id
      and parked.payload::text <> '{"blanked":true}';

    update pillarbox.dead_letter set payload = '{"blanked":true}' from pillarbox.confidential
    where confidential.log_id = any (ids) and dead_letter.message_id = confidential.message_id
      and dead_letter.log_id = confidential.log_id and dead_letter.payload::text <> '{"blanked":true}';

    update pillarbox.confidential set blanked_at = clock_timestamp()
    where confidential.log_id = any (ids) and confidential.blanked_at is null;
$$;

revoke all on function pillarbox.confidential_pending from public;
revoke all on function pillarbox.blank_confidential from public;
