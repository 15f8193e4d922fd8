-- schema: pillarbox_platform
-- Access to tenants: portal tokens, what operators did for tenants, and rate limits that all processes share.

-- When the tenants of API keys, subscribers and recipients of notifications were adopted, which existed before tenants had
-- rows of their own. Null: not yet; the next start or `pillarbox migrate` does it.
alter table pillarbox_platform.installation add column tenants_adopted_at timestamptz;

-- Short-lived tokens for the employees of one tenant. A row is deleted when the token is revoked, and some time after it
-- has expired.
create table pillarbox_platform.portal_token (
    id         uuid        primary key,
    -- SHA-256 of the whole token, as for API keys.
    digest     bytea       not null constraint portal_token_digest_unique unique check (octet_length(digest) = 32),
    tenant     text        not null,
    access     text        not null check (access in ('read', 'manage')),
    name       text        check (length(name) between 1 and 100),
    -- The principal that created it, such as `key:<id>`.
    created_by text        not null,
    created_at timestamptz not null,
    expires_at timestamptz not null
);
create index portal_token_tenant_id on pillarbox_platform.portal_token (tenant, id desc);
create index portal_token_expires_at on pillarbox_platform.portal_token (expires_at);

-- The requests that a key of the tenant `main` made for another tenant. The line of a request that changes something is
-- committed before the request is processed, so a change without a line does not exist.
create table pillarbox_platform.audit (
    id       uuid        primary key,
    at       timestamptz not null,
    key_id   uuid        not null,
    tenant   text        not null,
    method   text        not null,
    -- The pattern of the route, without the ids of the request.
    route    text        not null,
    -- Null: the process ended before it recorded the response.
    status   smallint,
    trace_id text        not null
);
-- Lists show the newest line first, of one tenant, of one key, or all. Ids are UUIDs of version 7.
create index audit_tenant_id on pillarbox_platform.audit (tenant, id desc);
create index audit_key_id on pillarbox_platform.audit (key_id, id desc);
create index audit_at on pillarbox_platform.audit (at);

-- How many requests of a key, or events of a tenant, each process had within the last second. Each process derives its share
-- of the common limit from it. Unlogged: after a crash the rows are of no use.
create unlogged table pillarbox_platform.rate_demand (
    subject text        not null,
    process uuid        not null,
    demand  integer     not null,
    at      timestamptz not null,
    primary key (subject, process)
);
create index rate_demand_at on pillarbox_platform.rate_demand (at);
