-- schema: pillarbox_events
-- Events: gatherings with an owner, a place, a time and a status, and the feeds in which users find them.
create schema pillarbox_events;

create table pillarbox_events.event (
    id                  uuid        primary key,
    owner_id            uuid        not null,
    title               text        not null check (length(title) between 1 and 200),
    description         text        not null check (length(description) <= 10000),
    city                text        not null check (length(city) between 1 and 100),
    -- Normalized for comparisons: without accents, in lower case.
    city_norm           text        not null,
    category            text        not null check (length(category) between 1 and 50),
    category_norm       text        not null,
    start_time          timestamptz not null,
    end_time            timestamptz not null check (end_time > start_time),
    -- IANA name.
    time_zone           text        not null,
    -- 0 means unlimited.
    capacity            integer     not null check (capacity >= 0),
    status              text        not null check (status in ('draft', 'published', 'canceled')),
    -- As published by the joins service; the highest version is correct. A new count does not change `version`.
    active_participants integer     not null default 0 check (active_participants >= 0),
    count_version       bigint      not null default 0,
    -- Opaque ids of images that another service stores.
    cover_image_ids     text[]      not null check (cardinality(cover_image_ids) <= 10),
    published_at        timestamptz,
    canceled_at         timestamptz,
    created_at          timestamptz not null,
    updated_at          timestamptz not null,
    version             bigint      not null default 1,
    search              tsvector    generated always as (
                            setweight(to_tsvector('pg_catalog.english', title), 'A')
                            || setweight(to_tsvector('pg_catalog.english', description), 'B')) stored,
    check ((status = 'published') <= (published_at is not null)),
    check ((status = 'canceled') = (canceled_at is not null))
-- Free space in each page for updates of the counts: they are frequent, and no index contains them.
) with (fillfactor = 85);

-- Every feed query scans one of these indexes in order; `from` and `to` select a range of it.
create index event_latest on pillarbox_events.event (start_time, id) where status = 'published';
create index event_city on pillarbox_events.event (city_norm, start_time, id) where status = 'published';
create index event_category on pillarbox_events.event (category_norm, start_time, id) where status = 'published';
create index event_city_category on pillarbox_events.event (city_norm, category_norm, start_time, id)
    where status = 'published';
create index event_search on pillarbox_events.event using gin (search) where status = 'published';
-- The beginnings of words in titles. The column `search` contains the stems of words: `evenin` is not the beginning of
-- `even`, which `evening` is stored as. An expression and not another stored column, because few queries need it.
-- Not a partial index, although only published events are found: PostgreSQL would use no statistics of its expression,
-- take every prefix for a common one, and walk along all events instead.
create index event_title_words on pillarbox_events.event
    using gin (to_tsvector('pg_catalog.simple', title));
create index event_owner on pillarbox_events.event (owner_id, created_at desc, id desc);

-- The status history of each event, with the user who made the change.
create table pillarbox_events.status_change (
    event_id    uuid        not null references pillarbox_events.event,
    -- The version of the event after the change.
    version     bigint      not null,
    from_status text,
    to_status   text        not null,
    changed_by  uuid        not null,
    -- `changed_by` is the id of an API key and not of a user.
    by_key      boolean     not null default false,
    -- Why the status was changed; admins must give a reason.
    reason      text        check (length(reason) between 1 and 500),
    at          timestamptz not null,
    primary key (event_id, version)
);
-- The audit trail, newest first: of all events, and of one user or API key. Maintenance also finds the events that were
-- published lately. There are few rows per event, so the indexes are small.
create index status_change_at on pillarbox_events.status_change (at, event_id, version);
create index status_change_by on pillarbox_events.status_change (changed_by, at, event_id, version);

-- Offers of events to other users, who become the owners when they accept.
create table pillarbox_events.handover (
    event_id   uuid        primary key references pillarbox_events.event on delete cascade,
    user_id    uuid        not null,
    offered_at timestamptz not null
);
create index handover_user on pillarbox_events.handover (user_id);

-- Owners whose accounts were deleted, until their events are canceled or deleted.
create table pillarbox_events.deleted_owner (
    user_id    uuid        primary key,
    deleted_at timestamptz not null,
    due_at     timestamptz not null
);
create index deleted_owner_due on pillarbox_events.deleted_owner (due_at);

-- Cities and the number of their published events.
create table pillarbox_events.city (
    city_norm text    primary key,
    -- The most recent spelling.
    city      text    not null,
    events    bigint  not null check (events >= 0)
);
create index city_prefix on pillarbox_events.city (city_norm text_pattern_ops) where events > 0;
create index city_use on pillarbox_events.city (events desc, city_norm) where events > 0;

-- Counters that validate pages cached outside of the database. A transaction that makes a cached page wrong increments
-- a counter. The feeds have several counters, so that concurrent publications do not wait for the same row.
create table pillarbox_events.generation (
    cache text     not null check (cache in ('feeds', 'cities')),
    shard smallint not null,
    value bigint   not null,
    primary key (cache, shard)
) with (fillfactor = 10);
insert into pillarbox_events.generation (cache, shard, value)
    select 'feeds', shard, 0 from generate_series(0, 15) as shard union all select 'cities', 0, 0;

-- ---- trending

-- An epoch is one complete scoring. Its order never changes, so that a client can read it page by page. Three tables
-- are reused in turn: one for the newest epoch, one for the epoch before it, and one for the epoch that is being
-- written.
create table pillarbox_events.trending_epoch (
    epoch       bigint      primary key,
    scored_at   timestamptz not null,
    -- When events that were published after the scoring were last added to the epoch; null: not yet.
    extended_at timestamptz
);

create table pillarbox_events.trending_0 (
    -- The negated score, so that all columns sort ascending and one row comparison selects the rows after a position.
    rank          integer     not null,
    start_time    timestamptz not null,
    event_id      uuid        not null,
    city_norm     text        not null,
    category_norm text        not null
);
create index trending_0_all on pillarbox_events.trending_0 (rank, start_time, event_id);
create index trending_0_city on pillarbox_events.trending_0 (city_norm, rank, start_time, event_id);
create index trending_0_category on pillarbox_events.trending_0 (category_norm, rank, start_time, event_id);
create index trending_0_city_category on pillarbox_events.trending_0
    (city_norm, category_norm, rank, start_time, event_id);
create table pillarbox_events.trending_1 (like pillarbox_events.trending_0 including indexes);
create table pillarbox_events.trending_2 (like pillarbox_events.trending_0 including indexes);

-- ---- reconciliation

-- Runs that compare events and counts with the joins service, part by part, by message.
create table pillarbox_events.reconciliation (
    run            uuid        primary key,
    started_at     timestamptz not null,
    dry_run        boolean     not null,
    force          boolean     not null,
    -- The number of parts; null until all of them are posted.
    parts          integer,
    -- The parts that have a reply.
    answered       integer[]   not null default '{}',
    checked        integer     not null default 0,
    -- Wrong counts in this schema, and how many of them were repaired.
    drifted        integer     not null default 0,
    repaired       integer     not null default 0,
    -- Events that were outdated or miscounted in the joins service, and how many of them were repaired.
    joins_drifted  integer     not null default 0,
    joins_repaired integer     not null default 0,
    finished_at    timestamptz
);
create index reconciliation_started on pillarbox_events.reconciliation (started_at desc);
