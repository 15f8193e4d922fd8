-- schema: pillarbox_notify
-- Notifications: business events, the people behind them, what they want to hear of, and one notification for each event,
-- person and channel.

-- ---- 1. Business events

-- How the events of a type are delivered, where that differs from the defaults in the settings.
create table pillarbox_notify.event_type (
    name           text    primary key,
    -- Nobody can mute a critical event, and it does not wait for the end of quiet hours or for a digest.
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

-- ---- 2. People

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

-- When a user wants no e-mails: from quiet_from to quiet_until, local time, across midnight if it is the later one.
create table pillarbox_notify.quiet_hours (
    user_id     uuid primary key,
    -- IANA name.
    time_zone   text not null,
    quiet_from  time not null,
    quiet_until time not null
);

-- ---- 3. Notifications

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

-- ---- 4. What people hear of: events that they have joined

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
    check ((event_id is null) <> (aggregate_type is null)),
    check ((aggregate_type is null) = (aggregate_id is null))
);
create index announcement_due on pillarbox_notify.announcement (due_at);
create index announcement_subject on pillarbox_notify.announcement (subject, id) where due_at is not null;

-- Nobody is notified of what happened before notifications existed: the consumers read the whole log when they start for the
-- first time, to learn of events and participants.
create table pillarbox_notify.facts_since (
    at timestamptz not null
);
insert into pillarbox_notify.facts_since (at) values (clock_timestamp());
