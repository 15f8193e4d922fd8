-- schema: pillarbox_hub
-- How a subscriber is called: rules by status, batches, proof of ownership, and the credentials that its endpoint requires.

alter table pillarbox_hub.subscriber
    -- What happens after a status, such as {"503": "dead_letter", "4xx": "retry"}. Rules that retry a single status are in
    -- retry_statuses, which the previous version reads and writes; there are no two columns that could disagree.
    add column retry_rules jsonb check (jsonb_typeof(retry_rules) = 'object'),
    -- Null: each message is sent in a request of its own. The previous version ignores both and sends single messages.
    add column batch_max smallint check (batch_max between 1 and 100),
    add column batch_wait_ms integer check (batch_wait_ms between 0 and 5000),
    -- Whether each new origin of the URL has to prove that it wants the webhooks.
    add column verify_endpoint boolean not null default false,
    -- Set until the endpoint has answered a challenge: its messages wait. Separate from paused_at, because a subscriber can
    -- be both, and resuming it does not verify it. The previous version does not know it: during an upgrade its dispatchers
    -- send to such a subscriber.
    add column unverified_since timestamptz,
    -- The credentials of OAuth 2 or of mutual TLS, encrypted like the headers. The previous version sends without them, and
    -- the endpoint refuses that; such a message is retried or a dead letter, as after any refusal.
    add column auth bytea,
    add constraint subscriber_batch check ((batch_max is null) = (batch_wait_ms is null));
