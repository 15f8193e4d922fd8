-- schema: pillarbox
-- Readers of the log: who they are, who works for them, how far they have come, and what they could not do. What
-- succeeds is only appended to (positions, inbox); rows that change are few.

-- ---- where this log lives

-- Transaction ids do not survive a logical restore or pg_upgrade, and a copy must not act as the original does. So the
-- log knows its cluster and its database, and what was in it when it came here: nothing up to `floor` is read by xid.
create table pillarbox.home (
    only_one          boolean     primary key default true check (only_one),
    -- Null: this installation may not ask for it.
    system_identifier bigint,
    -- Null: nobody has started here yet.
    database_oid      oid,
    floor             pg_snapshot not null default '3:3:',
    floor_id          bigint      not null default 0,
    floor_at          timestamptz not null default 'epoch',
    -- It came here from elsewhere, and nobody has yet said how to go on.
    restored_at       timestamptz
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

insert into pillarbox.home default values;

-- ---- readers

-- What a reader's filter is matched against.
create function pillarbox.subject(source text, topic text, aggregate_type text) returns text
language sql immutable parallel safe
as $$
    select source || ' ' || topic || ' ' || coalesce(aggregate_type, '')
$$;

create table pillarbox.cursor (
    consumer   text        primary key check (consumer ~ '^[a-z0-9][a-z0-9_.-]{0,99}$'),
    kind       text        not null check (kind in ('relay', 'handler')),
    -- Regular expressions over the subject: what it takes, and what of that it leaves to others.
    wants      text        not null,
    leaves     text,
    -- The newest run: 0 is live, each `replay --again` opens another.
    run        integer     not null default 0,
    -- Since when it holds the log, or was reset.
    since      timestamptz not null default now(),
    -- Behind for too long: it holds nothing back any more, and reads nothing until an operator resets it.
    lapsed_at  timestamptz
);

-- A process that works. One heartbeat keeps all that it has leased.
create table pillarbox.replica (
    id    uuid        primary key,
    name  text        not null,
    until timestamptz not null
);

-- One worker of a process for one consumer. The shards of a consumer are shared out evenly among its lanes. Whoever takes
-- a silent lane's shards deletes its row first: an owner whose row is gone keeps nothing any more.
create table pillarbox.lane (
    consumer text not null,
    owner    uuid not null,
    replica  uuid not null,
    primary key (consumer, owner)
);

-- One owner per shard keeps the order of a key over any number of replicas. The epoch counts how often it changed hands.
create table pillarbox.lease (
    consumer text     not null,
    shard    smallint not null,
    owner    uuid,
    epoch    bigint   not null default 0,
    primary key (consumer, shard)
);

create sequence pillarbox.position_n;

-- How far a consumer has come: in `shards`, everything visible in `old`, and of what became visible between `old` and
-- `new` everything up to the shard's `last_ids`. Appended, newest wins: a row that is updated in place slows down under
-- a pinned xmin. The history says when a message was sent.
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

-- ---- what has taken effect

-- The lowest id of version 7 of a moment.
create function pillarbox.uuid_at(moment timestamptz) returns uuid
language sql immutable parallel safe
as $$
    select (lpad(to_hex((extract(epoch from moment) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

-- Partitioned by the day inside the id, never by the day of handling: a repeat after midnight must find its row.
create table pillarbox.inbox (
    consumer   text    not null,
    message_id uuid    not null,
    run        integer not null default 0,
    primary key (consumer, message_id, run)
) partition by range (message_id);

create table pillarbox.inbox_overflow partition of pillarbox.inbox default;

-- Ids of other producers: any text, with no time in it, so these are forgotten by age.
create table pillarbox.inbox_foreign (
    consumer   text        not null,
    message_id text        not null,
    at         timestamptz not null default now(),
    primary key (consumer, message_id)
);
create index inbox_foreign_at on pillarbox.inbox_foreign (at);

-- Makes the partitions of today and of so many days ahead, like make_log_partitions.
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

-- ---- what has not

-- A message that a consumer could not take, with its whole content: the log may be gone before it is. Later messages of
-- its key wait behind it (next_at is null); only the owner of the shard runs what is here.
create table pillarbox.parked (
    -- The order of reading, which is not that of the log's ids.
    place          bigint      generated always as identity primary key,
    consumer       text        not null,
    shard          smallint    not null,
    run            integer     not null,
    attempts       integer     not null,
    next_at        timestamptz,
    last_error     text,
    parked_at      timestamptz not null default now(),
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
create index parked_key on pillarbox.parked (consumer, tenant, key, place) where key is not null;

-- Given up after its retries; it no longer blocks its key.
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

-- ---- reading again

create table pillarbox.replay (
    id           bigint      generated always as identity primary key,
    consumer     text        not null,
    run          integer     not null,
    from_at      timestamptz not null,
    to_at        timestamptz not null,
    requested_at timestamptz not null default now()
);

create table pillarbox.replay_shard (
    replay  bigint   not null,
    shard   smallint not null,
    last_id bigint   not null default 0,
    done    boolean  not null default false,
    primary key (replay, shard)
);

-- ---- for people

-- What each consumer has made of each message that is for it: pending, sent (and when), parked or dead.
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
           when parked.place is not null then 'parked'
           when newest.passed then 'sent'
           else 'pending'
       end                      as status,
       case when newest.passed and parked.place is null and dead.id is null then sent.at end as sent_at,
       coalesce(parked.attempts, dead.attempts, case when newest.passed then 1 else 0 end) as attempts,
       coalesce(parked.last_error, dead.last_error) as last_error,
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
