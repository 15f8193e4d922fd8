-- schema: pillarbox_hub
-- The catalogue of event types, and the health of subscribers over time.

-- ---- 1. The catalogue

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
    primary key (tenant, name, version),
    foreign key (tenant, name) references pillarbox_hub.event_type on delete cascade
);

-- ---- 2. Health

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
-- attempt. A subscriber without a row has had no attempt since this version.
create table pillarbox_hub.subscriber_state (
    subscriber      uuid        primary key,
    -- Null: the last attempt succeeded.
    failing_since   timestamptz,
    is_breaker_open boolean     not null,
    updated_at      timestamptz not null
);

-- Like make_partitions, which the previous version of Pillarbox calls for the other tables.
create function pillarbox_hub.make_health_partitions(days integer) returns integer
language plpgsql
set timezone = 'UTC'
as $$
declare
    day     date;
    name    text;
    created integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
        name := 'health_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('pillarbox_hub.' || name) is not null;
        continue when exists (select from pillarbox_hub.health_overflow
            where at >= day::timestamptz and at < (day + 1)::timestamptz);
        execute format('create table pillarbox_hub.%I partition of pillarbox_hub.health for values from (%L) to (%L)',
            name, day::timestamptz, (day + 1)::timestamptz);
        created := created + 1;
    end loop;
    return created;
end
$$;

select pillarbox_hub.make_health_partitions(7);
