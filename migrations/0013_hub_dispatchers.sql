-- schema: pillarbox_hub
-- When a change to a subscriber holds everywhere, and the event of a dead letter as every response shows it.

-- The version of the directory that each dispatcher has applied. A request that changes a subscriber is answered when all
-- live dispatchers have applied its change; a dispatcher is live while its row in pillarbox.shard_worker (the same owner)
-- belongs to a process that sends heartbeats. A dispatcher inserts its row with version 0 before it loads subscribers, so
-- there is no time in which it uses a version that no row tells. Unlogged, like pillarbox.shard_worker: versions count
-- within one incarnation of the database only, and after a crash every dispatcher registers again.
-- A dispatcher of the previous version of Pillarbox has no row, and nobody waits for it.
create unlogged table pillarbox_hub.dispatcher (
    owner   uuid   primary key,
    version bigint not null
);

-- The ordering key with which the event was posted; `lane` may be another value, if the subscriber takes its lanes from the
-- payload. Null also for dead letters of the previous version of Pillarbox.
alter table pillarbox_hub.dead_letter add column ordering_key text;
