-- schema: pillarbox_identity
-- Accounts of users, their sessions, and their subscriptions to paid plans. No table contains a password or a token: of
-- tokens only the SHA-256 is stored, and of passwords the Argon2id hash.
create schema pillarbox_identity;

-- The collation "C" makes one index serve equality and prefixes.
create table pillarbox_identity.account (
    id            uuid        primary key,
    -- Normalised: in lower case, so that one address has one account.
    email         text        collate "C" not null,
    name          text        not null,
    locale        text        not null,
    role          text        not null default 'user' check (role in ('user', 'admin')),
    -- A PHC string with its own parameters.
    password_hash text        not null,
    -- The address was registered more than once before it was verified, so it is not known whose password counts: no
    -- password matches the hash until the user sets one with a token of an e-mail.
    needs_password boolean    not null default false,
    -- Null until the user has proved to read the address.
    verified_at   timestamptz,
    created_at    timestamptz not null,
    updated_at    timestamptz not null,
    version       bigint      not null default 1,
    -- The version of the account in the last message `account.contact_changed`; 0: there was none.
    announced_version bigint  not null default 0,
    constraint account_email_unique unique (email)
);
create index account_unverified on pillarbox_identity.account (created_at) where verified_at is null;
create index account_unannounced on pillarbox_identity.account (id)
    where verified_at is not null and announced_version < version;

-- A user who has signed in, on one device. All refresh tokens of a session are one family.
create table pillarbox_identity.session (
    id           uuid        primary key,
    user_id      uuid        not null references pillarbox_identity.account on delete cascade,
    -- What the client calls itself, so that users recognise their devices.
    user_agent   text,
    created_at   timestamptz not null,
    last_used_at timestamptz not null,
    -- The session ends then, however often it is used.
    expires_at   timestamptz not null
);
create index session_of_user on pillarbox_identity.session (user_id, created_at, id);
create index session_expiry on pillarbox_identity.session (expires_at);

-- The current refresh token of a session and the latest replaced ones: presenting one of them again reveals a theft.
create table pillarbox_identity.refresh_token (
    digest      bytea       primary key check (length(digest) = 32),
    session_id  uuid        not null references pillarbox_identity.session on delete cascade,
    -- The token that was presented for this one; null for the first one of the session.
    parent      bytea,
    expires_at  timestamptz not null,
    -- When it was exchanged for another one, or another one was issued in its stead; null for the current one.
    replaced_at timestamptz
);
create unique index refresh_token_current on pillarbox_identity.refresh_token (session_id) where replaced_at is null;
create index refresh_token_session on pillarbox_identity.refresh_token (session_id, replaced_at);
-- Replaced tokens stay until their session ends.
create index refresh_token_expiry on pillarbox_identity.refresh_token (expires_at) where replaced_at is null;

-- Tokens that are sent by e-mail. A new one replaces the previous one of its kind.
create table pillarbox_identity.one_time_token (
    user_id    uuid        not null references pillarbox_identity.account on delete cascade,
    kind       text        not null check (kind in ('verification', 'password_reset')),
    digest     bytea       not null unique check (length(digest) = 32),
    expires_at timestamptz not null,
    primary key (user_id, kind)
);
create index one_time_token_expiry on pillarbox_identity.one_time_token (expires_at);

-- Requests that were accepted and are processed after their answer. Whether the address has an account is found out only
-- then, so neither the answer nor its time reveals it. A row is deleted when it has been processed.
create table pillarbox_identity.accepted_request (
    id            uuid        primary key,
    kind          text        not null check (kind in ('registration', 'verification', 'password_reset')),
    email         text        collate "C" not null,
    -- Of a registration only.
    name          text,
    locale        text,
    password_hash text,
    accepted_at   timestamptz not null,
    due_at        timestamptz not null,
    constraint accepted_request_registration check (
        (kind = 'registration') = (name is not null and locale is not null and password_hash is not null))
);
create index accepted_request_due on pillarbox_identity.accepted_request (due_at);
create index accepted_request_email on pillarbox_identity.accepted_request (email);

-- The networks from which a user has signed in. Failures from elsewhere do not lock the user out there.
create table pillarbox_identity.known_network (
    user_id      uuid        not null references pillarbox_identity.account on delete cascade,
    -- A keyed digest of the network.
    network      bytea       not null,
    last_used_at timestamptz not null,
    primary key (user_id, network)
);
create index known_network_expiry on pillarbox_identity.known_network (last_used_at);

-- Counts of attempts, shared by all processes. The subject is a keyed digest of an address, a user or a network.
create table pillarbox_identity.throttle (
    kind       text    not null,
    subject    bytea   not null,
    -- The number of the window since 1970. Two adjacent windows give a sliding one.
    window_no  bigint  not null,
    attempts   integer not null,
    expires_at timestamptz not null,
    primary key (kind, subject, window_no)
);
create index throttle_expiry on pillarbox_identity.throttle (expires_at);

create table pillarbox_identity.subscription (
    id         uuid        primary key,
    user_id    uuid        not null references pillarbox_identity.account on delete cascade,
    plan       text        not null,
    status     text        not null check (status in ('trialing', 'active', 'past_due', 'paused', 'cancelled', 'expired')),
    created_at timestamptz not null,
    updated_at timestamptz not null,
    -- When it was cancelled or has expired.
    ended_at   timestamptz,
    version    bigint      not null default 1,
    constraint subscription_ended check ((ended_at is not null) = (status in ('cancelled', 'expired')))
);
create index subscription_user on pillarbox_identity.subscription (user_id, created_at, id);
-- One live subscription for each user and plan.
create unique index subscription_live on pillarbox_identity.subscription (user_id, plan)
    where status not in ('cancelled', 'expired');

-- What operators and users have done with accounts. It outlives the account, so it contains ids only.
create table pillarbox_identity.audit (
    id      bigint      generated always as identity primary key,
    at      timestamptz not null,
    user_id uuid        not null,
    action  text        not null check (action in ('deleted', 'expired', 'role_granted', 'role_withdrawn')),
    -- `user:<id>` or `key:<id>`; `command` for the command line, `system` if time passed.
    actor   text        not null
);
create index audit_user on pillarbox_identity.audit (user_id, id);
