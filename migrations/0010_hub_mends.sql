-- schema: pillarbox_hub
-- For who counts the dead letters that nobody has retried, up to a bound for each subscriber.
create index dead_letter_unretried on pillarbox_hub.dead_letter (subscriber) where manual_retry_at is null;
