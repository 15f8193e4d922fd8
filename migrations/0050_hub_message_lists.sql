-- schema: pillarbox_hub
-- Two indexes for lists of deliveries.
--
-- `message_repeated`: the messages that repeat an earlier one, which are retries of dead letters and replays. A list shows each
-- event once per subscriber, with its newest message, so it searches this index for every message that it examines. Live
-- messages are not in it, so their insertion costs the same as before.
--
-- `message_n`: the newest messages of all subscribers. BRIN, because rows are inserted in the order of n.
--
-- This step builds nothing: the indexes exist for the partitions that are created from now on. The next migration builds them
-- for the others. They are two transactions, so that the lock of this one, on all messages, is held for an instant only.
do $$
begin
    execute 'create index message_repeated on only pillarbox_hub.message (subscriber, log_id, n)
        where dead_letter is not null or replay is not null';
    execute 'create index message_n on only pillarbox_hub.message using brin (n)
        with (pages_per_range = 16, autosummarize = on)';
end
$$;
