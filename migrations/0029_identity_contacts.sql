-- no-transaction
-- schema: pillarbox_identity
-- Verified accounts are announced to the notify service, those that exist already, too.

-- The version of the account in the last message `account.contact_changed`; 0: there was none. The previous version of the
-- program changes accounts without such a message: a worker announces what it has changed.
alter table pillarbox_identity.account add column if not exists announced_version bigint not null default 0;

drop index concurrently if exists pillarbox_identity.account_unannounced;
create index concurrently account_unannounced on pillarbox_identity.account (id)
    where verified_at is not null and announced_version < version;
