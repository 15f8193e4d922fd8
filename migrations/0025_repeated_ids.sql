-- schema: pillarbox
-- Repeated message ids that producers choose: the content is compared as JSON and not as text, and an id that retention removes
-- at the same time is posted again.

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
