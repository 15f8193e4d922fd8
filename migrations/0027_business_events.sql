-- schema: pillarbox
-- Business events: what other applications tell about a restaurant, a customer and so on, posted in their own transactions.
-- The notify service turns them into notifications.

-- ---- 1. Aggregate types

-- What business events can be about. Each type has a queue on RabbitMQ and a listener. Operators add types. The table is in
-- this schema because `notify` below reads it, in every database that posts events.
create table pillarbox.aggregate_type (
    name       text        primary key check (name ~ '^[A-Z][A-Z0-9_]{0,49}$')
        -- The listener of a type is the consumer `notify.<type>`; these names belong to other consumers of the service.
        constraint aggregate_type_reserved check (name not in ('MAIL', 'ACCOUNTS', 'CONTACTS', 'EVENTS', 'PEOPLE')),
    created_at timestamptz not null default clock_timestamp()
);
insert into pillarbox.aggregate_type (name) values ('RESTAURANT'), ('CUSTOMER'), ('AGENCY'), ('ADMIN');

-- ---- 2. notify

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

-- Posts a business event in the transaction of the caller. The implementation for all types of payloads. With an event_id, a
-- second post with the same id is no message and returns the same message id; it waits for the transaction of the first one,
-- and posts the message if that rolls back.
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
    -- Rejects escapes of NUL and of lone surrogates, as `post` does.
    if position('\u' in payload::text) > 0 then
        perform payload::jsonb;
    end if;
    if jsonb_typeof(more) <> 'object' or octet_length(more::text) > 16384
       or exists (select from jsonb_each(more) header where jsonb_typeof(header.value) <> 'string') then
        raise exception 'headers must be a JSON object of at most 16384 bytes with strings as values'
            using errcode = 'invalid_parameter_value';
    end if;
    more := more - 'source_event_id';
    if event_id is not null then
        -- Consumers get the id as the producer knows it, too.
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
            -- Retention has removed the id since the insert, so it is free again. Without a row there is no message, either.
            continue when not found;
            if first.tenant <> 'main' or first.topic <> event_type or first.digest is distinct from content then
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

-- The functions below only pass their arguments on. They have no rights of their own.

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

-- Producers may post business events, and nobody else. Where the installation may not create roles, the operator creates
-- pillarbox_producer and grants it the same privileges.
revoke all on function pillarbox.notify(text, text, bigint, json, text, text, jsonb) from public;
revoke all on function pillarbox.notify(text, text, bigint, jsonb, text, text, jsonb) from public;
revoke all on function pillarbox.notify(text, text, bigint, text, text, text, jsonb) from public;
do $$
begin
    if exists (select from pg_roles where rolname = 'pillarbox_producer') then
        grant execute on function pillarbox.notify(text, text, bigint, json, text, text, jsonb) to pillarbox_producer;
        grant execute on function pillarbox.notify(text, text, bigint, jsonb, text, text, jsonb) to pillarbox_producer;
        grant execute on function pillarbox.notify(text, text, bigint, text, text, text, jsonb) to pillarbox_producer;
    end if;
end
$$;
