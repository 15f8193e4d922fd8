-- no-transaction
-- schema: pillarbox_notify
-- Versions of preferences, and the address at which the recipient of an e-mail unsubscribes.

-- The preferences of a user as a whole. Its row is locked by every change, and its version is the ETag.
create table if not exists pillarbox_notify.preference_set (
    user_id    uuid        primary key,
    version    bigint      not null,
    changed_at timestamptz not null
);

-- Null for e-mails that cannot be muted.
alter table pillarbox_notify.mail add column if not exists unsubscribe text;

-- The e-mails that are sent before those of notifications, such as password resets.
drop index concurrently if exists pillarbox_notify.due_before_notifications;
create index concurrently due_before_notifications on pillarbox_notify.mail (next_attempt_at)
    where status = 'queued' and source <> 'notify';
