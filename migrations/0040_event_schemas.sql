-- schema: pillarbox
-- Posts in SQL are checked against the event types of their tenant, and types of the hub itself are reserved.

-- ---- 1. What is checked

-- The tenants with a catalogue of event types. The hub writes these two tables together with its catalogue. They are in this
-- schema because `check_post` reads them, in every database with a log.
create table pillarbox.event_rule (
    tenant          text    primary key,
    -- Whether a post with a topic that is not in event_schema is refused.
    refuses_unknown boolean not null,
    -- Whether the posts of tenants without a rule are checked in the same way.
    is_shared       boolean not null,
    check (not is_shared or tenant = 'main')
);

create table pillarbox.event_schema (
    tenant text  not null,
    topic  text  not null,
    -- A JSON Schema without references and annotations, with patterns in the syntax of PostgreSQL. Null: every payload is
    -- accepted.
    schema jsonb,
    primary key (tenant, topic)
);

-- ---- 2. The validator

-- A name as a part of a JSON pointer.
create function pillarbox.pointer_part(name text) returns text
language sql immutable parallel safe
as $$ select '/' || replace(replace(name, '~', '~0'), '/', '~1') $$;

-- Returns where and why a value does not match a schema, or null if it does. The keywords are those that the hub accepts in a
-- schema; it has replaced references and removed annotations. The schema is not recursive, so neither is the depth of the calls
-- unbounded. It relies on the search path of `check_post`.
create function pillarbox.schema_error(rules jsonb, checked jsonb, pointer text) returns text
language plpgsql immutable parallel safe
as $$
declare
    kind    text := jsonb_typeof(checked);
    keyword text;
    rule    jsonb;
    part    text;
    item    jsonb;
    error   text;
    matches integer;
    first   integer;
begin
    if jsonb_typeof(rules) = 'boolean' then
        return case when rules = 'false' then pointer || ': is not accepted here' end;
    end if;
    for keyword, rule in select each.key, each.value from jsonb_each(rules) as each loop
        error := null;
        case keyword
        -- Any checked
        when 'type' then
            if not (rule ? kind or rule = to_jsonb(kind) or (kind = 'number' and trunc(checked::numeric) = checked::numeric
                    and (rule ? 'integer' or rule = '"integer"'))) then
                error := 'must be of type ' || case jsonb_typeof(rule) when 'array'
                    then (select string_agg(one, ' or ') from jsonb_array_elements_text(rule) as one) else rule #>> '{}' end;
            end if;
        when 'enum' then
            if not exists (select from jsonb_array_elements(rule) as one where one = checked) then
                error := 'must be one of ' || left(rule::text, 500);
            end if;
        when 'const' then
            if checked <> rule then
                error := 'must be ' || left(rule::text, 500);
            end if;
        when 'allOf' then
            for item in select one from jsonb_array_elements(rule) as one loop
                error := pillarbox.schema_error(item, checked, pointer);
                if error is not null then
                    return error;
                end if;
            end loop;
        when 'anyOf' then
            if not exists (select from jsonb_array_elements(rule) as one
                           where pillarbox.schema_error(one, checked, pointer) is null) then
                error := 'must match at least one of the schemas in `anyOf`';
            end if;
        when 'oneOf' then
            select count(*) into matches from jsonb_array_elements(rule) as one
            where pillarbox.schema_error(one, checked, pointer) is null;
            if matches <> 1 then
                error := 'must match one of the schemas in `oneOf`, and matches ' || matches;
            end if;
        when 'not' then
            if pillarbox.schema_error(rule, checked, pointer) is null then
                error := 'must not match the schema in `not`';
            end if;
        when 'if' then
            item := case when pillarbox.schema_error(rule, checked, pointer) is null then rules -> 'then' else rules -> 'else' end;
            if item is not null then
                error := pillarbox.schema_error(item, checked, pointer);
                if error is not null then
                    return error;
                end if;
            end if;
        -- Numbers
        when 'minimum' then
            if kind = 'number' and checked::numeric < rule::numeric then
                error := 'must be at least ' || rule::text;
            end if;
        when 'maximum' then
            if kind = 'number' and checked::numeric > rule::numeric then
                error := 'must be at most ' || rule::text;
            end if;
        when 'exclusiveMinimum' then
            if kind = 'number' and checked::numeric <= rule::numeric then
                error := 'must be greater than ' || rule::text;
            end if;
        when 'exclusiveMaximum' then
            if kind = 'number' and checked::numeric >= rule::numeric then
                error := 'must be less than ' || rule::text;
            end if;
        when 'multipleOf' then
            if kind = 'number' and checked::numeric % rule::numeric <> 0 then
                error := 'must be a multiple of ' || rule::text;
            end if;
        -- Texts
        when 'minLength' then
            if kind = 'string' and length(checked #>> '{}') < rule::numeric then
                error := 'must have at least ' || rule::text || ' characters';
            end if;
        when 'maxLength' then
            if kind = 'string' and length(checked #>> '{}') > rule::numeric then
                error := 'must have at most ' || rule::text || ' characters';
            end if;
        when 'pattern' then
            if kind = 'string' and (checked #>> '{}') !~ (rule #>> '{}') then
                error := 'must match the pattern of the schema';
            end if;
        -- Lists
        when 'minItems' then
            if kind = 'array' and jsonb_array_length(checked) < rule::numeric then
                error := 'must have at least ' || rule::text || ' items';
            end if;
        when 'maxItems' then
            if kind = 'array' and jsonb_array_length(checked) > rule::numeric then
                error := 'must have at most ' || rule::text || ' items';
            end if;
        when 'uniqueItems' then
            if kind = 'array' and rule = 'true'
               and (select count(*) <> count(distinct one) from jsonb_array_elements(checked) as one) then
                error := 'must not have two equal items';
            end if;
        when 'contains' then
            if kind = 'array' and not exists (select from jsonb_array_elements(checked) as one
                                              where pillarbox.schema_error(rule, one, pointer) is null) then
                error := 'must have an item that matches `contains`';
            end if;
        when 'prefixItems' then
            if kind = 'array' then
                for at in 0 .. least(jsonb_array_length(rule), jsonb_array_length(checked)) - 1 loop
                    error := pillarbox.schema_error(rule -> at, checked -> at, pointer || '/' || at);
                    if error is not null then
                        return error;
                    end if;
                end loop;
            end if;
        when 'items' then
            if kind = 'array' then
                first := jsonb_array_length(coalesce(rules -> 'prefixItems', '[]'));
                for part, item in select ordinal - 1, one from jsonb_array_elements(checked) with ordinality as each (one, ordinal)
                                  where ordinal > first loop
                    error := pillarbox.schema_error(rule, item, pointer || '/' || part);
                    if error is not null then
                        return error;
                    end if;
                end loop;
            end if;
        -- Objects
        when 'required' then
            if kind = 'object' then
                select one into part from jsonb_array_elements_text(rule) as one where not checked ? one limit 1;
                if found then
                    error := 'must have the property ' || to_jsonb(part)::text;
                end if;
            end if;
        when 'minProperties' then
            if kind = 'object' and (select count(*) from jsonb_object_keys(checked)) < rule::numeric then
                error := 'must have at least ' || rule::text || ' properties';
            end if;
        when 'maxProperties' then
            if kind = 'object' and (select count(*) from jsonb_object_keys(checked)) > rule::numeric then
                error := 'must have at most ' || rule::text || ' properties';
            end if;
        when 'dependentRequired' then
            if kind = 'object' then
                select one into part from jsonb_each(rule) as each, jsonb_array_elements_text(each.value) as one
                where checked ? each.key and not checked ? one limit 1;
                if found then
                    error := 'must have the property ' || to_jsonb(part)::text;
                end if;
            end if;
        when 'propertyNames' then
            if kind = 'object' then
                for part in select name from jsonb_object_keys(checked) as name loop
                    error := pillarbox.schema_error(rule, to_jsonb(part), pointer || pillarbox.pointer_part(part));
                    if error is not null then
                        return error;
                    end if;
                end loop;
            end if;
        when 'properties' then
            if kind = 'object' then
                for part, item in select each.key, each.value from jsonb_each(rule) as each where checked ? each.key loop
                    error := pillarbox.schema_error(item, checked -> part, pointer || pillarbox.pointer_part(part));
                    if error is not null then
                        return error;
                    end if;
                end loop;
            end if;
        when 'patternProperties' then
            if kind = 'object' then
                for part, item in select name, each.value from jsonb_each(rule) as each
                                  join jsonb_object_keys(checked) as name on name ~ each.key loop
                    error := pillarbox.schema_error(item, checked -> part, pointer || pillarbox.pointer_part(part));
                    if error is not null then
                        return error;
                    end if;
                end loop;
            end if;
        when 'additionalProperties' then
            if kind = 'object' then
                for part, item in select each.key, each.value from jsonb_each(checked) as each
                                  where not coalesce(rules -> 'properties', '{}') ? each.key
                                    and not exists (select from jsonb_object_keys(coalesce(rules -> 'patternProperties', '{}'))
                                                    as pattern where each.key ~ pattern) loop
                    if rule = 'false' then
                        return pointer || ': must not have the property ' || to_jsonb(part)::text;
                    end if;
                    error := pillarbox.schema_error(rule, item, pointer || pillarbox.pointer_part(part));
                    if error is not null then
                        return error;
                    end if;
                end loop;
            end if;
        -- `then` and `else` belong to `if`.
        else
            null;
        end case;
        if error is not null then
            return pointer || ': ' || error;
        end if;
    end loop;
    return null;
end
$$;

-- ---- 3. check_post

-- As before, but it also checks the topic and, if the tenant has a catalogue or main shares its own, the payload.
create or replace function pillarbox.check_post(tenant text, topic text, payload json) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    bytes_max integer;
    owner     text;
    refuses   boolean;
    expected  jsonb;
    error     text;
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
    if topic = 'hub' or starts_with(topic, 'hub.') then
        raise exception 'topic % is reserved: types that begin with hub. are posted by the hub itself', quote_literal(topic)
            using errcode = 'invalid_parameter_value', hint = 'Choose another name.';
    end if;
    select rule.tenant, rule.refuses_unknown into owner, refuses from pillarbox.event_rule as rule
    where rule.tenant = check_post.tenant;
    if not found then
        select rule.tenant, rule.refuses_unknown into owner, refuses from pillarbox.event_rule as rule
        where rule.tenant = 'main' and rule.is_shared;
    end if;
    -- Requests for e-mails are no events.
    if not found or topic = 'email' or starts_with(topic, 'email.') then
        return;
    end if;
    select known.schema into expected from pillarbox.event_schema as known
    where known.tenant = owner and known.topic = check_post.topic;
    if not found then
        if refuses then
            raise exception 'event type % is not in the catalogue of the tenant %', quote_literal(topic), quote_literal(owner)
                using errcode = 'invalid_parameter_value',
                      hint = case owner when tenant
                          then 'Add it with POST /hub/v1/event-types, or accept unknown types with PATCH /hub/v1/catalogue.'
                          else 'The operator adds types to the shared catalogue of the tenant main.' end;
        end if;
        return;
    end if;
    if expected is not null then
        error := pillarbox.schema_error(expected, payload::jsonb, '/payload');
        if error is not null then
            raise exception 'payload does not match the schema of the event type %: %', quote_literal(topic), error
                using errcode = 'invalid_parameter_value',
                      hint = 'GET /hub/v1/event-types/' || topic || ' shows the schema.';
        end if;
    end if;
end
$$;
