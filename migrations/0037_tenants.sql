-- schema: pillarbox
-- Tenants: who may post and receive. A post in SQL for a tenant that does not exist is refused, because a misspelled name must
-- not become a tenant that nobody reads.

-- ---- 1. Tenants

-- The table is in this schema because `post` below reads it, in every database with a log. `main` always exists.
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
    -- Set when the tenant is deleted. The row stays until the log has none of its messages any more, and so long its name
    -- cannot be used again: a new tenant of this name would see the messages of the former one.
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

-- Tenants that have posted before this version exist. A scan of the log, once.
insert into pillarbox.tenant (name) select distinct tenant from pillarbox.log on conflict do nothing;

-- ---- 2. What `post` checks in tables

-- Refuses a post in SQL that its tenant may not make. A function of its own, so that later versions can replace it without
-- repeating `post`.
create function pillarbox.check_post(tenant text, topic text, payload json) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    bytes_max integer;
begin
    -- Without a lock of the row: all posts of a tenant would share it. Nor is a suspended tenant refused here: a business
    -- transaction must not fail because of it. Its messages wait until it is resumed.
    select payload_bytes_max into bytes_max from pillarbox.tenant as known
    where known.name = check_post.tenant and known.deleted_at is null;
    if not found then
        raise exception 'tenant % does not exist', quote_literal(tenant)
            using errcode = 'foreign_key_violation',
                  hint = 'Check the spelling, or create it with POST /admin/v1/tenants or `pillarbox tenants create`.';
    end if;
    if octet_length(payload::text) > bytes_max then
        raise exception 'payload has % bytes; the tenant % may post at most %', octet_length(payload::text),
            quote_literal(tenant), bytes_max using errcode = 'invalid_parameter_value';
    end if;
end
$$;

revoke all on function pillarbox.check_post from public;

-- ---- 3. post

-- As before, but it calls `check_post`.
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
    perform pillarbox.check_post(tenant, topic, payload);
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
