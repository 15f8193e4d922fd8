-- schema: pillarbox_hub
-- The messages that repeat an earlier one: retries of dead letters, and replays. A list of deliveries shows each event once
-- per subscriber, with its newest message, so it searches this index for every message that it examines. Live messages are not
-- in it, so their insertion costs the same as before.
--
-- This step builds nothing: the index exists for the partitions that are created from now on. The next migration builds it for
-- the others. They are two transactions, so that the lock of this one, on all messages, is held for an instant only.
do $$
begin
    create index message_repeated on only pillarbox_hub.message (subscriber, log_id, n)
        where dead_letter is not null or replay is not null;
end
$$;
