-- schema: pillarbox
-- Payloads that are nested too deeply. PostgreSQL reads JSON with recursion, and how deep it can go depends on the statement: it
-- stored a payload with thousands of levels that no later statement could read any more, so its consumer failed for ever.
-- The limit is what serde_json reads, with which the consumers and the filters of Pillarbox read payloads.

-- Whether arrays and objects are nested deeper than this.
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
revoke all on function pillarbox.is_nested_deeper(json, integer) from public;

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
        -- Not the headers: a repetition may belong to another trace. As jsonb, so that spaces and the order of fields do not
        -- matter.
        begin
            content := sha256(convert_to(
                jsonb_build_array(key, aggregate_type, aggregate_id, payload::jsonb)::text, 'UTF8'));
        exception when numeric_value_out_of_range then
            -- JSON has larger numbers than jsonb.
            content := sha256(convert_to(json_build_array(key, aggregate_type, aggregate_id, payload)::text, 'UTF8'));
        end;
        loop
            insert into pillarbox.chosen_id (message_id, tenant, topic, digest)
            values (posted_id, tenant, topic, content) on conflict do nothing;
            exit when found;
            select chosen.tenant, chosen.topic, chosen.digest into first from pillarbox.chosen_id as chosen
            where chosen.message_id = posted_id;
            -- Retention has removed the id since the insert, so it is free again. Without a row there is no message, either.
            continue when not found;
            if first.tenant <> tenant or first.topic <> topic then
                raise exception 'message_id % was posted before with the topic % in the tenant %: choose another id for '
                    'another message', posted_id, first.topic, first.tenant using errcode = 'invalid_parameter_value';
            end if;
            -- The previous version stored the digest of the text.
            if first.digest <> content and first.digest <> sha256(convert_to(
                json_build_array(key, aggregate_type, aggregate_id, payload)::text, 'UTF8')) then
                raise exception 'message_id % was posted before with another payload, key or aggregate: choose another id '
                    'for another message, or repeat the same arguments', posted_id using errcode = 'invalid_parameter_value';
            end if;
            return posted_id;
        end loop;
    end if;
    insert into pillarbox.log (shard, message_id, source, tenant, topic, key, aggregate_type, aggregate_id, headers, payload)
    values (pillarbox.shard_of(tenant, coalesce(key, posted_id::text)), posted_id, 'sql', tenant, topic,
        key, aggregate_type,
        case when aggregate_id ~ '^(0|-?[1-9][0-9]{0,17})$' then aggregate_id::json else to_json(aggregate_id) end,
        coalesce(headers, '{}'), payload);
    return posted_id;
end
$$;

-- Posts a business event in the transaction of the caller. The implementation for all types of payloads. With an event_id, a
-- second post with the same id is no message and returns the same message id; it waits for the transaction of the first one,
-- and posts the message if that rolls back.
create or replace function pillarbox.notify(
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
