-- schema: pillarbox_greetings
-- Greetings that users send, and whether the service has answered them.
create schema pillarbox_greetings;

create table pillarbox_greetings.greeting (
    id          uuid        primary key,
    name        text        not null,
    received_at timestamptz not null,
    answered    boolean     not null default false
);
