-- schema: pillarbox
-- The incarnation of the database: which processes compare to learn that transactions may have been lost.
--
-- A server that crashed has lost its last asynchronous commits; a promoted standby and a restored backup may have lost
-- more. Transaction ids, ids from sequences and version counters are then assigned again for other content, so nothing
-- that a process remembers from before may be used or saved. PostgreSQL empties an unlogged table on exactly these
-- occasions (crash recovery, promotion, a restored base backup) and keeps it over a clean restart.

-- A single row. A process that finds none inserts a random id: the next incarnation has begun.
create unlogged table pillarbox.incarnation (
    only_one boolean     primary key default true check (only_one),
    id       uuid        not null default gen_random_uuid(),
    since    timestamptz not null default now()
);

-- The fence rows vanish with the transactions that may be lost. So no former owner, of the log's consumers or of the
-- hub's dispatcher, can commit what it derived from them: it registers again under a new id and loads everything again.
-- The row of a running process stays, because the table is rewritten with its content. The previous version of the
-- program uses the table in the same way.
alter table pillarbox.shard_worker set unlogged;
