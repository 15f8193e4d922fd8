-- schema: pillarbox_platform
-- What the installation itself owns: who may call, and which secret it runs with.
create schema pillarbox_platform;

create table pillarbox_platform.api_key (
    id         uuid primary key,
    -- Of the whole key. The key has at least 24 random characters, so a plain SHA-256 cannot be guessed back.
    digest     bytea       not null constraint api_key_digest_unique unique check (octet_length(digest) = 32),
    -- The first characters, by which people tell keys apart.
    hint       text        not null,
    name       text        not null check (length(name) between 1 and 100),
    role       text        not null check (role in ('ingest', 'manage', 'admin')),
    tenant     text        not null,
    created_at timestamptz not null,
    expires_at timestamptz,
    revoked_at timestamptz
);

-- Lists are newest first, of one tenant or of all; ids are version 7, so they order by time.
create index api_key_tenant_id on pillarbox_platform.api_key (tenant, id desc);

-- One row: replicas that run with another secret key would refuse each other's tokens and cursors.
create table pillarbox_platform.installation (
    one                    boolean primary key default true check (one),
    secret_key_fingerprint text        not null,
    created_at             timestamptz not null
);
