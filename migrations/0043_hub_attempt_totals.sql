-- schema: pillarbox_hub
-- The attempts of the whole installation, for the overview of operators. A process adds what its dispatcher has saved, once a
-- second; a process that crashes loses what it has not added.

-- Attempts since this version. A process adds to the row of its slot, so that processes rarely wait for each other; the sum of
-- all rows is the total.
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
