-- schema: pillarbox
-- Requests that were answered, by the key that their caller chose. A row commits with the effect that it answers for, so a
-- crash leaves neither or both.
create table pillarbox.idempotency (
    -- Digest of scope (who called) and key: 16 bytes cost a third less than the texts.
    id          bytea       primary key check (octet_length(id) = 16),
    -- Of method, address and body: the same key for another request is a mistake of the caller.
    fingerprint bytea       not null check (octet_length(fingerprint) = 16),
    status      smallint    not null,
    -- Null when the answer carried a secret, which is not kept.
    body        bytea,
    expires_at  timestamptz not null
);

create index idempotency_expires_at on pillarbox.idempotency (expires_at);
