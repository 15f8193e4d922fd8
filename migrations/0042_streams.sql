-- schema: pillarbox_hub
-- Streams: hub events that a reader pulls, in order per key, instead of receiving webhooks. The previous version of Pillarbox
-- does not know them: while it runs fan-out, events are not appended to streams. Create streams when every process with the
-- role `fanout` is upgraded.

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
    -- Null: nobody reads the part. The lease is that of the reader, in stream_reader.
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

-- As make_partitions, for the messages of streams.
create function pillarbox_hub.make_stream_partitions(days integer) returns integer
language plpgsql
set timezone = 'UTC'
as $$
declare
    day     date;
    name    text;
    is_used boolean;
    created integer := 0;
begin
    perform set_config('lock_timeout', '200ms', true);
    for day in select generate_series(current_date, current_date + days, interval '1 day')::date loop
        name := 'stream_message_' || to_char(day, 'YYYYMMDD');
        continue when to_regclass('pillarbox_hub.' || name) is not null;
        -- A partition cannot be created while the default partition has rows of its day; they stay there.
        select exists (select from pillarbox_hub.stream_message_overflow
                       where at >= day::timestamptz and at < (day + 1)::timestamptz) into is_used;
        continue when is_used;
        execute format('create table pillarbox_hub.%I partition of pillarbox_hub.stream_message for values from (%L) to (%L)',
            name, day::timestamptz, (day + 1)::timestamptz);
        created := created + 1;
    end loop;
    return created;
end
$$;

select pillarbox_hub.make_stream_partitions(7);
