-- schema: pillarbox_hub
-- Builds the indexes `message_repeated` and `message_n` for the partitions that exist. An index of a partitioned table cannot be
-- built concurrently. Fan-out inserts into the partition of today only, which is therefore the last one: fan-out waits while
-- this single day is read, and events are accepted meanwhile.
do $$
declare
    partition record;
    parent    text;
    name      text;
begin
    for partition in
        select child.relname, child.oid
        from pg_inherits join pg_class child on child.oid = inhrelid
        where inhparent = 'pillarbox_hub.message'::regclass
        order by child.relname = 'message_' || to_char(now() at time zone 'UTC', 'YYYYMMDD'), child.relname
    loop
        foreach parent in array array['message_repeated', 'message_n'] loop
            name := partition.relname || substr(parent, length('message') + 1);
            -- A partition that was created since the previous migration has the index.
            continue when exists (
                select from pg_index join pg_inherits on inhrelid = indexrelid
                where indrelid = partition.oid and inhparent = ('pillarbox_hub.' || parent)::regclass);
            execute format(
                case parent
                    when 'message_repeated' then
                        'create index %I on pillarbox_hub.%I (subscriber, log_id, n)
                             where dead_letter is not null or replay is not null'
                    else 'create index %I on pillarbox_hub.%I using brin (n) with (pages_per_range = 16, autosummarize = on)'
                end, name, partition.relname);
            execute format('alter index pillarbox_hub.%I attach partition pillarbox_hub.%I', parent, name);
        end loop;
    end loop;
end
$$;
