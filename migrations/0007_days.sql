-- schema: pillarbox
-- Which days maintenance may drop.
-- contracts: nothing. `drop table` below is in the function with which maintenance drops old days.

-- The start of yesterday in UTC, by the database's clock. Maintenance deletes nothing from this time on, whatever its
-- settings, its arguments and the clocks of processes are.
create function pillarbox.yesterday() returns timestamptz
language sql stable parallel safe
as $$
    select (date_trunc('day', now() at time zone 'UTC') - interval '1 day') at time zone 'UTC'
$$;

-- Drops the partition of one day, of a table of any schema. Fails if the day is yesterday or later, so that no caller can
-- drop data in use. The name of a partition ends with its day.
create function pillarbox.drop_day(parent regclass, partition regclass) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    target record;
begin
    select to_date(right(child.relname, 8), 'YYYYMMDD')::timestamp at time zone 'UTC' as day,
           nspname as schema, child.relname as child, whole.relname as whole
    into target
    from pg_inherits join pg_class as child on child.oid = inhrelid join pg_class as whole on whole.oid = inhparent
         join pg_namespace on pg_namespace.oid = child.relnamespace and pg_namespace.oid = whole.relnamespace
    where child.oid = partition and whole.oid = parent and child.relname ~ '_[0-9]{8}$';
    if target is null then
        raise exception '% is not the partition of a day of %', partition, parent using errcode = 'invalid_parameter_value';
    end if;
    if target.day >= pillarbox.yesterday() then
        raise exception '% is in use: only days before yesterday (UTC) are dropped', partition
            using errcode = 'invalid_parameter_value',
                  hint = 'Check the clock of the database server, and the settings of retention.';
    end if;
    execute format('alter table %I.%I detach partition %I.%I', target.schema, target.whole, target.schema, target.child);
    execute format('drop table %I.%I', target.schema, target.child);
end
$$;

revoke all on function pillarbox.drop_day from public;
