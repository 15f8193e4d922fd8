-- schema: pillarbox_events
-- Events: what happens where and when, whose it is, and whether people may see it.
create schema pillarbox_events;

create table pillarbox_events.event (
    id                  uuid        primary key,
    owner_id            uuid        not null,
    title               text        not null check (length(title) between 1 and 200),
    description         text        not null check (length(description) <= 10000),
    city                text        not null check (length(city) between 1 and 100),
    -- Without accents and case, as it is looked for.
    city_norm           text        not null,
    category            text        not null check (length(category) between 1 and 50),
    category_norm       text        not null,
    start_time          timestamptz not null,
    end_time            timestamptz not null check (end_time > start_time),
    -- IANA.
    time_zone           text        not null,
    -- 0: unlimited.
    capacity            integer     not null check (capacity >= 0),
    status              text        not null check (status in ('draft', 'published', 'canceled')),
    -- As the joins service says; the highest version is right. It is no change of the event.
    active_participants integer     not null default 0 check (active_participants >= 0),
    count_version       bigint      not null default 0,
    -- Opaque: what they are the ids of lives elsewhere.
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
-- Room for counts: they change often, and no index has them.
) with (fillfactor = 85);

-- A feed is a walk along one of these, whatever is asked for; `from` and `to` are a stretch of it.
create index event_latest on pillarbox_events.event (start_time, id) where status = 'published';
create index event_city on pillarbox_events.event (city_norm, start_time, id) where status = 'published';
create index event_category on pillarbox_events.event (category_norm, start_time, id) where status = 'published';
create index event_city_category on pillarbox_events.event (city_norm, category_norm, start_time, id)
    where status = 'published';
create index event_search on pillarbox_events.event using gin (search) where status = 'published';
create index event_owner on pillarbox_events.event (owner_id, created_at desc, id desc);

-- Every change of a status, and who made it.
create table pillarbox_events.status_change (
    event_id    uuid        not null references pillarbox_events.event,
    -- The event's after it: a later change has a higher one.
    version     bigint      not null,
    from_status text,
    to_status   text        not null,
    changed_by  uuid        not null,
    at          timestamptz not null,
    primary key (event_id, version)
);

-- Cities that published events are in, and how many.
create table pillarbox_events.city (
    city_norm text    primary key,
    -- As it was spelled last.
    city      text    not null,
    events    bigint  not null check (events >= 0)
);
create index city_prefix on pillarbox_events.city (city_norm text_pattern_ops) where events > 0;
create index city_use on pillarbox_events.city (events desc, city_norm) where events > 0;

-- What is remembered outside of the database is good as long as these numbers stand. They grow in the transaction that
-- makes it wrong. Several for the feeds, so that those who publish do not wait for each other.
create table pillarbox_events.generation (
    what  text     not null check (what in ('feeds', 'cities')),
    shard smallint not null,
    n     bigint   not null,
    primary key (what, shard)
) with (fillfactor = 10);
insert into pillarbox_events.generation (what, shard, n)
    select 'feeds', shard, 0 from generate_series(0, 15) as shard union all select 'cities', 0, 0;

-- ---- trending

-- The order of an epoch does not change while someone walks along it. Three tables take turns: the newest epoch, the one
-- before it, and the one that is being made.
create table pillarbox_events.trending_epoch (
    epoch    bigint      primary key,
    taken_at timestamptz not null
);

create table pillarbox_events.trending_0 (
    -- The score with its sign turned, so that all of the order ascends and a row comparison can say "behind".
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

-- Comparing counts with the joins service, part by part, by message.
create table pillarbox_events.reconciliation (
    run            uuid        primary key,
    started_at     timestamptz not null,
    dry_run        boolean     not null,
    force          boolean     not null,
    -- Null until all are posted.
    parts          integer,
    answered       integer[]   not null default '{}',
    checked        integer     not null default 0,
    -- Counts here that were not right, and how many of them are now.
    drifted        integer     not null default 0,
    repaired       integer     not null default 0,
    -- Events that the joins service did not know as they are.
    joins_drifted  integer     not null default 0,
    joins_repaired integer     not null default 0,
    finished_at    timestamptz
);
create index reconciliation_started on pillarbox_events.reconciliation (started_at desc);
