-- no-transaction
-- schema: pillarbox_notify
-- Operators search notifications by the type of their event.

-- Without it, a search for a rare type would read all notifications.
drop index concurrently if exists pillarbox_notify.business_event_type;
create index concurrently business_event_type on pillarbox_notify.business_event (event_type, id);
