-- schema: pillarbox_hub
-- Shares of the hub's work per tenant.

-- Hub events that fan-out has read from the log, but not turned into hub messages (or not for all subscribers), because
-- their tenant had more than its share. Fan-out takes the tenants in turn; within a tenant it processes the events in the
-- order of id, which is the order of the log. The previous version of Pillarbox does not read this table: while it runs
-- fan-out, events that are in it wait, and later events of their tenant overtake them. Before a rollback, wait until the
-- table is empty.
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

-- False if the batch has hub messages only. Then dispatchers need not read commands for its subscribers, which may be many
-- and paused. The previous version of Pillarbox does not set it: true is always correct.
alter table pillarbox_hub.fanout_batch add column has_commands boolean not null default true;
