-- schema: pillarbox_progress
-- The progress of projects: who owns a project, how it ended, and, in an installation without a Redis for it, its counts.
create schema pillarbox_progress;

-- ---- 1. Projects

-- Every project has a row, wherever its counts are. So the loss of counts is detected: the row says that the project has not
-- ended, and the counts that belong to its token are missing.
create table pillarbox_progress.project (
    -- Part of the key in Redis, `smap:proj:{id}`.
    id          text        primary key check (id ~ '^[A-Za-z0-9_.-]{1,100}$'),
    tenant      text        not null,
    -- `user:<id>`, or `tenant:<name>` for a project that was created with an API key.
    owner       text        not null,
    -- Identifies one initialisation of the counts. Counts with another token belong to an earlier one.
    token       uuid        not null,
    -- The server on which the counts were initialised: the run of Redis (its process, and the history of its data), or
    -- `postgres`. Null: not initialised yet, so nothing has been counted.
    run         text,
    created_at  timestamptz not null,
    -- When the counts of an unfinished project expire.
    expires_at  timestamptz not null,
    -- The final state. It is archived here because the counts expire.
    finished_at timestamptz,
    status      text        check (status in ('DONE', 'FAILED')),
    total       bigint,
    done        bigint,
    errors      bigint,
    check ((finished_at is null) = (status is null)),
    check (finished_at is null or (total is not null and done is not null and errors is not null))
);
-- The list of an owner, and that of all projects for operators.
create index project_owner on pillarbox_progress.project (owner, created_at, id);
create index project_created on pillarbox_progress.project (created_at, id);
-- The number of unfinished projects of an owner is limited.
create index project_owner_unfinished on pillarbox_progress.project (owner) where finished_at is null;
-- The periodic check walks over the unfinished projects.
create index project_unfinished on pillarbox_progress.project (id) where finished_at is null;
-- Retention.
create index project_finished on pillarbox_progress.project (finished_at) where finished_at is not null;
create index project_expired on pillarbox_progress.project (expires_at) where finished_at is null;

-- The projects whose `job.completed` was posted. The row commits together with the message, so there is one message at most.
create table pillarbox_progress.completed (
    project_id   text        primary key references pillarbox_progress.project on delete cascade,
    completed_at timestamptz not null
);

-- ---- 2. Counts, if PostgreSQL has them

-- Its row is the lock of the project's items. Updates are frequent and touch no index, so the page has space for them.
create table pillarbox_progress.state (
    project_id text             primary key references pillarbox_progress.project on delete cascade,
    token      uuid             not null,
    status     text             not null check (status in
        ('INITIALIZING', 'CRAWLING', 'PROCESSING_WAIT', 'PROCESSING', 'DONE', 'FAILED')),
    total      bigint           not null,
    done       bigint           not null,
    errors     bigint           not null,
    expires_at timestamptz      not null,
    -- Since when the status is final. Part of the id of `job.completed`, so that the message has the same id if it is posted again.
    ended_at   timestamptz,
    -- The exponentially decaying rate of items per second at `rate_at`, and when the first item was counted.
    rate       double precision,
    rate_at    timestamptz,
    rate_since timestamptz
) with (fillfactor = 50);

-- The items that were counted. No foreign key: it would cost a lookup for each item.
create table pillarbox_progress.item (
    project_id text not null,
    item_id    text not null,
    primary key (project_id, item_id)
);
