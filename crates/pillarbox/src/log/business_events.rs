//! Business events, which other applications post about an aggregate of a known type, and the table of these types.
//!
//! `pillarbox.notify` in SQL is the implementation, so that a post by HTTP and a post in a transaction of the producer follow
//! the same rules and have the same ids.

use runtime::trace::TraceContext;
use serde_json::json;
use serde_json::value::RawValue;
use sqlx::postgres::PgDatabaseError;
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::database::{is_data_error, redacted_error};

/// An event to post.
#[derive(Debug, Clone)]
pub struct BusinessEvent {
    /// The id that the producer knows the event by. None for a new one.
    pub event_id: Option<String>,
    /// Its type, which becomes the topic.
    pub event_type: String,
    /// The type of what it is about.
    pub aggregate_type: String,
    /// The id of what it is about.
    pub aggregate_id: i64,
    /// Delivered byte for byte as it is here.
    pub payload: Box<RawValue>,
    /// None: events are in order for each aggregate.
    pub key: Option<String>,
}

/// Why a business event was not posted. The transaction has failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say what they mean")]
pub enum BusinessEventError {
    /// With the known types.
    #[error("is unknown. {0}")]
    UnknownType(String),
    #[error(
        "this event_id was posted before with another type, aggregate, key or payload: choose another id for another event, \
         or repeat the same request"
    )]
    Conflict,
    #[error("another transaction that has posted this event_id has not ended yet: repeat the request")]
    InProgress,
    #[error("PostgreSQL cannot store the event: {0}")]
    Invalid(String),
    #[error("database: {0}")]
    Database(sqlx::Error),
}

const UNIQUE_VIOLATION: &str = "23505";
const FOREIGN_KEY_VIOLATION: &str = "23503";
const LOCK_NOT_AVAILABLE: &str = "55P03";
/// How long a post waits for another transaction that has posted the same event id, and may roll back. A producer can leave its
/// transaction open for hours, and the connections are few.
const LOCK_WAIT_MAX_MS: u32 = 1_000;

impl From<sqlx::Error> for BusinessEventError {
    fn from(error: sqlx::Error) -> BusinessEventError {
        let cause = error.as_database_error().and_then(|cause| cause.try_downcast_ref::<PgDatabaseError>());
        match cause.map(|cause| (cause.code(), cause.hint())) {
            Some((UNIQUE_VIOLATION, _)) => BusinessEventError::Conflict,
            Some((LOCK_NOT_AVAILABLE, _)) => BusinessEventError::InProgress,
            Some((FOREIGN_KEY_VIOLATION, hint)) => BusinessEventError::UnknownType(hint.unwrap_or_default().to_owned()),
            Some(_) if is_data_error(&error) => BusinessEventError::Invalid(redacted_error(&error)),
            Some(_) | None => BusinessEventError::Database(error),
        }
    }
}

/// Posts a business event, and returns the id of its message. An event id that was posted before does not make a second event. The locks of
/// the rest of the transaction are not waited for any longer, either.
pub async fn post_business_event(
    tx: &mut Transaction<'_, Postgres>,
    event: &BusinessEvent,
) -> Result<Uuid, BusinessEventError> {
    let headers = TraceContext::current().map_or(json!({}), |trace| json!({"traceparent": trace.to_string()}));
    // One round trip: the limit applies to the locks that the function waits for.
    let query = "with limits as materialized (select set_config('lock_timeout', $8, true))
                 select pillarbox.notify($1, $2, $3, $4::text::json, $5, $6, $7) from limits";
    let posted = sqlx::query_scalar(query)
        .bind(&event.event_type)
        .bind(&event.aggregate_type)
        .bind(event.aggregate_id)
        .bind(event.payload.get())
        .bind(&event.event_id)
        .bind(&event.key)
        .bind(headers)
        .bind(LOCK_WAIT_MAX_MS.to_string())
        .fetch_one(&mut **tx)
        .await?;
    Ok(posted)
}

/// The id of the message of a business event with this id of its producer; the same one if it is the id of a message.
pub async fn message_id_of(db: &mut PgConnection, event_id: &str) -> sqlx::Result<Uuid> {
    sqlx::query_scalar("select pillarbox.message_id_of($1)").bind(event_id).fetch_one(db).await
}

/// The names of all aggregate types, in order.
pub async fn aggregate_types(db: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar("select name from pillarbox.aggregate_type order by name").fetch_all(db).await
}

/// Locks those of the types that exist, so that they are not deleted before the end of the transaction. Returns their names.
pub async fn lock_aggregate_types(tx: &mut Transaction<'_, Postgres>, names: &[&str]) -> sqlx::Result<Vec<String>> {
    let query = "select name from pillarbox.aggregate_type where name = any($1) order by name for key share";
    sqlx::query_scalar(query).bind(names).fetch_all(&mut **tx).await
}

/// Adds a type. Returns false if it exists.
pub async fn add_aggregate_type(db: &mut PgConnection, name: &str) -> sqlx::Result<bool> {
    let query = "insert into pillarbox.aggregate_type (name) values ($1) on conflict do nothing";
    Ok(sqlx::query(query).bind(name).execute(db).await?.rows_affected() > 0)
}

/// Deletes a type. Returns false if there is none.
pub async fn delete_aggregate_type(db: &mut PgConnection, name: &str) -> sqlx::Result<bool> {
    let query = "delete from pillarbox.aggregate_type where name = $1";
    Ok(sqlx::query(query).bind(name).execute(db).await?.rows_affected() > 0)
}
