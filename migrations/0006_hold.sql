-- schema: pillarbox
-- Who keeps references into the log, and from when on: retention drops nothing that is younger.
create table pillarbox.hold (
    holder  text        primary key,
    from_at timestamptz not null
);
