-- schema: pillarbox_notify
-- E-mails that other services request: one row for each message of the log and recipient.
create schema pillarbox_notify;

create table pillarbox_notify.mail (
    id              bigint      generated always as identity primary key,
    -- The message of the log that requested the e-mail. It is part of the Message-ID, so a repeated e-mail has the same.
    message_id      uuid        not null,
    source          text        not null,
    idempotency_key text        not null,
    -- The user that the e-mail is for. When the account is deleted, so is the row.
    user_id         uuid,
    recipient       text        not null,
    template        text        not null,
    -- The locale that the template was rendered in, which may be a fallback.
    locale          text        not null,
    subject         text        not null,
    -- The bodies contain secrets, such as tokens. They exist only while they are needed.
    text            text,
    html            text,
    status          text        not null
        check (status in ('queued', 'sent', 'captured', 'dead', 'expired', 'shadowed')),
    attempts        integer     not null default 0,
    -- For a claimed e-mail, the end of the lease: then another process may send it.
    next_attempt_at timestamptz not null,
    claim           uuid,
    -- From this time on a failed attempt is the last one.
    give_up_at      timestamptz not null,
    -- From this time on the e-mail is of no use and is not sent.
    expires_at      timestamptz,
    last_error      text,
    smtp_reply      text,
    created_at      timestamptz not null,
    sent_at         timestamptz,
    -- A message that is processed again, by whichever consumer, makes no second e-mail. Neither does another message with
    -- the same idempotency key.
    unique (message_id, recipient),
    unique (source, idempotency_key),
    check ((status = 'sent') = (sent_at is not null)),
    check (status in ('queued', 'captured', 'dead') or (text is null and html is null)),
    check (status <> 'queued' or (text is not null and html is not null))
);

-- The queue of the sender, and the age of its oldest e-mail.
create index mail_due on pillarbox_notify.mail (next_attempt_at) where status = 'queued';
create index mail_queued_since on pillarbox_notify.mail (created_at) where status = 'queued';
-- The deletion of an account.
create index mail_user on pillarbox_notify.mail (user_id) where user_id is not null;
-- The filters of the list, and the limits of captured e-mails.
create index mail_recipient on pillarbox_notify.mail (lower(recipient), id);
create index mail_status on pillarbox_notify.mail (status, id);
create index mail_template on pillarbox_notify.mail (template, id);
-- Retention.
create index mail_created on pillarbox_notify.mail (created_at) where status <> 'queued';
create index mail_dead_until on pillarbox_notify.mail (expires_at)
    where status in ('queued', 'dead') and text is not null;

-- Deleted accounts, by their ids only. A request that was posted before the deletion and is processed after it, such as a
-- retried dead letter, makes no e-mail. A row is deleted when no such request is expected any more.
create table pillarbox_notify.deleted_account (
    user_id    uuid        primary key,
    deleted_at timestamptz not null
);

-- The accounts that were deleted recently, and those that can be forgotten.
create index deleted_account_at on pillarbox_notify.deleted_account (deleted_at);
