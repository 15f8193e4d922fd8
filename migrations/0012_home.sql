-- schema: pillarbox
-- Which table the log is: a dump that is restored, also into the same database, makes it anew. Null: not looked at yet.
alter table pillarbox.home add column log_oid oid;
