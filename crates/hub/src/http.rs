//! The HTTP API of the hub under `/hub/v1`: [`events::http::ingest`] for producers, and the rest for managers of subscribers
//! and streams.
//!
//! The first extractor of a handler checks what the caller may do: see [`crate::access`]. A handler that changes something in one
//! transaction honours `Idempotency-Key`.

use std::sync::Arc;

use http_kit::openapi::{self, RouteProblem};
use utoipa_axum::router::OpenApiRouter;

use crate::{Hub, dead_letters, event_types, events, health, replays, streams, subscribers};

/// The problems of the hub's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("* /hub/v1/*", 404, "tenant-not-found", NO_TENANT),
    ("POST /events", 404, "tenant-not-found", NO_TENANT),
    ("POST /events", 400, "unfit-event", UNFIT_EVENT),
    ("POST /events", 429, "too-many-waiting", TOO_MANY_WAITING),
    ("POST /hub/v1/events", 400, "unfit-event", UNFIT_EVENT),
    ("POST /hub/v1/events", 429, "too-many-waiting", TOO_MANY_WAITING),
    ("POST /hub/v1/events/batch", 400, "unfit-event", UNFIT_EVENT),
    ("POST /hub/v1/events/batch", 429, "too-many-waiting", TOO_MANY_WAITING),
    ("GET /hub/v1/events/{id}", 404, "event-not-found", "there is no such hub event, or its retention has expired"),
    ("POST /hub/v1/events/{id}/retry", 404, "event-not-found", "there is no such hub event"),
    ("POST /hub/v1/events/{id}/retry", 409, "event-not-rejected", "the event is not rejected"),
    ("POST /hub/v1/events/{id}/retry", 409, "event-refused", "the catalogue still refuses the event: see `errors`"),
    ("* /hub/v1/event-types/{name}*", 404, "event-type-not-found", "there is no such event type"),
    ("POST /hub/v1/event-types", 409, "event-type-exists", "there is already an event type `order.paid`"),
    ("POST /hub/v1/event-types", 409, "too-many-event-types", TOO_MANY_TYPES),
    ("POST /hub/v1/event-types*", 409, "catalogue-too-large", CATALOGUE_TOO_LARGE),
    ("PUT /hub/v1/catalogue/file", 409, "catalogue-too-large", CATALOGUE_TOO_LARGE),
    ("POST /hub/v1/event-types/{name}/versions", 409, "breaking-change", BREAKING_CHANGE),
    (
        "POST /hub/v1/event-types/{name}/versions",
        409,
        "too-many-versions",
        "an event type can have at most 100 versions",
    ),
    ("PUT /hub/v1/catalogue/file", 409, "breaking-change", BREAKING_CHANGE),
    ("PUT /hub/v1/catalogue/file", 409, "too-many-event-types", TOO_MANY_TYPES),
    ("* /hub/v1/subscribers/{id}*", 404, "subscriber-not-found", NO_SUBSCRIBER),
    ("POST /hub/v1/subscribers", 409, "too-many-subscribers", "a tenant can have at most 10000 subscribers"),
    ("POST /hub/v1/subscribers", 409, "already-answered", ALREADY_ANSWERED),
    ("PATCH /hub/v1/subscribers/{id}", 409, "subscriber-unopened", UNDECRYPTABLE),
    ("POST /hub/v1/subscribers/{id}/*", 409, "subscriber-unopened", UNDECRYPTABLE),
    ("POST /hub/v1/subscribers/{id}/rotate-secret", 409, "too-many-secrets", "the subscriber has 5 active secrets"),
    ("POST /hub/v1/subscribers/{id}/rotate-secret", 409, "already-answered", ALREADY_ANSWERED),
    ("GET /hub/v1/messages", 404, "subscriber-not-found", NO_SUBSCRIBER),
    ("* /hub/v1/messages/{id}*", 404, "message-not-found", "there is no such message, or its retention has expired"),
    ("POST /hub/v1/messages/{id}/dead-letter", 409, "message-settled", "the message is already delivered"),
    ("POST /hub/v1/messages/{id}/resend", 409, "too-many-replays", TOO_MANY_REPLAYS),
    ("POST /hub/v1/replays", 404, "subscriber-not-found", NO_SUBSCRIBER),
    ("POST /hub/v1/replays", 404, "event-not-found", "there is no such hub event, or its retention has expired"),
    ("POST /hub/v1/replays", 409, "too-many-replays", TOO_MANY_REPLAYS),
    ("POST /hub/v1/subscribers", 409, "too-many-replays", TOO_MANY_REPLAYS),
    ("* /hub/v1/replays/{id}*", 404, "replay-not-found", "there is no such replay"),
    ("POST /hub/v1/replays/{id}/*", 409, "replay-ended", "the replay is already finished"),
    ("* /hub/v1/streams/{name}*", 404, "stream-not-found", "there is no such stream"),
    ("POST /hub/v1/streams", 409, "stream-exists", "the tenant has a stream of this name"),
    ("POST /hub/v1/streams", 409, "too-many-streams", "a tenant can have at most 100 streams"),
    ("POST /hub/v1/streams/{name}/pull", 409, "lease-lost", LEASE_LOST),
    ("POST /hub/v1/streams/{name}/pull", 409, "too-many-readers", "64 readers have a lease on this stream"),
    ("POST /hub/v1/streams/{name}/pull", 410, "position-lapsed", LAPSED),
    ("POST /hub/v1/streams/{name}/pull", 429, "too-many-pulls", "too many pulls wait in this process"),
    ("POST /hub/v1/streams/{name}/acknowledge", 409, "lease-lost", LEASE_LOST),
    ("POST /hub/v1/streams/{name}/seek", 404, "event-not-in-stream", "the stream does not contain this event"),
    (
        "POST /hub/v1/streams/{name}/seek",
        404,
        "event-not-found",
        "there is no such event, or its retention has expired",
    ),
    ("POST /hub/v1/streams/{name}/seek", 409, "stream-in-use", "the reader `worker-1` has a lease"),
    ("POST /hub/v1/streams/{name}/seek", 410, "position-lapsed", LAPSED),
    ("* /hub/v1/dead-letters/{id}*", 404, "dead-letter-not-found", "there is no such dead letter"),
    ("POST /hub/v1/dead-letters/{id}/retry", 409, "already-retried", "the dead letter was already retried"),
    ("POST /hub/v1/dead-letters/{id}/discard", 409, "already-retried", "a retry of the dead letter was requested"),
    ("POST /hub/v1/dead-letters/{id}/retry", 409, "subscriber-gone", "the subscriber of this dead letter was deleted"),
    ("POST /hub/v1/dead-letters/{id}/retry", 409, "event-gone", "the log no longer had the event"),
];
const NO_TENANT: &str = "there is no tenant `acme`: check the spelling, or create it with POST /admin/v1/tenants";
const TOO_MANY_TYPES: &str = "a tenant can have at most 1000 event types";
const CATALOGUE_TOO_LARGE: &str = "the schemas and examples of the tenant have 16777300 bytes with this change";
const BREAKING_CHANGE: &str = "the schema may refuse payloads that the previous version accepts";
const LEASE_LOST: &str = "nothing was acknowledged: another reader has some of the parts. Pull again";
const LAPSED: &str = "unacknowledged messages are no longer retained. Seek to the oldest that is";
const NO_SUBSCRIBER: &str = "there is no such subscriber";
const TOO_MANY_REPLAYS: &str = "a tenant can have at most 10 active replays";
const UNFIT_EVENT: &str = "PostgreSQL cannot store the payload as JSON; it may be nested too deeply";
const TOO_MANY_WAITING: &str = "1000001 messages of the tenant `acme` wait for their subscribers";
const UNDECRYPTABLE: &str =
    "the subscriber's headers and secrets cannot be decrypted with the keys of this installation";
const ALREADY_ANSWERED: &str = "the first request succeeded, and the secret in its response is shown only once: for a new \
                                secret, send POST /hub/v1/subscribers/{id}/rotate-secret with a new Idempotency-Key";

pub(crate) fn router() -> OpenApiRouter<Arc<Hub>> {
    let mut router = OpenApiRouter::new()
        .merge(events::http::ingest::router())
        .merge(subscribers::http::router())
        .merge(events::http::router())
        .merge(events::http::messages::router())
        .merge(replays::http::router())
        .merge(streams::http::router())
        .merge(dead_letters::http::router())
        .merge(event_types::http::router())
        .merge(event_types::http::catalogue::router())
        .merge(health::http::router());
    let description = router.get_openapi_mut();
    openapi::accept_tenant_header(description);
    openapi::document(description, PROBLEMS);
    router
}
