-- schema: pillarbox_events
-- Moderation by admins, and new events in the trending feed. The indexes of the audit trail and of the search are built by
-- a later migration, while the tables can be written.

-- Why the status was changed; admins must give a reason. `by_key`: `changed_by` is the id of an API key and not of a user.
-- The previous version writes neither column, which is correct for its changes: only owners made them.
alter table pillarbox_events.status_change
    add column reason text check (length(reason) between 1 and 500),
    add column by_key boolean not null default false;

-- When events that were published after the scoring were last added to the epoch; null: not yet.
alter table pillarbox_events.trending_epoch add column extended_at timestamptz;
