-- schema: pillarbox_hub
-- The webhook hub. A delivery that succeeds only appends rows; the tables whose rows change (lane, command, dead_letter, and the
-- progress of replays and streams) stay small.
--
--   1. Subscribers           4. Outcomes                  7. Streams
--   2. Event types           5. Health                    8. Partitions
--   3. Hub messages          6. Replays
create schema pillarbox_hub;

-- ---- 1. Subscribers

create table pillarbox_hub.subscriber (
    id                    uuid        primary key,
    tenant                text        not null,
    name                  text        not null check (length(name) between 1 and 100),
    url                   text        not null check (length(url) between 1 and 2000),
    -- Exact types, or prefixes such as `order.*`.
    event_types           text[]      not null check (cardinality(event_types) between 1 and 100),
    -- Conditions on the payload; null: every payload matches.
    filter                jsonb,
    -- A JSON pointer into the payload; null: the ordering key of the event is used.
    ordering_key          text,
    retry_backoff_seconds integer[]   not null,
    -- What happens after a status, such as {"503": "dead_letter", "4xx": "retry"}.
    retry_rules           jsonb       not null default '{}' check (jsonb_typeof(retry_rules) = 'object'),
    on_exhausted          text        not null check (on_exhausted in ('skip', 'block')),
    timeout_ms            integer     not null check (timeout_ms between 100 and 60000),
    max_in_flight         integer     not null check (max_in_flight between 1 and 1000),
    rate_limit_per_second integer     check (rate_limit_per_second between 1 and 100000),
    -- Null: each message is sent in a separate request.
    batch_max             smallint    check (batch_max between 1 and 100),
    batch_wait_ms         integer     check (batch_wait_ms between 0 and 5000),
    -- Encrypted, like the secrets, because they may contain a password.
    headers               bytea,
    -- The credentials of OAuth 2 or of mutual TLS, encrypted like the headers.
    auth                  bytea,
    format                text        not null check (format in ('raw', 'standard', 'cloudevents')),
    is_active             boolean     not null,
    -- Why the hub switched it off; null if its owner did.
    inactive_reason       text,
    paused_at             timestamptz,
    -- Whether each new origin of the URL has to prove that it wants the webhooks.
    verify_endpoint       boolean     not null default false,
    -- Set until the endpoint has answered a challenge: its messages wait. Separate from paused_at, because a subscriber can
    -- be both, and resuming it does not verify it.
    unverified_since      timestamptz,
    version               bigint      not null default 1,
    created_at            timestamptz not null,
    updated_at            timestamptz not null,
    -- The dispatcher that owns this shard sends to the subscriber.
    shard                 smallint    not null check (shard between 0 and 15),
    constraint subscriber_batch check ((batch_max is null) = (batch_wait_ms is null))
);
create index subscriber_tenant on pillarbox_hub.subscriber (tenant, id);
-- The few that need an operator, which the overview reads every few seconds.
create index subscriber_disabled on pillarbox_hub.subscriber (id)
    where not is_active and inactive_reason is not null;

-- The secrets that sign deliveries: the newest and, for an overlap after a rotation, the previous ones.
create table pillarbox_hub.secret (
    id         uuid        primary key,
    subscriber uuid        not null references pillarbox_hub.subscriber on delete cascade,
    sealed     bytea       not null,
    created_at timestamptz not null,
    -- Null: the secret does not expire.
    expires_at timestamptz
);
create index secret_subscriber on pillarbox_hub.secret (subscriber);

-- Counts the changes to the two tables above. Fan-out and dispatchers compare the version with the one they have loaded.
create table pillarbox_hub.directory (
    only_one boolean primary key default true check (only_one),
    version  bigint  not null
);
insert into pillarbox_hub.directory (version) values (1);

create function pillarbox_hub.count_change() returns trigger
language plpgsql
as $$
begin
    update pillarbox_hub.directory set version = version + 1;
    return null;
end
$$;
create trigger subscriber_changed after insert or update or delete on pillarbox_hub.subscriber
    for each statement execute function pillarbox_hub.count_change();
create trigger secret_changed after insert or update or delete on pillarbox_hub.secret
    for each statement execute function pillarbox_hub.count_change();

-- The version of the directory that each dispatcher has applied. A request that changes a subscriber is answered when all
-- live dispatchers have applied its change; a dispatcher is live while its row in pillarbox.shard_worker (the same owner)
-- belongs to a process that sends heartbeats. A dispatcher inserts its row with version 0 before it loads subscribers, so
-- it never uses a version that no row tells. Unlogged, like pillarbox.shard_worker: versions count
-- within one incarnation of the database only, and after a crash every dispatcher registers again.
create unlogged table pillarbox_hub.dispatcher (
    owner   uuid   primary key,
    version bigint not null
);

-- ---- 2. Event types

-- The tenants with a catalogue.
create table pillarbox_hub.catalogue (
    tenant        text primary key,
    -- Whether an event whose type is not in the catalogue is accepted.
    unknown_types text not null default 'accept' check (unknown_types in ('accept', 'refuse')),
    -- Whether tenants without a catalogue use this one.
    is_shared     boolean not null default false check (not is_shared or tenant = 'main'),
    -- Another one with each change of the tenant's catalogue. Random instead of a number, because a number would repeat after
    -- a failover that loses a change.
    stamp         uuid not null
);

-- Another stamp with each change of any catalogue. A process that has loaded catalogues reads this row to find out whether
-- they are current.
create table pillarbox_hub.catalogue_stamp (
    only_one boolean primary key default true check (only_one),
    stamp    uuid    not null
);
insert into pillarbox_hub.catalogue_stamp (stamp) values (gen_random_uuid());

create table pillarbox_hub.event_type (
    tenant        text        not null,
    name          text        not null check (length(name) between 1 and 200),
    description   text        not null check (length(description) <= 10000),
    is_deprecated boolean     not null,
    -- Whether payloads are checked against the newest schema.
    is_enforced   boolean     not null,
    -- The number of the newest version; 0: there is none, and every payload is accepted.
    newest        integer     not null,
    -- Counts the changes of this row.
    version       bigint      not null default 1,
    created_at    timestamptz not null,
    updated_at    timestamptz not null,
    primary key (tenant, name)
);

create table pillarbox_hub.event_type_version (
    tenant     text        not null,
    name       text        not null,
    version    integer     not null check (version >= 1),
    -- json instead of jsonb: an export has them byte for byte as they were imported.
    schema     json        not null,
    examples   json        not null,
    created_at timestamptz not null,
    -- What the schema occupies in memory when it is compiled.
    compiled_bytes integer not null,
    bytes      integer     not null generated always as (octet_length(schema::text) + octet_length(examples::text)) stored,
    primary key (tenant, name, version),
    foreign key (tenant, name) references pillarbox_hub.event_type on delete cascade
);

-- Events that were posted in SQL and that the catalogue, or a limit of their tenant, refuses. They are not sent. Their content
-- is in the log.
create table pillarbox_hub.rejected_event (
    log_id      bigint      primary key,
    log_shard   smallint    not null,
    log_at      timestamptz not null,
    tenant      text        not null,
    message_id  uuid        not null,
    event_type  text        not null,
    -- The version of the event type that refuses the payload; null if the reason is another one.
    version     integer,
    -- A list of {"pointer", "detail"}.
    errors      json        not null,
    rejected_at timestamptz not null,
    -- When the event was retried and accepted. From then on it counts as posted at this time.
    accepted_at timestamptz
);
create index rejected_event_of_tenant on pillarbox_hub.rejected_event (tenant, log_id) where accepted_at is null;
create index rejected_event_by_time on pillarbox_hub.rejected_event (log_at);

-- ---- 3. Hub messages

-- One row for each event and matching subscriber. Only fan-out inserts, one transaction after the other, so n has no gap and
-- a higher n has committed later. So a reader that remembers the highest n it has seen misses nothing.
create table pillarbox_hub.message (
    n           bigint      not null,
    at          timestamptz not null,
    subscriber  uuid        not null,
    -- Messages of one lane are sent one after the other; null: the message waits for no other.
    lane        text,
    -- The number within the lane, from 1 and without a gap.
    seq         bigint,
    -- The log entry with the content.
    log_shard   smallint    not null,
    log_id      bigint      not null,
    log_at      timestamptz not null,
    -- The dead letter that this message retries. It has the content even if the log no longer does.
    dead_letter uuid,
    -- The job that has created the message. In a replay, `lane` begins with the id of the job, so that the lane is none of the
    -- subscriber's own.
    replay      uuid
) partition by range (at);
create index message_subscriber_n on pillarbox_hub.message (subscriber, n);
create index message_lane on pillarbox_hub.message (subscriber, lane, n) where lane is not null;
-- For the outcomes of an event. BRIN, because rows are inserted in about the order of log_id.
create index message_log_id on pillarbox_hub.message using brin (log_id) with (pages_per_range = 16, autosummarize = on);
-- The messages that repeat an earlier one, which are retries of dead letters and replays. A list shows each event once per
-- subscriber, with its newest message, so it searches this index for every message that it examines. Live messages are not in
-- it, so it does not slow down their insertion.
create index message_repeated on pillarbox_hub.message (subscriber, log_id, n)
    where dead_letter is not null or replay is not null;
-- The newest messages of all subscribers. BRIN, because rows are inserted in the order of n.
create index message_n on pillarbox_hub.message using brin (n) with (pages_per_range = 16, autosummarize = on);
create table pillarbox_hub.message_overflow partition of pillarbox_hub.message default;

-- The batches of fan-out: the range of numbers and the subscribers with new messages or commands. Dispatchers poll it.
create table pillarbox_hub.fanout_batch (
    n_to        bigint      primary key,
    n_from      bigint      not null,
    subscribers uuid[]      not null,
    at          timestamptz not null,
    -- False if the batch has hub messages only. Then dispatchers need not read commands for its subscribers, which may be many
    -- and paused.
    has_commands boolean    not null
);

-- Subscribers that an event matched by its type, but that got no message: filtered out, or switched off.
create table pillarbox_hub.skipped (
    log_id   bigint      not null,
    at       timestamptz not null,
    filtered uuid[]      not null,
    inactive uuid[]      not null
) partition by range (at);
create index skipped_log_id on pillarbox_hub.skipped using brin (log_id) with (pages_per_range = 16, autosummarize = on);
create table pillarbox_hub.skipped_overflow partition of pillarbox_hub.skipped default;

-- Hub events that fan-out has read from the log, but not turned into hub messages (or not for all subscribers), because
-- their tenant had more than its share. Fan-out takes the tenants in turn; within a tenant it processes the events in the
-- order of id, which is the order of the log.
create table pillarbox_hub.deferred_event (
    tenant     text        not null,
    id         bigint      generated always as identity,
    log_shard  smallint    not null,
    log_id     bigint      not null,
    log_at     timestamptz not null,
    -- The subscribers that matched when the event was deferred.
    matches    integer     not null,
    -- All matching subscribers up to this one have their hub message; null: none has. Fan-out visits them in the order of
    -- their ids.
    after      uuid,
    -- Whether the event is known to be accepted.
    is_checked boolean     not null,
    -- When the event was retried and accepted, if it was rejected at first.
    accepted_at timestamptz,
    primary key (tenant, id)
);
-- For a replay, which asks whether an event was fanned out before.
create index deferred_event_log_id on pillarbox_hub.deferred_event (log_id);

-- Hub messages that wait, per tenant, as a process with the role `maintain` has counted them. Tenants with few are left
-- out. Processes with the role `api` refuse the events of a tenant with too many.
create table pillarbox_hub.tenant_backlog (
    tenant     text        primary key,
    waiting    bigint      not null,
    counted_at timestamptz not null
);

-- ---- 4. Outcomes

-- Every attempt. The last one of a completed message is delivered or dead.
create table pillarbox_hub.attempt (
    at         timestamptz not null,
    subscriber uuid        not null,
    n          bigint      not null,
    attempt    smallint    not null,
    outcome    text        not null check (outcome in ('delivered', 'failed', 'dead')),
    status     smallint,
    latency_ms integer     not null,
    -- The class of the failure, and its text.
    error      text,
    detail     text,
    -- The beginning of the response body.
    excerpt    text
) partition by range (at);
create index attempt_subscriber_n on pillarbox_hub.attempt (subscriber, n);
create table pillarbox_hub.attempt_overflow partition of pillarbox_hub.attempt default;

-- All messages of a subscriber up to n have a final outcome or belong to a detached lane. Positions are appended and the
-- highest one counts: an update per save would bloat the table. Messages beyond it may be completed; the attempts tell.
create table pillarbox_hub.position (
    subscriber uuid        not null,
    n          bigint      not null,
    at         timestamptz not null
) partition by range (at);
create index position_subscriber_n on pillarbox_hub.position (subscriber, n);
create table pillarbox_hub.position_overflow partition of pillarbox_hub.position default;

-- Detached lanes: the subscriber's position no longer waits for their messages.
create table pillarbox_hub.lane (
    subscriber   uuid        not null,
    -- The next message of the lane, or the last completed one. The earlier ones of the lane have a final outcome; some of
    -- the later ones may also have one (the attempts tell).
    head         bigint      not null,
    -- Null: a single message without an ordering key.
    lane         text,
    attempts     smallint    not null,
    -- Null: blocked until an operator retries or dead-letters the head.
    next_at      timestamptz,
    -- The head is a dead letter that an operator retries.
    manual_retry boolean     not null,
    primary key (subscriber, head)
);
create unique index lane_name on pillarbox_hub.lane (subscriber, lane) where lane is not null;

-- Operator commands. The dispatcher that owns the subscriber executes and deletes them.
create table pillarbox_hub.command (
    id         bigint generated always as identity primary key,
    subscriber uuid   not null,
    n          bigint not null,
    action     text   not null check (action in ('dead_letter', 'retry')),
    by         text   not null
);
create index command_subscriber on pillarbox_hub.command (subscriber);

create table pillarbox_hub.dead_letter (
    id                  uuid        primary key,
    tenant              text        not null,
    subscriber          uuid        not null,
    n                   bigint      not null,
    lane                text,
    -- Null, like event_snapshot, if the log no longer had the event.
    event_id            uuid,
    event_type          text,
    log_shard           smallint    not null,
    log_id              bigint      not null,
    log_at              timestamptz not null,
    -- Event and subscriber at the time the message was given up. json keeps the payload byte for byte.
    event_snapshot      json,
    subscriber_snapshot jsonb       not null,
    reason              text        not null check (reason in ('exhausted', 'refused', 'gone', 'manual', 'expired')),
    detail              text        not null,
    attempts            smallint    not null,
    moved_to_dlq_at     timestamptz not null,
    manual_retry_by     text,
    manual_retry_at     timestamptz,
    -- The ordering key with which the event was posted; `lane` may be another value, if the subscriber takes its lanes from the
    -- payload.
    ordering_key        text,
    -- The job that has created the message: a retry belongs to the job. A name of a lane alone does not tell, because an ordering
    -- key can be any text.
    replay              uuid,
    check ((manual_retry_by is null) = (manual_retry_at is null))
);
create index dead_letter_tenant on pillarbox_hub.dead_letter (tenant, id);
create index dead_letter_subscriber on pillarbox_hub.dead_letter (subscriber, id);
-- For the metric that counts the dead letters that were not retried, up to a bound for each subscriber.
create index dead_letter_unretried on pillarbox_hub.dead_letter (subscriber) where manual_retry_at is null;
create index dead_letter_log_id on pillarbox_hub.dead_letter (log_id);
create unique index dead_letter_message on pillarbox_hub.dead_letter (subscriber, n);

-- ---- 5. Health

-- What the attempts of one minute led to, for each subscriber that had any. The dispatcher that owns the subscriber counts in
-- memory and adds a row after the minute; if several dispatchers owned it within the minute, they add to the same row.
create table pillarbox_hub.health (
    at         timestamptz not null,
    subscriber uuid        not null,
    delivered  integer     not null,
    -- Attempts that failed and are retried.
    failed     integer     not null,
    -- Attempts after which the message was given up.
    dead       integer     not null,
    -- The number of requests per range of response times. The ranges are in the program and never change.
    latency    integer[]   not null,
    primary key (subscriber, at)
) partition by range (at);
create table pillarbox_hub.health_overflow partition of pillarbox_hub.health default;

-- Whether the last attempts of a subscriber failed, as its dispatcher saw it. A row changes when that changes, not with each
-- attempt. A subscriber without a row has had no attempt.
create table pillarbox_hub.subscriber_state (
    subscriber      uuid        primary key,
    -- Null: the last attempt succeeded.
    failing_since   timestamptz,
    is_breaker_open boolean     not null,
    updated_at      timestamptz not null
);
-- The few that need an operator, which the overview reads every few seconds.
create index subscriber_state_failing on pillarbox_hub.subscriber_state (failing_since)
    where failing_since is not null;

-- The attempts of the whole installation, for the overview of operators. A process adds what its dispatcher has saved to the row
-- of its slot once a second, so that processes rarely wait for each other; the sum of all rows is the total. A process that crashes
-- loses what it has not added.
create table pillarbox_hub.attempt_total (
    slot      smallint primary key,
    delivered bigint   not null,
    -- Attempts that failed and are retried.
    failed    bigint   not null,
    -- Attempts after which the message was given up.
    dead      bigint   not null
);

-- The times of each of the last minutes, in the ranges of pillarbox_hub.health.
create table pillarbox_hub.attempt_minute (
    at         timestamptz not null,
    slot       smallint    not null,
    -- The number of attempts per range of response times.
    latency    bigint[]    not null,
    -- The number of deliveries per range of the time since the event was posted.
    end_to_end bigint[]    not null,
    primary key (at, slot)
);

-- ---- 6. Replays

-- A job that sends events again, or sends a new subscriber what was posted before it was created. Only fan-out appends hub
-- messages, so fan-out advances the jobs, a part at a time: the messages of a part and the job's progress commit in one
-- transaction. A request changes the state only.
create table pillarbox_hub.replay (
    id              uuid        primary key,
    tenant          text        not null,
    -- A replay sends into separate lanes. A backfill sends into the subscriber's own lanes, and until it ends, fan-out
    -- creates no other messages for the subscriber.
    kind            text        not null check (kind in ('replay', 'backfill')),
    -- Null: all subscribers of the tenant.
    subscriber      uuid,
    mode            text        not null check (mode in ('resend', 'missed')),
    from_at         timestamptz not null,
    to_at           timestamptz,
    event_types     text[]      not null,
    filter          jsonb,
    -- The chosen events in the order of the log, if the request names them; else the time range is read.
    event_log_shards smallint[],
    event_log_ids    bigint[],
    event_log_ats    timestamptz[],
    rate_per_second integer     check (rate_per_second between 1 and 100000),
    requested_by    text        not null,
    created_at      timestamptz not null,

    state           text        not null check (state in ('pending', 'running', 'paused', 'finished', 'canceled', 'failed')),
    error           text,
    started_at      timestamptz,
    ended_at        timestamptz,
    paused_at       timestamptz,
    -- The start for the measured rate: moved forward by the time in which the job was paused.
    timed_from      timestamptz,

    -- What the job has read of the log, and what fan-out had read when the job began: a replay ends there. Positions as
    -- pillarbox::consumers::FollowerPosition writes them.
    read_to         jsonb,
    read_until      jsonb,
    -- For the progress: the job reads from the first to the last id, and has read up to position_id.
    first_id        bigint,
    last_id         bigint,
    position_id     bigint,
    -- No event of the time range has this id or a higher one.
    until_id        bigint,
    -- How many of the named events are done.
    events_done     integer     not null default 0,
    -- The matching subscribers of the next event up to this one have their message.
    after           uuid,
    -- When the last event that the job has read was posted.
    position_at     timestamptz,
    matched         bigint      not null default 0,
    created         bigint      not null default 0,
    -- The subscriber that has too many undelivered messages of replays.
    waits_for       uuid,
    -- A backfill has covered the deferred events of its tenant up to this one.
    deferred_to     bigint,
    check ((event_log_ids is null) = (event_log_shards is null) and (event_log_ids is null) = (event_log_ats is null)),
    check ((state in ('finished', 'canceled', 'failed')) = (ended_at is not null)),
    check (kind = 'replay' or subscriber is not null)
);
create index replay_tenant on pillarbox_hub.replay (tenant, id);
-- For the limits of a tenant: the active ones, and those that have ended a short time ago.
create index replay_ended on pillarbox_hub.replay (tenant, ended_at);
-- The few that fan-out looks for.
create index replay_active on pillarbox_hub.replay (id) where ended_at is null;
create unique index replay_backfill on pillarbox_hub.replay (subscriber) where kind = 'backfill';

-- How many messages of a job fan-out has created for a subscriber, and how many have their final outcome. Two tables,
-- because they have different writers, fan-out and the subscriber's dispatcher, which must not wait for each other. Rows
-- change often, and keep room for that on their page.
create table pillarbox_hub.replay_created (
    replay     uuid   not null,
    subscriber uuid   not null,
    created    bigint not null,
    primary key (replay, subscriber)
) with (fillfactor = 50);
create table pillarbox_hub.replay_outcome (
    replay     uuid   not null,
    subscriber uuid   not null,
    delivered  bigint not null,
    dead       bigint not null,
    primary key (replay, subscriber)
) with (fillfactor = 50);

-- ---- 7. Streams

-- A stream: hub events that a reader pulls, in order per key, instead of receiving webhooks.
create table pillarbox_hub.stream (
    id           uuid        primary key,
    tenant       text        not null,
    name         text        not null check (name ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'),
    -- The same rules as those of a subscriber.
    event_types  text[]      not null check (cardinality(event_types) between 1 and 100),
    filter       jsonb,
    ordering_key text,
    version      bigint      not null default 1,
    created_at   timestamptz not null,
    updated_at   timestamptz not null,
    unique (tenant, name)
);
-- Fan-out loads streams together with subscribers, by the same version.
create trigger stream_changed after insert or update or delete on pillarbox_hub.stream
    for each statement execute function pillarbox_hub.count_change();

-- One row for each event and matching stream. Not in pillarbox_hub.message: dispatchers, outcomes and quotas must not see them.
-- Only fan-out inserts, one fenced transaction after the other, so n has no gap over all streams, and a higher n has committed
-- later.
create table pillarbox_hub.stream_message (
    n         bigint      not null,
    -- When the event was posted: the `at` of its log entry. Rows are dropped in the days in which the log drops their content.
    at        timestamptz not null,
    stream    uuid        not null,
    -- By the hash of the lane, or of the event's id for an event without a lane.
    part      smallint    not null check (part between 0 and 15),
    lane      text,
    -- The number within the lane, from 1 and without a gap.
    seq       bigint,
    log_shard smallint    not null,
    log_id    bigint      not null
) partition by range (at);
-- A reader reads its parts one by one, so that the cost of a pull depends neither on the backlog nor on parts that wait.
create index stream_message_part on pillarbox_hub.stream_message (stream, part, n);
create index stream_message_lane on pillarbox_hub.stream_message (stream, lane, n) where lane is not null;
-- For replays and for seeking an event. BRIN, because rows are inserted in about the order of log_id.
create index stream_message_log_id on pillarbox_hub.stream_message
    using brin (log_id) with (pages_per_range = 16, autosummarize = on);
create table pillarbox_hub.stream_message_overflow partition of pillarbox_hub.stream_message default;

-- The batches of fan-out with stream messages: the range of numbers and the streams. Pulls that wait poll it. The primary key
-- is the proof that no number is assigned twice.
create table pillarbox_hub.stream_batch (
    n_to    bigint      primary key,
    n_from  bigint      not null,
    streams uuid[]      not null,
    at      timestamptz not null
);

-- The parts of a stream, 16 rows for each. Pulls, acknowledgements and seeks of a stream lock its rows first. The rows change
-- often, so updates should find room in their page.
create table pillarbox_hub.stream_part (
    stream         uuid        not null references pillarbox_hub.stream on delete cascade,
    part           smallint    not null check (part between 0 and 15),
    -- Messages up to this number are processed.
    acknowledged   bigint      not null,
    -- Messages up to this number were handed out to the reader.
    handed_out     bigint      not null,
    -- Null: the part has no reader. The lease is that of the reader, in stream_reader.
    reader         text,
    -- Counts the readers of the part: an acknowledgement with an older number is refused.
    epoch          bigint      not null default 0,
    -- Counts the seeks of the stream, the same in all its parts.
    generation     bigint      not null default 0,
    -- The highest number that retention has dropped before it was acknowledged; 0 if there is none since the last seek.
    dropped_to     bigint      not null default 0,
    -- Messages of events from before this time are dropped; null: none is.
    dropped_before timestamptz,
    primary key (stream, part)
) with (fillfactor = 50);

-- The readers of a stream. A lease ends by the clock of the database.
create table pillarbox_hub.stream_reader (
    stream      uuid        not null references pillarbox_hub.stream on delete cascade,
    reader      text        not null check (length(reader) between 1 and 100),
    lease_until timestamptz not null,
    primary key (stream, reader)
) with (fillfactor = 50);

-- ---- 8. Partitions

-- Creates the partitions of today and the given number of days ahead. Returns how many it created. Fails quickly instead of
-- queueing for a lock, because everything else would queue behind it.
create function pillarbox_hub.make_partitions(days integer) returns integer
language plpgsql
set timezone = 'UTC'
as $$
declare
    parent  text;
    day     date;
    name    text;
    is_used boolean;
    created integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    foreach parent in array array['message', 'skipped', 'attempt', 'position', 'health', 'stream_message'] loop
        for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            continue when to_regclass('pillarbox_hub.' || name) is not null;
            -- A partition cannot be created while the default partition has rows of its day; they stay there.
            execute format('select exists (select from pillarbox_hub.%I where at >= %L and at < %L)',
                parent || '_overflow', day::timestamptz, (day + 1)::timestamptz) into is_used;
            continue when is_used;
            execute format('create table pillarbox_hub.%I partition of pillarbox_hub.%I for values from (%L) to (%L)',
                name, parent, day::timestamptz, (day + 1)::timestamptz);
            created := created + 1;
        end loop;
    end loop;
    return created;
end
$$;

select pillarbox_hub.make_partitions(7);
