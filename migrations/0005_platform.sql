-- schema: pillarbox_platform
-- What belongs to the installation itself: its API keys, and the secret key that it runs with.
create schema pillarbox_platform;

create table pillarbox_platform.api_key (
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
create index api_key_tenant_id on pillarbox_platform.api_key (tenant, id desc);

-- A single row. A replica with a different secret key would reject the tokens and page cursors of the other replicas,
-- so it compares the fingerprint when it starts.
create table pillarbox_platform.installation (
    one                    boolean primary key default true check (one),
    secret_key_fingerprint text        not null,
    created_at             timestamptz not null
);
