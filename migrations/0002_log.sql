-- schema: pillarbox
-- The log: what was posted, in the transaction that it tells of. Append-only: nothing here is updated or deleted, and
-- retention drops whole partitions.

create sequence pillarbox.log_id;

-- Version 7: the time is in the id, which keeps indexes on it dense and lets an inbox be partitioned by the id's day.
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

-- One key, one shard: a shard has one reader at a time, and so a key keeps its order over any number of replicas. The
-- number of shards is fixed with the first row.
create function pillarbox.shard_of(tenant text, key text) returns smallint
language sql immutable parallel safe
as $$
    select (hashtextextended(key, hashtextextended(tenant, 0)) & 15)::smallint
$$;

create table pillarbox.log (
    -- First, because defaults are evaluated in this order: a row must take its transaction id before its id. Readers
    -- rely on it: what a later transaction wrote has a higher id than the sequence had before that transaction began.
    xid            xid8        not null default pg_current_xact_id(),
    id             bigint      not null default nextval('pillarbox.log_id'),
    shard          smallint    not null check (shard between 0 and 15),
    message_id     uuid        not null,
    source         text        not null,
    tenant         text        not null,
    topic          text        not null check (topic ~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$' and length(topic) <= 200),
    key            text        check (length(key) between 1 and 255),
    aggregate_type text        check (length(aggregate_type) between 1 and 100),
    -- A JSON number or string: 5 and "5" are different ids, and travel as what they are.
    aggregate_id   json        check (octet_length(aggregate_id::text) between 1 and 1024),
    headers        jsonb       not null default '{}',
    -- json, not jsonb: it is delivered byte for byte as it was posted.
    payload        json        not null check (octet_length(payload::text) <= 262144),
    -- clock_timestamp(), not now(): a long transaction posts when it posts.
    at             timestamptz not null default clock_timestamp()
) partition by range (at);

create index log_shard_id on pillarbox.log (shard, id);
-- For what commits late: a transaction's rows of a shard, in order.
create index log_xid_shard_id on pillarbox.log (xid, shard, id);

-- Catches what has no partition: a post must not fail because nobody made tomorrow's.
create table pillarbox.log_overflow partition of pillarbox.log default;

-- Makes the partitions of today and of so many days ahead; returns how many it made. It waits for nobody: where it
-- cannot have the lock at once, it tries again another time.
create function pillarbox.make_log_partitions(days integer) returns integer
language plpgsql
-- A day begins at the same moment for whoever calls.
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
        -- Rows that overflowed stay where they are: the day's partition would have to take them, with everyone waiting.
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

-- A post that is acknowledged is on disk, whatever the session chose for its other writes.
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

-- The producer's whole API, for any language. Call it in the transaction that it tells of; it returns the message's id.
-- An aggregate_id that reads as a whole number becomes a JSON number, anything else a string.
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
-- The caller's session must not change what this means.
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    message_id uuid := pillarbox.uuid_v7();
begin
    if topic is null or topic !~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$' or length(topic) > 200 then
        raise exception 'topic takes up to 200 letters, digits and _, in parts joined by dots'
            using errcode = 'invalid_parameter_value';
    end if;
    if payload is null then
        raise exception 'payload takes a JSON value; for none, post the JSON null' using errcode = 'invalid_parameter_value';
    end if;
    if octet_length(payload::text) > 262144 then
        raise exception 'payload has % bytes; at most 262144 are taken', octet_length(payload::text)
            using errcode = 'invalid_parameter_value', hint = 'Store what is larger elsewhere and post a reference to it.';
    end if;
    -- The cast refuses escapes of NUL and of half characters, which text and most consumers cannot take; it is dear, so
    -- it is made only where there is an escape.
    if position('\u' in payload::text) > 0 then
        perform payload::jsonb;
    end if;
    if tenant is null or tenant !~ '^[a-z0-9][a-z0-9_-]{0,62}$' then
        raise exception 'tenant takes 1 to 63 of a-z, 0-9, - and _, with a letter or digit first'
            using errcode = 'invalid_parameter_value';
    end if;
    -- Strings only: what is deeper or larger than a reader's JSON takes would stop it for good.
    if jsonb_typeof(coalesce(headers, '{}')) <> 'object' or octet_length(headers::text) > 16384 then
        raise exception 'headers take a JSON object of at most 16384 bytes' using errcode = 'invalid_parameter_value';
    end if;
    if exists (select from jsonb_each(coalesce(headers, '{}')) header where jsonb_typeof(header.value) <> 'string') then
        raise exception 'headers take strings as values' using errcode = 'invalid_parameter_value';
    end if;
    if length(aggregate_id) not between 1 and 255 then
        raise exception 'aggregate_id takes 1 to 255 characters' using errcode = 'invalid_parameter_value';
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

-- Roles belong to the cluster, not to a database: another database may have made it. Who may not make roles does without:
-- its operator makes it and grants the same.
do $$
begin
    begin
        create role pillarbox_producer nologin;
    exception
        when duplicate_object or unique_violation then null;
        when insufficient_privilege then raise warning 'not allowed to make the role pillarbox_producer; producers need it';
    end;
    if exists (select from pg_roles where rolname = 'pillarbox_producer') then
        grant usage on schema pillarbox to pillarbox_producer;
        grant execute on function pillarbox.post to pillarbox_producer;
    end if;
end
$$;
