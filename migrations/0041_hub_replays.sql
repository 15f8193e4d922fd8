-- schema: pillarbox_hub
-- Replays: jobs that send events again, or send a new subscriber what was posted before it was created.

-- A job. Only fan-out appends hub messages, so fan-out advances the jobs, a part at a time: the messages of a part and the
-- job's progress commit in one transaction. A request changes the state only. The previous version of Pillarbox does not
-- read this table: while it runs fan-out, jobs wait, and a subscriber with a backfill gets live messages, before its
-- history. Before a rollback, wait until no backfill is active, or cancel it.
create table pillarbox_hub.replay (
    id              uuid        primary key,
    tenant          text        not null,
    -- A replay sends into lanes of its own. A backfill sends into the subscriber's own lanes, and until it ends, fan-out
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
    -- mailbox::consumers::FollowerPosition writes them.
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

-- The job that has created the message. In a replay, `lane` begins with the id of the job, so that the lane is none of the
-- subscriber's own, also for the previous version of Pillarbox.
alter table pillarbox_hub.message add column replay uuid;
-- The same of a dead letter: its retry belongs to the job. A name of a lane alone does not tell, because an ordering key can
-- be any text.
alter table pillarbox_hub.dead_letter add column replay uuid;
