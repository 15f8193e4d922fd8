//! The errors of the hub's use cases, and the problems that the API returns for them.

use std::time::Duration;

use http::StatusCode;
use http_kit::auth::tenant_suspended;
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::PostError;
use pillarbox::log::Tenant;

/// When a caller whose pulls are refused should try again.
const PULL_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// When a change that another one has overtaken should be sent again.
const CHANGE_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// When work on schemas for which there was no capacity should be sent again.
const VERDICT_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no such subscriber")]
    NoSubscriber,
    #[error(
        "there is no such hub event, or its retention has expired (dead letters keep a copy of theirs; events posted in SQL are at `/admin/v1/log/{{id}}`)"
    )]
    NoEvent,
    #[error("there is no such message, or its retention has expired; see the dead letters")]
    NoMessage,
    #[error("there is no such dead letter")]
    NoDeadLetter,
    #[error("there is no such event type")]
    NoEventType,
    #[error("there is already an event type `{0}`: change it, or add a version to it")]
    EventTypeExists(String),
    #[error("a tenant can have at most {0} event types: delete those that are no longer needed")]
    TooManyEventTypes(i64),
    #[error("an event type can have at most {0} versions: delete it and create it again with the current one")]
    TooManyVersions(i32),
    #[error(
        "the schema may refuse payloads that the previous version accepts, or removes properties that receivers may read: see `errors`; send `force: true` to accept that"
    )]
    BreakingChange(Vec<FieldError>),
    #[error(
        "the schemas and examples of the tenant have {bytes} bytes with this change, and at most {max} are accepted: delete event types that are no longer needed, or use smaller examples"
    )]
    CatalogueTooLarge { bytes: i64, max: i64 },
    #[error(
        "the schemas and examples of all versions of the event type `{name}` have {bytes} bytes with this change, and at most {max} are accepted: use fewer or smaller examples, or delete the type and create it again with the current version"
    )]
    EventTypeTooLarge { name: String, bytes: i64, max: i64 },
    #[error(
        "the newest schemas of the tenant occupy {bytes} bytes in memory with this change, and at most {max} are accepted: use fewer or smaller patterns"
    )]
    CatalogueTooExpensive { bytes: i64, max: i64 },
    #[error("the catalogue was changed by another request while this one was checked: send this one again")]
    CatalogueChanged,
    #[error(transparent)]
    NoVerdict(#[from] NoVerdict),
    #[error("the event is not rejected, or it was retried and accepted")]
    NotRejected,
    #[error("the catalogue still refuses the event: see `errors`; add a version that accepts it, or relax `enforce`")]
    StillRefused(Vec<FieldError>),
    #[error("there is no such replay")]
    NoReplay,
    #[error("the replay is already {0}; request another one")]
    ReplayEnded(&'static str),
    #[error("a tenant can have at most {0} active replays: wait until one has finished, or cancel one")]
    TooManyReplays(i64),
    #[error("some fields are invalid")]
    Invalid(Vec<FieldError>),
    #[error("the subscriber was changed by another request")]
    Stale(Problem),
    #[error(
        "the subscriber has {0} active secrets: wait until one expires, or rotate with `overlap_hours: 0`, which ends all earlier ones"
    )]
    TooManySecrets(usize),
    #[error(
        "a tenant can have at most {0} subscriber{plural} ({1}): delete those that are no longer needed, or ask the operator for a higher limit",
        plural = plural_end(.0)
    )]
    TooManySubscribers(u32, &'static str),
    #[error("{}", pillarbox::log::unknown_tenant_text(.0))]
    NoTenant(String),
    #[error("the tenant is suspended")]
    Suspended(Tenant),
    #[error("the message is already {0}")]
    AlreadyFinal(&'static str),
    #[error("the dead letter was already retried; if the message fails again, it becomes a new dead letter")]
    AlreadyRetried,
    #[error(
        "a retry of the dead letter was requested, and needs its content: it is deleted when its retention ends. If the message fails again, discard its new dead letter"
    )]
    RetriedBefore,
    #[error("the subscriber of this dead letter was deleted, so the message cannot be sent again")]
    SubscriberDeleted,
    #[error("the log no longer had the event when the message was given up, so there is nothing to send")]
    EventExpired,
    #[error(
        "the subscriber's headers and secrets cannot be decrypted with the keys of this installation: add the former key to `secret_keys_previous`, or delete the subscriber and create it again"
    )]
    Undecryptable,
    #[error("a stored schema is invalid: {0}")]
    InvalidStoredSchema(String),
    /// A pull that waited while its tenant was suspended.
    #[error("there is no such stream")]
    NoStream,
    #[error("the tenant has a stream of this name: change it with PATCH, or choose another name")]
    StreamExists,
    #[error("a tenant can have at most {0} streams: delete those that are no longer needed")]
    TooManyStreams(i64),
    #[error(
        "{0} readers have a lease on this stream: release those that no longer read, or wait until their leases end"
    )]
    TooManyReaders(usize),
    #[error(
        "nothing was acknowledged: the lease of this reader ended and another reader has some of its parts, or a seek or a failover has ended all leases. Drop what you have not finished, and pull again: messages that are not acknowledged come again"
    )]
    LeaseLost,
    #[error(
        "the reader `{0}` has a lease: release it, wait until the lease ends, or seek with `force: true`, which ends all leases"
    )]
    StreamInUse(String),
    #[error(
        "unacknowledged messages are no longer retained{0}. To continue with the oldest that is, send POST /hub/v1/streams/{{name}}/seek with {{\"position\": \"oldest\", \"force\": true}}"
    )]
    PositionLapsed(String),
    #[error(
        "the stream does not contain this event: its type or payload does not match, it was posted before the stream was created, or it is not fanned out yet. Seek by `time` instead"
    )]
    EventNotInStream,
    #[error(
        "too many pulls of this tenant, or of this key, portal token or user, wait in this process: reduce `wait_ms` or the number of readers, and try again"
    )]
    TooManyPulls,
    #[error("a stored subscriber is invalid: {0}")]
    InvalidSubscriber(String),
    #[error("post: {0}")]
    Post(#[from] PostError),
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

/// The work on a schema has not led to a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoVerdict {
    #[error("too much work on schemas of this tenant waits")]
    Busy,
    #[error("the check of an imported file took too long")]
    FileTooLong,
    #[error("the work on a schema ended without a result")]
    Failed,
}

impl From<NoVerdict> for Problem {
    fn from(error: NoVerdict) -> Problem {
        match error {
            NoVerdict::Busy => Problem::overloaded(
                "the schemas of this tenant keep their threads busy: send fewer requests that check or change event types at the \
                 same time, or this one again later",
                VERDICT_AGAIN_AFTER,
            ),
            NoVerdict::FileTooLong => Problem::overloaded(
                "the file takes too long to check: import fewer types at a time, or the same file again later",
                VERDICT_AGAIN_AFTER,
            ),
            NoVerdict::Failed => Problem::internal(&error),
        }
    }
}

fn plural_end(count: &u32) -> &'static str {
    if *count == 1 { "" } else { "s" }
}

impl Error {
    /// One invalid field of the request body.
    pub(crate) fn field(pointer: &str, detail: impl std::fmt::Display) -> Error {
        Error::Invalid(vec![FieldError::body(pointer, detail)])
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        match error {
            Error::NoSubscriber => Problem::not_found("subscriber-not-found", &error),
            Error::NoEvent => Problem::not_found("event-not-found", &error),
            Error::NoMessage => Problem::not_found("message-not-found", &error),
            Error::NoDeadLetter => Problem::not_found("dead-letter-not-found", &error),
            Error::NoEventType => Problem::not_found("event-type-not-found", &error),
            Error::EventTypeExists(_) => Problem::conflict("event-type-exists", &error),
            Error::TooManyEventTypes(_) => Problem::conflict("too-many-event-types", &error),
            Error::TooManyVersions(_) => Problem::conflict("too-many-versions", &error),
            Error::BreakingChange(ref errors) => {
                Problem::conflict("breaking-change", &error).with_errors(errors.clone())
            }
            Error::EventTypeTooLarge { .. } | Error::CatalogueTooLarge { .. } | Error::CatalogueTooExpensive { .. } => {
                Problem::conflict("catalogue-too-large", &error)
            }
            Error::CatalogueChanged => Problem::overloaded(&error, CHANGE_AGAIN_AFTER),
            Error::NoVerdict(error) => error.into(),
            Error::NotRejected => Problem::conflict("event-not-rejected", &error),
            Error::StillRefused(ref errors) => Problem::conflict("event-refused", &error).with_errors(errors.clone()),
            Error::NoReplay => Problem::not_found("replay-not-found", &error),
            Error::ReplayEnded(_) => Problem::conflict("replay-ended", &error),
            Error::TooManyReplays(_) => Problem::conflict("too-many-replays", &error),
            Error::Invalid(errors) => Problem::validation(errors),
            Error::Stale(problem) => problem,
            Error::TooManySecrets(_) => Problem::conflict("too-many-secrets", &error),
            Error::NoTenant(_) => Problem::not_found("tenant-not-found", &error),
            Error::Suspended(tenant) => tenant_suspended(&tenant),
            Error::TooManySubscribers(_, _) => Problem::conflict("too-many-subscribers", &error),
            Error::AlreadyFinal(_) => Problem::conflict("message-settled", &error),
            Error::AlreadyRetried | Error::RetriedBefore => Problem::conflict("already-retried", &error),
            Error::SubscriberDeleted => Problem::conflict("subscriber-gone", &error),
            Error::EventExpired => Problem::conflict("event-gone", &error),
            Error::Undecryptable => Problem::conflict("subscriber-unopened", &error),
            Error::NoStream => Problem::not_found("stream-not-found", &error),
            Error::StreamExists => Problem::conflict("stream-exists", &error),
            Error::TooManyStreams(_) => Problem::conflict("too-many-streams", &error),
            Error::TooManyReaders(_) => Problem::conflict("too-many-readers", &error),
            Error::LeaseLost => Problem::conflict("lease-lost", &error),
            Error::StreamInUse(_) => Problem::conflict("stream-in-use", &error),
            Error::PositionLapsed(_) => Problem::new(StatusCode::GONE, "position-lapsed", &error),
            Error::EventNotInStream => Problem::not_found("event-not-in-stream", &error),
            Error::TooManyPulls => {
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "too-many-pulls", &error).retry_after(PULL_AGAIN_AFTER)
            }
            Error::InvalidSubscriber(_) | Error::InvalidStoredSchema(_) => Problem::internal(&error),
            Error::Post(cause) => cause.into(),
            Error::Database(cause) => http_kit::database::problem(&cause),
        }
    }
}
