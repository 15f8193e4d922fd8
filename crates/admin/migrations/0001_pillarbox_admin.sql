-- schema: pillarbox_admin
-- The installation itself: its API keys, access to tenants, the secret key that it runs with, and rate limits that all processes
-- share.
create schema pillarbox_admin;

create table pillarbox_admin.api_key (
    id         uuid primary key,
    -- SHA-256 of the whole key. A key has at least 24 random characters, so a plain hash cannot be reversed by
    -- guessing.
    digest     bytea       not null constraint api_key_digest_unique unique check (octet_length(digest) = 32),
    -- The first characters of the key, shown in lists so that operators can tell keys apart.
    hint       text        not null,
    name       text        not null check (length(name) between 1 and 100),
    role       text        not null check (role in ('ingest', 'manage', 'admin')),
    tenant     text        not null,
    created_at timestamptz not null,
    expires_at timestamptz,
    revoked_at timestamptz
);

-- Lists show the newest key first, for one tenant or for all. Ids are UUIDs of version 7, so they sort by creation
-- time.
create index api_key_tenant_id on pillarbox_admin.api_key (tenant, id desc);

-- Short-lived tokens for the employees of one tenant. A row is deleted when the token is revoked, and some time after it
-- has expired.
create table pillarbox_admin.portal_token (
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
create index portal_token_tenant_id on pillarbox_admin.portal_token (tenant, id desc);
create index portal_token_expires_at on pillarbox_admin.portal_token (expires_at);

-- The requests that a key of the tenant `main` made for another tenant. The line of a request that changes something is
-- committed before the request is processed, so a change without a line does not exist.
create table pillarbox_admin.audit (
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
create index audit_tenant_id on pillarbox_admin.audit (tenant, id desc);
create index audit_key_id on pillarbox_admin.audit (key_id, id desc);
create index audit_at on pillarbox_admin.audit (at);

-- A single row. A replica with a different secret key would reject the tokens and page cursors of the other replicas,
-- so it compares the fingerprint when it starts.
create table pillarbox_admin.installation (
    one                    boolean primary key default true check (one),
    -- Commands compare it with the id that a server tells, so that they do not act on two installations. A restored or copied
    -- database keeps it.
    id                     uuid        not null default gen_random_uuid(),
    -- Null until the first server starts.
    secret_key_fingerprint text,
    created_at             timestamptz not null default now()
);
insert into pillarbox_admin.installation default values;

-- How many requests of a key, or events of a tenant, each process had within the last second. Each process derives its share
-- of the common limit from it. Unlogged: after a crash the rows are of no use.
create unlogged table pillarbox_admin.rate_demand (
    subject text        not null,
    process uuid        not null,
    demand  integer     not null,
    at      timestamptz not null,
    primary key (subject, process)
);
create index rate_demand_at on pillarbox_admin.rate_demand (at);
