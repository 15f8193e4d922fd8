-- schema: pillarbox
-- Posts of tenants without a catalogue are checked against the shared one of the tenant main, if it is shared.

alter table pillarbox.event_rule
    add column is_shared boolean not null default false,
    add constraint event_rule_shared_check check (not is_shared or tenant = 'main');

-- As before, but a tenant without a catalogue uses the shared one.
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
                      hint = 'Add it with POST /hub/v1/event-types, or accept unknown types with PATCH /hub/v1/catalogue.';
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
