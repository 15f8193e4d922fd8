-- no-transaction
-- schema: pillarbox_hub
-- Indexes of the few subscribers that need an operator, which the overview reads every few seconds. They are built while the
-- tables can be written, which is not possible in a transaction. A build that was interrupted leaves an index that is not
-- used, so each one is dropped first.

drop index concurrently if exists pillarbox_hub.subscriber_state_failing;
create index concurrently subscriber_state_failing on pillarbox_hub.subscriber_state (failing_since)
    where failing_since is not null;

drop index concurrently if exists pillarbox_hub.subscriber_disabled;
create index concurrently subscriber_disabled on pillarbox_hub.subscriber (id)
    where not is_active and inactive_reason is not null;
