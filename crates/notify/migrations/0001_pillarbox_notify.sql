-- schema: pillarbox_notify
-- E-mails that other services request, and notifications: business events, the people behind them, what they want to hear of, and
-- one notification for each event, person and channel.
create schema pillarbox_notify;

-- ---- 1. E-mails

-- One row for each message of the log and recipient.
create table pillarbox_notify.mail (
    id              bigint      generated always as identity primary key,
    -- The message of the log that requested the e-mail. It is part of the Message-ID, so a repeated e-mail has the same.
    message_id      uuid        not null,
    source          text        not null,
    idempotency_key text        not null,
    -- The user that the e-mail is for. When the account is deleted, so is the row.
    user_id         uuid,
    recipient       text        not null,
    -- The address at which the recipient unsubscribes; null for e-mails that cannot be muted.
    unsubscribe     text,
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
    -- The senders of notifications take turns: their e-mails are sent in the order of `turn`. Null for the e-mails of other
    -- services.
    sender          text,
    turn            bigint      not null default 0,
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
-- The e-mails that are sent before those of notifications, such as password resets.
create index due_before_notifications on pillarbox_notify.mail (next_attempt_at)
    where status = 'queued' and source <> 'notify';
create index email_turn on pillarbox_notify.mail (turn, id)
    where status = 'queued' and source = 'notify' and claim is null and attempts = 0;
create index email_turn_of_sender on pillarbox_notify.mail (sender, turn)
    where status = 'queued' and source = 'notify' and claim is null and attempts = 0;
-- Those that were tried before, or whose claim may have ended.
create index email_repeated on pillarbox_notify.mail (next_attempt_at)
    where status = 'queued' and source = 'notify' and (claim is not null or attempts > 0);
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

-- ---- 2. Business events

-- How the events of a type are delivered, where that differs from the defaults in the settings.
create table pillarbox_notify.event_type (
    name           text    primary key,
    -- A critical event cannot be muted, and it does not wait for the end of quiet hours or for a digest.
    critical       boolean not null default false,
    -- Null: the default of the settings.
    channels       text[]  check (channels <@ array['email', 'in_app', 'webhook']),
    digest_minutes integer check (digest_minutes between 0 and 10080),
    version        bigint      not null default 1,
    changed_at     timestamptz not null default clock_timestamp()
);

-- Events with at least one notification. Their text is rendered from the payload when it is read or sent.
create table pillarbox_notify.business_event (
    -- The message of the log.
    id             uuid        primary key,
    event_type     text        not null,
    aggregate_type text,
    aggregate_id   bigint,
    payload        json        not null,
    at             timestamptz not null
);
create index business_event_at on pillarbox_notify.business_event (at);
-- Operators search notifications by the type of their event. Without it, a search for a rare type would read all notifications.
create index business_event_type on pillarbox_notify.business_event (event_type, id);

-- ---- 3. People

-- The users behind an aggregate.
create table pillarbox_notify.recipient (
    aggregate_type text   not null,
    -- Null: every aggregate of the type, as for admins.
    aggregate_id   bigint,
    user_id        uuid   not null,
    unique nulls not distinct (aggregate_type, aggregate_id, user_id)
);
create index recipient_user on pillarbox_notify.recipient (user_id);

-- How to reach a user: from the messages of identity, or imported for users of other issuers.
create table pillarbox_notify.contact (
    user_id uuid   primary key,
    email   text,
    name    text   not null default '',
    locale  text   not null default 'en',
    -- The tenant of the hub whose subscribers get the user's webhooks.
    tenant  text,
    -- The version of the account; a message with a lower one is late. 0 for an import.
    version bigint not null default 0
);

-- What a user wants to hear of, and how. The most specific row decides: type and channel, type, channel, neither.
create table pillarbox_notify.preference (
    user_id    uuid    not null,
    -- Empty: all types.
    event_type text    not null default '',
    -- Empty: all channels.
    channel    text    not null default '' check (channel in ('', 'email', 'in_app', 'webhook')),
    enabled    boolean not null,
    primary key (user_id, event_type, channel)
);

-- The preferences of a user as a whole. Its row is locked by every change, and its version is the ETag.
create table pillarbox_notify.preference_set (
    user_id    uuid        primary key,
    version    bigint      not null,
    changed_at timestamptz not null
);

-- When a user wants no e-mails: from quiet_from to quiet_until, local time, across midnight if it is the later one.
create table pillarbox_notify.quiet_hours (
    user_id     uuid primary key,
    -- IANA name.
    time_zone   text not null,
    quiet_from  time not null,
    quiet_until time not null
);

-- ---- 4. Notifications

create table pillarbox_notify.notification (
    id          bigint      generated always as identity primary key,
    event_id    uuid        not null,
    user_id     uuid        not null,
    channel     text        not null check (channel in ('email', 'in_app', 'webhook')),
    -- waiting: to be delivered at due_at. skipped: it could not be delivered or was no longer wanted, such as an e-mail to
    -- a user without an address.
    status      text        not null check (status in ('waiting', 'delivered', 'dead', 'skipped')),
    due_at      timestamptz,
    attempts    integer     not null default 0,
    -- The cause of an e-mail that the recipient does not wait for, such as an organizer; null: the recipient.
    sender      text,
    last_error  text,
    -- The number in the inbox of the user, without a gap. Assigned under the lock of the row in `inbox`, so a higher number
    -- never becomes visible before a lower one.
    seq         bigint,
    read_at     timestamptz,
    archived_at timestamptz,
    created_at  timestamptz not null,
    -- One notification for each event, person and channel, however often the event is processed.
    unique (event_id, user_id, channel),
    check ((channel = 'in_app') = (seq is not null)),
    check ((status = 'waiting') = (due_at is not null))
);
create unique index notification_inbox on pillarbox_notify.notification (user_id, seq) where channel = 'in_app';
create index notification_due on pillarbox_notify.notification (due_at, id) where status = 'waiting';
-- The notifications that the recipient may wait for: every second transaction delivers these first.
create index notification_due_direct on pillarbox_notify.notification (due_at, id)
    where status = 'waiting' and sender is null;
-- The lists of unread and of archived notifications.
create index notification_unread on pillarbox_notify.notification (user_id, seq)
    where channel = 'in_app' and read_at is null;
create index notification_archived on pillarbox_notify.notification (user_id, seq)
    where channel = 'in_app' and archived_at is not null;
create index notification_status on pillarbox_notify.notification (status, id) where status in ('dead', 'skipped');
-- The e-mails that a digest collects, and the webhooks of a user in their order.
create index notification_waiting on pillarbox_notify.notification (user_id, channel, id)
    where channel <> 'in_app' and status = 'waiting';
-- The deletion of an account, and the list of operators.
create index notification_user on pillarbox_notify.notification (user_id) where channel <> 'in_app';
create index notification_created on pillarbox_notify.notification (created_at);

-- The inbox of a user.
create table pillarbox_notify.inbox (
    user_id  uuid    primary key,
    last_seq bigint  not null,
    unread   integer not null check (unread >= 0)
);

-- The e-mails that organizers have caused, by the hour and what is limited.
create table pillarbox_notify.email_count (
    hour    bigint  not null,
    subject text    not null,
    emails  integer not null,
    primary key (hour, subject)
);

-- ---- 5. Events that people have joined

-- Events of the events service, as far as texts name them.
create table pillarbox_notify.joinable_event (
    event_id   uuid        primary key,
    version    bigint      not null,
    status     text        not null,
    title      text        not null,
    city       text        not null,
    start_time timestamptz not null,
    end_time   timestamptz not null,
    time_zone  text        not null,
    -- The organizer, who causes the notifications about the event.
    owner_id   uuid        not null,
    -- The message that canceled the event, and the reason that it gives: all who joined hear of this message.
    canceled_by uuid,
    reason     text
);

create index joinable_event_end on pillarbox_notify.joinable_event (end_time);

-- Who has joined an event or waits for a seat. The row of a user who has left remains, until some time after the end of the
-- event: an older message that arrives later, or again, must not make the user a participant.
create table pillarbox_notify.participant (
    event_id uuid   not null,
    user_id  uuid   not null,
    status   text   not null check (status in ('active', 'waitlisted', 'left')),
    -- The version of the event's registrations; a message with a lower one is late.
    version  bigint not null default 0,
    primary key (event_id, user_id)
);
create index participant_user on pillarbox_notify.participant (user_id);

-- Messages about registrations that have arrived before the message about their event, which the text names.
create table pillarbox_notify.waiting_registration (
    id         bigint      generated always as identity primary key,
    message_id uuid        not null unique,
    event_id   uuid        not null,
    user_id    uuid        not null,
    topic      text        not null,
    payload    json        not null,
    due_at     timestamptz not null,
    created_at timestamptz not null
);
create index waiting_registration_due on pillarbox_notify.waiting_registration (due_at, id);
create index waiting_registration_event on pillarbox_notify.waiting_registration (event_id);
create index waiting_registration_user on pillarbox_notify.waiting_registration (user_id);

-- Business events that many people are notified of, in steps, by the order of the user ids: the participants of an event, or the
-- recipients of an aggregate.
create table pillarbox_notify.announcement (
    -- The order of the announcements about one subject.
    id             bigint generated always as identity primary key,
    -- The business event of the notifications.
    business_event uuid   not null unique,
    event_id       uuid,
    aggregate_type text,
    aggregate_id   bigint,
    -- The event or the aggregate: an announcement waits for earlier ones about the same.
    subject        text   not null,
    -- The last user who has been notified; null before the first.
    last_user      uuid,
    -- Null: given up after too many failed attempts.
    due_at         timestamptz,
    -- Failed attempts since the last step.
    attempts       integer not null default 0,
    last_error     text,
    -- What the participants know, of an announcement that has not begun: later changes of the event join it. Its business event
    -- is recorded when it begins, with the state that the event has then.
    previous       json,
    -- Whether a person has joined since the change: the confirmation told this person of the change, and not of `previous`.
    joined_since   boolean not null default false,
    check ((event_id is null) <> (aggregate_type is null)),
    check ((aggregate_type is null) = (aggregate_id is null))
);
create index announcement_due on pillarbox_notify.announcement (due_at);
create index announcement_subject on pillarbox_notify.announcement (subject, id) where due_at is not null;
create unique index announcement_of_change on pillarbox_notify.announcement (event_id)
    where previous is not null;

-- When the last announcement of a change of an event began: the next one waits.
create table pillarbox_notify.change_announced (
    event_id uuid        primary key,
    at       timestamptz not null
);

-- Users are not notified of what happened before this schema existed: the consumers read the whole log when they start for the
-- first time, to learn of events and participants.
create table pillarbox_notify.facts_since (
    at timestamptz not null
);
insert into pillarbox_notify.facts_since (at) values (clock_timestamp());
