-- schema: pillarbox
-- The log, its consumers, and the idempotency keys of HTTP requests.
--
--   1. Helper functions      5. Consumers and leases      9. Confidential messages
--   2. The log               6. Inbox                    10. Maintenance
--   3. Posting               7. Failed messages          11. Idempotency
--   4. The database          8. Replays                  12. Status view
--                                                        13. Rights
--
-- The migrator creates the schema, because it stores its own table there.
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

-- Whether arrays and objects are nested deeper than this. PostgreSQL reads JSON with recursion, and how deep it can go depends on
-- the statement: a payload with thousands of levels that one statement stores cannot be read by another.
create function pillarbox.is_nested_deeper(payload json, levels integer) returns boolean
language plpgsql immutable strict
set search_path = pg_catalog, pg_temp
as $$
begin
    begin
        return jsonb_path_exists(payload::jsonb, format('strict $.**{%s} ? (@.type() == "object" || @.type() == "array")',
            levels)::jsonpath);
    exception
        -- JSON has larger numbers than jsonb, and escapes that it has not.
        when numeric_value_out_of_range or untranslatable_character or invalid_text_representation then null;
    end;
    -- One level after the other, each time from the text: slow, for these few.
    return exists (
        with recursive part (value, level) as (
            select payload, 1
            union all
            select inner_part.value, part.level + 1
            from part cross join lateral (
                select value from json_each(case when json_typeof(part.value) = 'object' then part.value end)
                union all
                select value from json_array_elements(case when json_typeof(part.value) = 'array' then part.value end)
            ) as inner_part
            where part.level <= levels and json_typeof(inner_part.value) in ('object', 'array')
        )
        select from part where level > levels
    );
exception when statement_too_complex then
    return true;
end
$$;

-- The message id for the event id of a producer: a UUID is the message id itself, any other text has a UUID that is derived
-- from it. All ids that Pillarbox generates have version 7, so no producer can choose one of them; a UUID of this version is
-- a text like any other.
create function pillarbox.message_id_of(event_id text) returns uuid
language plpgsql immutable strict
set search_path = pg_catalog, pg_temp
as $$
declare
    uuid_text text := lower(case when event_id like 'evt\_%' then substr(event_id, 5) else event_id end);
    digest    bytea;
begin
    if uuid_text ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-689a-f][0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}$' then
        return uuid_text::uuid;
    end if;
    digest := substring(sha256(convert_to('business event ' || event_id, 'UTF8')) for 16);
    -- Version 8, which leaves the other bits to the application, and the variant of RFC 9562.
    digest := set_byte(digest, 6, (get_byte(digest, 6) & 15) | 128);
    digest := set_byte(digest, 8, (get_byte(digest, 8) & 63) | 128);
    return encode(digest, 'hex')::uuid;
end
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

-- References into old log entries: retention drops nothing that was posted at or after `from_at`.
create table pillarbox.retention_hold (
    holder  text        primary key,
    from_at timestamptz not null
);

-- ---- 3. Posting

-- Tenants: who may post and receive. A post in SQL for a tenant that does not exist is refused, because a misspelled name must
-- not become a tenant that nothing reads. The table is in this schema because `post` reads it, in every database with a log.
-- `main` always exists.
create table pillarbox.tenant (
    name         text        primary key check (name ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    display_name text        check (length(display_name) between 1 and 100),
    -- What the operator wants to know about the tenant: an object with strings as values.
    metadata     jsonb       not null default '{}'
        check (jsonb_typeof(metadata) = 'object' and octet_length(metadata::text) <= 16384),
    -- Null: the limit of the installation applies.
    subscribers_max         integer check (subscribers_max between 0 and 100000),
    events_per_second_max   integer check (events_per_second_max between 1 and 1000000),
    payload_bytes_max       integer check (payload_bytes_max between 1 and 262144),
    -- While it is set, the requests of the tenant are refused, and messages to its subscribers wait.
    suspended_at timestamptz,
    -- Set when the tenant is deleted. The row stays until the log has none of its messages any more, and the name cannot be
    -- reused until then: a new tenant of this name would see the messages of the deleted one.
    deleted_at   timestamptz,
    -- Set when everything of a deleted tenant is deleted, except its messages.
    emptied_at   timestamptz,
    version      bigint      not null default 1,
    created_at   timestamptz not null default clock_timestamp(),
    updated_at   timestamptz not null default clock_timestamp(),
    constraint tenant_main_is_active check (name <> 'main' or suspended_at is null),
    constraint tenant_deleted_is_suspended check (deleted_at is null or suspended_at is not null)
);
insert into pillarbox.tenant (name) values ('main');
-- For the maintenance that removes the rows of deleted tenants, which are few.
create index tenant_deleted on pillarbox.tenant (deleted_at) where deleted_at is not null;

-- Message ids that producers choose. A post with an id that is in this table is a repetition, and no second message. The log
-- itself has no unique index on message_id: it is partitioned by time, which every unique index would have to contain, and each
-- index slows down every post. So only the posts that choose an id pay for it. Rows are deleted when the log no longer has their
-- message.
create table pillarbox.chosen_id (
    message_id uuid        primary key,
    -- When it was posted: such an id need not contain a time, and the log is searched by time.
    at         timestamptz not null default clock_timestamp(),
    -- The same id with another topic or tenant is an error of the producer, not a repetition.
    tenant     text        not null,
    topic      text        not null,
    -- The digest of key, aggregate and payload. The same id with other content is also an error of the producer.
    digest     bytea       not null
);
create index chosen_id_at on pillarbox.chosen_id (at);

-- Aggregate types: what business events can be about. Each type has a queue on RabbitMQ and a listener. Operators add types. The
-- table is in this schema because `notify` reads it, in every database that posts events.
create table pillarbox.aggregate_type (
    name       text        primary key check (name ~ '^[A-Z][A-Z0-9_]{0,49}$')
        -- The listener of a type is the consumer `notify.<type>`; these names belong to other consumers of the service.
        constraint aggregate_type_reserved check (name not in ('MAIL', 'ACCOUNTS', 'CONTACTS', 'EVENTS', 'PEOPLE')),
    created_at timestamptz not null default clock_timestamp()
);
insert into pillarbox.aggregate_type (name) values ('RESTAURANT'), ('CUSTOMER'), ('AGENCY'), ('ADMIN');

-- Refuses a post in SQL that its tenant may not make. A schema or a quota never aborts or delays a business transaction: this
-- function checks only what is wrong with the call itself. The hub checks payloads before it fans them out.
create function pillarbox.check_post(tenant text, topic text, payload json) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    -- Without a lock of the row: all posts of a tenant would share it. Nor is a suspended tenant refused here: a business
    -- transaction must not fail because of it. Its messages wait until it is resumed.
    if not exists (select from pillarbox.tenant as known
                   where known.name = check_post.tenant and known.deleted_at is null) then
        raise exception 'tenant % does not exist', quote_literal(tenant)
            using errcode = 'foreign_key_violation',
                  hint = 'Check the spelling, or create it with POST /admin/v1/tenants or `pillarbox tenants create`.';
    end if;
    if topic = 'hub' or starts_with(topic, 'hub.') then
        raise exception 'topic % is reserved: types that begin with hub. are posted by the hub itself', quote_literal(topic)
            using errcode = 'invalid_parameter_value', hint = 'Choose another name.';
    end if;
end
$$;

-- Fails if consumers do not accept the headers. They reach RabbitMQ and webhooks, so names and sizes are limited to what AMQP,
-- HTTP and most receivers accept.
create function pillarbox.check_headers(headers jsonb) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    invalid text;
begin
    if headers is null or headers = '{}' then
        return;
    end if;
    if jsonb_typeof(headers) <> 'object' or octet_length(headers::text) > 4096 then
        raise exception 'headers must be a JSON object of at most 4096 bytes' using errcode = 'invalid_parameter_value';
    end if;
    -- Only strings: a reader's JSON parser may not accept nested values, and would stop for good.
    select name into invalid from jsonb_each(headers) as header (name, value) where jsonb_typeof(value) <> 'string' limit 1;
    if found then
        raise exception 'headers must have strings as values: the value of % is not a string', quote_literal(invalid)
            using errcode = 'invalid_parameter_value';
    end if;
    -- RabbitMQ, proxies and most receivers limit a header to some kilobytes.
    select name into invalid from jsonb_each_text(headers) as header (name, value) where octet_length(value) > 2048 limit 1;
    if found then
        raise exception 'headers must have values of at most 2048 bytes: the value of % is longer', quote_literal(invalid)
            using errcode = 'invalid_parameter_value';
    end if;
    select name into invalid from jsonb_object_keys(headers) as header (name) where name !~ '^[a-z0-9][a-z0-9_-]{0,63}$' limit 1;
    if found then
        raise exception 'headers must have names of 1 to 64 characters of a-z, 0-9, - and _, with a letter or digit first: % is '
            'another name', quote_literal(left(invalid, 100)) using errcode = 'invalid_parameter_value';
    end if;
end
$$;

-- The implementation of `post`. With a message_id, a second post with the same id adds no message and returns the id; it waits for
-- the transaction of the first one, and posts the message if that rolls back. The function has no defaults and a `posted_key`, so
-- that it matches no call that leaves an argument out or names them all: PostgreSQL refuses a call without types that matches two
-- functions.
create function pillarbox.post(
    topic          text,
    payload        json,
    posted_key     text,
    aggregate_type text,
    aggregate_id   text,
    headers        jsonb,
    tenant         text,
    message_id     uuid
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
    -- Before anything else reads it as JSON. More than 127 levels need as many brackets, so the others are not parsed.
    if octet_length(payload::text) > 254
       and octet_length(payload::text) - octet_length(replace(replace(payload::text, '[', ''), '{', '')) > 127
       and pillarbox.is_nested_deeper(payload, 127) then
        raise exception 'payload is nested deeper than 127 levels, which consumers cannot read'
            using errcode = 'invalid_parameter_value', hint = 'Post a flatter payload, or the nested part as a text.';
    end if;
    -- The cast to jsonb rejects escapes of NUL and of lone surrogates, which text columns and most consumers cannot
    -- represent. The cast is expensive, so it runs only if the payload contains such an escape sequence.
    if position('\u' in payload::text) > 0 then
        perform payload::jsonb;
    end if;
    if length(posted_key) not between 1 and 255 then
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
    perform pillarbox.check_post(tenant, topic, payload);
    perform pillarbox.check_headers(headers);
    if message_id is not null then
        -- All ids that Pillarbox generates have version 7, so that no chosen id can be the id of another message.
        if get_byte(uuid_send(message_id), 6) >> 4 = 7 then
            raise exception 'message_id must not be a UUID of version 7, which Pillarbox generates for other messages'
                using errcode = 'invalid_parameter_value',
                      hint = 'Pass a random UUID (version 4), or derive one from an id of yours (version 5).';
        end if;
        -- Not the headers: a repetition may belong to another trace. As jsonb, so that spaces and the order of fields do not
        -- matter.
        begin
            content := sha256(convert_to(
                jsonb_build_array(posted_key, aggregate_type, aggregate_id, payload::jsonb)::text, 'UTF8'));
        exception when numeric_value_out_of_range then
            -- JSON has larger numbers than jsonb.
            content := sha256(convert_to(json_build_array(posted_key, aggregate_type, aggregate_id, payload)::text, 'UTF8'));
        end;
        loop
            insert into pillarbox.chosen_id (message_id, tenant, topic, digest)
            values (posted_id, tenant, topic, content) on conflict do nothing;
            exit when found;
            select chosen.tenant, chosen.topic, chosen.digest into first from pillarbox.chosen_id as chosen
            where chosen.message_id = posted_id;
            -- Retention has removed the id since the insert, so it is free again. Without a row there is no message.
            continue when not found;
            if first.tenant <> tenant or first.topic <> topic then
                raise exception 'message_id % was posted before with the topic % in the tenant %: choose another id for '
                    'another message', posted_id, first.topic, first.tenant using errcode = 'invalid_parameter_value';
            end if;
            if first.digest <> content then
                raise exception 'message_id % was posted before with another payload, key or aggregate: choose another id '
                    'for another message, or repeat the same arguments', posted_id using errcode = 'invalid_parameter_value';
            end if;
            return posted_id;
        end loop;
    end if;
    insert into pillarbox.log (shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, payload)
    values (pillarbox.shard_of(tenant, coalesce(posted_key, posted_id::text)), posted_id, 'sql', tenant, topic,
        posted_key, aggregate_type,
        case when aggregate_id ~ '^(0|-?[1-9][0-9]{0,17})$' then aggregate_id::json else to_json(aggregate_id) end,
        coalesce(headers, '{}'), payload);
    return posted_id;
end
$$;

-- The whole API for producers in any language. Call it in the transaction of the change that the message reports; it returns the
-- message's id. An aggregate_id that is a whole number is stored as a JSON number, any other as a JSON string.
--
-- These functions only pass their arguments on. They run with the rights of the caller, and every name in them is qualified, so
-- PostgreSQL can merge them into the statement of the caller, and they cost nothing. All of them have their parameters in the same
-- order, so that no call by position gets another meaning.
--   payload: json, jsonb, and text for literals and parameters without a type, because PostgreSQL prefers text to the others.
--   key: a polymorphic type, which accepts a number and a UUID, and takes what has no type for text.
--   aggregate_id: text, or a number or a UUID in a function whose parameters up to it have no defaults: without the argument,
--   functions that differ in its type only would be ambiguous.
do $$
declare
    payload_type text;
begin
    foreach payload_type in array array['json', 'jsonb', 'text'] loop
        execute format($function$
            create function pillarbox.post(
                topic          text,
                payload        %s,
                key            anycompatiblenonarray default null::text,
                aggregate_type text                  default null,
                aggregate_id   text                  default null,
                headers        jsonb                 default '{}',
                tenant         text                  default 'main',
                message_id     uuid                  default null
            ) returns uuid
            language sql
            as $body$
                select pillarbox.post(topic, payload::pg_catalog.json, key::pg_catalog.text, aggregate_type, aggregate_id, headers,
                    tenant, message_id)
            $body$
            $function$, payload_type);
        execute format($function$
            create function pillarbox.post(
                topic          text,
                payload        %s,
                key            anycompatiblenonarray,
                aggregate_type text,
                aggregate_id   anynonarray,
                headers        jsonb                 default '{}',
                tenant         text                  default 'main',
                message_id     uuid                  default null
            ) returns uuid
            language sql
            as $body$
                select pillarbox.post(topic, payload::pg_catalog.json, key::pg_catalog.text, aggregate_type,
                    aggregate_id::pg_catalog.text, headers, tenant, message_id)
            $body$
            $function$, payload_type);
    end loop;
end
$$;

-- Posts a business event in the transaction of the caller; the notify service turns it into notifications. The implementation for
-- all types of payloads. With an event_id, a second post with the same id adds no message and returns the same message id; it waits
-- for the transaction of the first one, and posts the message if that rolls back.
create function pillarbox.notify(
    event_type     text,
    aggregate_type text,
    aggregate_id   bigint,
    payload        json,
    event_id       text  default null,
    key            text  default null,
    headers        jsonb default '{}'
) returns uuid
language plpgsql security definer
-- Settings of the caller's session must not change how this function runs.
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
    posted_id  uuid := coalesce(pillarbox.message_id_of(event_id), pillarbox.uuid_v7());
    posted_key text := coalesce(key, aggregate_type || ':' || aggregate_id);
    more       jsonb := coalesce(headers, '{}');
    content    bytea;
    first      record;
begin
    -- A webhook about it has the topic notification.<event type>, of at most 200 characters.
    if event_type is null or event_type !~ '^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$' or length(event_type) > 187 then
        raise exception 'event_type must have at most 187 letters, digits and _, in parts joined by dots'
            using errcode = 'invalid_parameter_value';
    end if;
    if lower(event_type) ~ '^email(\.|$)' then
        raise exception 'event_type must not be email or begin with email., which requests e-mails'
            using errcode = 'invalid_parameter_value';
    end if;
    -- Locked, so that the type is not deleted before the event is visible to the listener.
    perform from pillarbox.aggregate_type as known where known.name = aggregate_type for key share;
    if not found then
        raise exception 'aggregate_type % is unknown', coalesce(quote_literal(aggregate_type), 'null')
            using errcode = 'foreign_key_violation',
                  hint = 'Known types: ' || coalesce((select string_agg(known.name, ', ' order by known.name)
                                                      from pillarbox.aggregate_type as known), 'none')
                         || '. Operators add types with POST /notify/v1/aggregate-types.';
    end if;
    if aggregate_id is null then
        raise exception 'aggregate_id must be a number' using errcode = 'invalid_parameter_value';
    end if;
    if event_id !~ '^[!-~]{1,255}$' then
        raise exception 'event_id must have 1 to 255 visible ASCII characters; omit it for a new id'
            using errcode = 'invalid_parameter_value';
    end if;
    if length(key) not between 1 and 255 then
        raise exception 'key must have 1 to 255 characters; omit it for the order of the aggregate'
            using errcode = 'invalid_parameter_value';
    end if;
    if payload is null then
        raise exception 'payload must be a JSON value; to post no content, post the JSON null'
            using errcode = 'invalid_parameter_value';
    end if;
    -- Less than a message may have: as a webhook, the event is a message with some more fields.
    if octet_length(payload::text) > 261632 then
        raise exception 'payload has % bytes; at most 261632 are accepted', octet_length(payload::text)
            using errcode = 'invalid_parameter_value', hint = 'Store larger content elsewhere and post a reference to it.';
    end if;
    -- One level less than a message may have, for the same reason.
    -- Before anything else reads it as JSON. More than 126 levels need as many brackets, so the others are not parsed.
    if octet_length(payload::text) > 252
       and octet_length(payload::text) - octet_length(replace(replace(payload::text, '[', ''), '{', '')) > 126
       and pillarbox.is_nested_deeper(payload, 126) then
        raise exception 'payload is nested deeper than 126 levels, which consumers cannot read'
            using errcode = 'invalid_parameter_value', hint = 'Post a flatter payload, or the nested part as a text.';
    end if;
    -- Rejects escapes of NUL and of lone surrogates, as `post` does.
    if position('\u' in payload::text) > 0 then
        perform payload::jsonb;
    end if;
    perform pillarbox.check_headers(headers);
    more := more - 'source_event_id';
    if event_id is not null then
        -- Consumers also get the id as the producer knows it.
        if lower(event_id) not in (posted_id::text, 'evt_' || posted_id) then
            more := more || jsonb_build_object('source_event_id', event_id);
        end if;
        -- As jsonb, so that spaces and the order of fields do not matter.
        begin
            content := sha256(convert_to(
                jsonb_build_array('notify', posted_key, aggregate_type, aggregate_id, payload::jsonb)::text, 'UTF8'));
        exception when numeric_value_out_of_range then
            -- JSON has larger numbers than jsonb.
            content := sha256(convert_to(
                json_build_array('notify', posted_key, aggregate_type, aggregate_id, payload)::text, 'UTF8'));
        end;
        loop
            insert into pillarbox.chosen_id (message_id, tenant, topic, digest)
            values (posted_id, 'main', event_type, content) on conflict do nothing;
            exit when found;
            select chosen.tenant, chosen.topic, chosen.digest into first from pillarbox.chosen_id as chosen
            where chosen.message_id = posted_id;
            -- Retention has removed the id since the insert, so it is free again. Without a row there is no message.
            continue when not found;
            if first.tenant <> 'main' or first.topic <> event_type or first.digest <> content then
                raise exception 'event_id % was posted before with another type, aggregate, key or payload', event_id
                    using errcode = 'unique_violation',
                          hint = 'Choose another id for another event, or repeat the same arguments.';
            end if;
            return posted_id;
        end loop;
    end if;
    insert into pillarbox.log (shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, payload)
    values (pillarbox.shard_of('main', posted_key), posted_id, 'notify', 'main', event_type, posted_key, aggregate_type,
        to_json(aggregate_id), more, payload);
    return posted_id;
end
$$;

-- The functions below only pass their arguments on. They run with the rights of the caller.

create function pillarbox.notify(
    event_type     text,
    aggregate_type text,
    aggregate_id   bigint,
    payload        jsonb,
    event_id       text  default null,
    key            text  default null,
    headers        jsonb default '{}'
) returns uuid
language sql
as $$
    select pillarbox.notify(event_type, aggregate_type, aggregate_id, payload::pg_catalog.json, event_id, key, headers)
$$;

-- For literals and for parameters without a type, which would match both json and jsonb: PostgreSQL prefers text to either.
create function pillarbox.notify(
    event_type     text,
    aggregate_type text,
    aggregate_id   bigint,
    payload        text,
    event_id       text  default null,
    key            text  default null,
    headers        jsonb default '{}'
) returns uuid
language sql
as $$
    select pillarbox.notify(event_type, aggregate_type, aggregate_id, payload::pg_catalog.json, event_id, key, headers)
$$;

-- ---- 4. The database

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

-- The incarnation of the database, which processes compare to learn that transactions may have been lost. A server that crashed
-- has lost its last asynchronous commits; a promoted standby and a restored backup may have lost more. Transaction ids, ids from
-- sequences and version counters are then assigned again for other content, so nothing that a process remembers from before may
-- be used or saved. PostgreSQL empties an unlogged table on exactly these occasions (crash recovery, promotion, a restored base
-- backup) and keeps it over a clean restart. A single row. A process that finds none inserts a random id: the next incarnation
-- has begun.
create unlogged table pillarbox.incarnation (
    only_one boolean     primary key default true check (only_one),
    id       uuid        not null default gen_random_uuid(),
    since    timestamptz not null default now()
);

-- Locks of periodic work that one process at a time does: a transaction has the lock while it has locked the row. They are rows
-- and not advisory locks, because every login of the database can hold an advisory lock, producers included. The role
-- pillarbox_producer has no privilege on this table.
create table pillarbox.work_lock (
    name text primary key
);

-- ---- 5. Consumers and leases

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
    -- A consumer that was dropped and created again has nothing to do with older rows of `unrouted`.
    created_at timestamptz not null default now(),
    -- Lapsed: it was too far behind. Retention no longer waits for it, and it reads nothing until an operator resets
    -- it.
    lapsed_at  timestamptz
);

-- The former filters of consumers, which changes of the settings leave: up to the time `read_to`, the consumer has read the log
-- with this filter. What the filter did not match has not been processed, although the consumer has passed it.
create table pillarbox.filter_change (
    id          bigint      generated always as identity primary key,
    consumer    text        not null,
    changed_at  timestamptz not null default now(),
    read_to     timestamptz not null,
    included    text        not null,
    excluded    text,
    -- A replay is needed from this time on, of messages that this filter did not match: another route may have had them, and
    -- may not have published them before it also changed. It is requested, and this becomes null, when no shard worker has a
    -- former filter any more.
    replay_from timestamptz
);
create index filter_change_consumer on pillarbox.filter_change (consumer, read_to);

-- A running process. Its heartbeat extends `until`, and with it every lease of the process.
create table pillarbox.replica (
    id    uuid        primary key,
    name  text        not null,
    until timestamptz not null
);

-- A loop of one process that works on some shards of one consumer. This row is the fence: a shard worker locks it in
-- every transaction that saves something, and a process that takes over the shards of an expired shard worker deletes
-- its row first. So a former owner cannot commit. Unlogged: the rows vanish together with transactions that may be lost, so
-- that a process cannot commit what it derived from them. It registers again under a new id and loads everything again.
create unlogged table pillarbox.shard_worker (
    consumer text not null,
    owner    uuid not null,
    replica  uuid not null,
    -- The digest of the filter with which the worker reads. Null: it does not read the log.
    filter   text,
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

-- ---- 6. Inbox

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

-- ---- 7. Failed messages

-- Messages that a consumer could not process, with their whole content: retention may drop the log entry earlier than the
-- parked message. Later messages of the same key are also parked, and wait for the failed one (next_at is null). Only the
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

-- Messages that a route published and RabbitMQ returned, because no queue was bound for them. The route was not required, so it
-- has passed them. Partitioned by day, because a route without any queue adds a row for every message.
create table pillarbox.unrouted (
    consumer text        not null,
    log_id   bigint      not null,
    at       timestamptz not null default clock_timestamp()
) partition by range (at);
create index unrouted_consumer_log_id on pillarbox.unrouted (consumer, log_id);
create table pillarbox.unrouted_overflow partition of pillarbox.unrouted default;

-- ---- 8. Replays

create table pillarbox.replay (
    id           bigint      generated always as identity primary key,
    consumer     text        not null,
    run          integer     not null,
    from_at      timestamptz not null,
    to_at        timestamptz not null,
    requested_at timestamptz not null default now(),
    -- Set when an operator cancels the replay: the rows of its unfinished shards are deleted, and processed messages are
    -- not undone.
    canceled_at  timestamptz,
    -- Messages that this filter matches are not replayed: the consumer has processed them before its filter changed.
    former_included text,
    former_excluded text
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

-- ---- 9. Confidential messages

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
-- a message by it, so that its status there is `discarded` and not `sent`. The marker must match `pillarbox::log::BLANKED`.
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

-- ---- 10. Maintenance

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
        -- A day that already has rows in the overflow stays there: moving them would block every post.
        continue when exists (select from pillarbox.log_overflow where at >= day and at < day + 1);
        execute format('create table pillarbox.%I (like pillarbox.log including defaults including constraints)', name);
        execute format('alter table pillarbox.log attach partition pillarbox.%I for values from (%L) to (%L)',
            name, day::timestamptz, (day + 1)::timestamptz);
        made := made + 1;
    end loop;
    return made;
end
$$;

-- Creates the partitions of `position`, `unrouted` and `inbox` in the same way.
create function pillarbox.make_reader_partitions(days integer) returns integer
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

select pillarbox.make_log_partitions(7);
select pillarbox.make_reader_partitions(7);

-- The start of yesterday in UTC, by the database's clock. Maintenance deletes nothing from this time on, whatever its
-- settings, its arguments and the clocks of processes are.
create function pillarbox.yesterday() returns timestamptz
language sql stable parallel safe
as $$
    select (date_trunc('day', now() at time zone 'UTC') - interval '1 day') at time zone 'UTC'
$$;

-- Drops the partition of one day, of a table of any schema. Fails if the day is yesterday or later, so that no caller can
-- drop data in use. The name of a partition ends with its day.
create function pillarbox.drop_day(parent regclass, partition regclass) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    target record;
begin
    select to_date(right(child.relname, 8), 'YYYYMMDD')::timestamp at time zone 'UTC' as day,
           nspname as schema, child.relname as child, whole.relname as whole
    into target
    from pg_inherits join pg_class as child on child.oid = inhrelid join pg_class as whole on whole.oid = inhparent
         join pg_namespace on pg_namespace.oid = child.relnamespace and pg_namespace.oid = whole.relnamespace
    where child.oid = partition and whole.oid = parent and child.relname ~ '_[0-9]{8}$';
    if target is null then
        raise exception '% is not the partition of a day of %', partition, parent using errcode = 'invalid_parameter_value';
    end if;
    if target.day >= pillarbox.yesterday() then
        raise exception '% is in use: only days before yesterday (UTC) are dropped', partition
            using errcode = 'invalid_parameter_value',
                  hint = 'Check the clock of the database server, and the settings of retention.';
    end if;
    execute format('alter table %I.%I detach partition %I.%I', target.schema, target.whole, target.schema, target.child);
    execute format('drop table %I.%I', target.schema, target.child);
end
$$;

-- ---- 11. Idempotency

-- Responses to HTTP requests, by the Idempotency-Key that the caller chose. A row commits together with the effect of
-- its request, so a crash leaves both or neither.
create table pillarbox.idempotency (
    -- Digest of the scope (the caller) and the key: 16 bytes cost a third less than the texts.
    id          bytea       primary key check (octet_length(id) = 16),
    -- Digest of method, path and body. The same key with a different request is an error of the caller.
    fingerprint bytea       not null check (octet_length(fingerprint) = 16),
    status      smallint    not null,
    -- A response that contains a secret is not stored: a repeat gets a problem that says so.
    body        bytea       not null,
    expires_at  timestamptz not null
);

create index idempotency_expires_at on pillarbox.idempotency (expires_at);

-- ---- 12. Status view

-- The status of each message for each consumer whose filter it matches: pending, sent (and when), unrouted, parked (and when it is
-- retried; null: it waits for an earlier message of its key), dead or discarded. An id that a producer chooses is free again when
-- nothing refers to it any more, so what is stored about an earlier message with the same id is not shown for this one.
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

-- ---- 13. Rights

-- Producers may call `post` and `notify`, and nothing else: a function is executable by PUBLIC unless that is revoked. Roles
-- belong to the cluster, so another database may have created this one already. If the migrating role may not create roles, the
-- operator creates pillarbox_producer and grants it the same privileges.
revoke execute on all functions in schema pillarbox from public;
do $$
declare
    posting regprocedure;
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
        for posting in
            select oid from pg_proc where pronamespace = 'pillarbox'::regnamespace and proname in ('post', 'notify')
        loop
            execute format('grant execute on function %s to pillarbox_producer', posting);
        end loop;
    end if;
end
$$;
