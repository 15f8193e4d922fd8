//! Requests that were accepted and wait to be processed.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

/// A request, and the address that it is for.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct AcceptedRequest {
    pub(crate) email: String,
    #[sqlx(flatten, try_from = "RequestedColumns")]
    pub(crate) requested: Requested,
}

/// The kind of a request for an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Requested {
    Registration { name: String, locale: String, password_hash: String },
    Verification,
    PasswordReset,
}

/// The columns of [`Requested`]. Only a registration has a name, a locale and a hash.
#[derive(sqlx::FromRow)]
struct RequestedColumns {
    kind: String,
    name: Option<String>,
    locale: Option<String>,
    password_hash: Option<String>,
}

impl From<RequestedColumns> for Requested {
    fn from(RequestedColumns { kind, name, locale, password_hash }: RequestedColumns) -> Requested {
        match (name, locale, password_hash) {
            (Some(name), Some(locale), Some(password_hash)) => Requested::Registration { name, locale, password_hash },
            _ if kind == "verification" => Requested::Verification,
            _ => Requested::PasswordReset,
        }
    }
}

pub(crate) async fn insert(
    db: &mut PgConnection,
    id: Uuid,
    email: &str,
    requested: &Requested,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let (kind, fields) = match requested {
        Requested::Registration { name, locale, password_hash } => {
            ("registration", Some((name.as_str(), locale.as_str(), password_hash.as_str())))
        }
        Requested::Verification => ("verification", None),
        Requested::PasswordReset => ("password_reset", None),
    };
    let query = "insert into pillarbox_identity.accepted_request
                     (id, kind, email, name, locale, password_hash, accepted_at, due_at)
                 values ($1, $2, $3, $4, $5, $6, $7, $7)";
    sqlx::query(query)
        .bind(id)
        .bind(kind)
        .bind(email)
        .bind(fields.map(|(name, _, _)| name))
        .bind(fields.map(|(_, locale, _)| locale))
        .bind(fields.map(|(_, _, hash)| hash))
        .bind(now)
        .execute(db)
        .await
        .map(drop)
}

/// Deletes a request and returns it, so that it is processed once. None if another process does it at the same time, or has
/// done it.
pub(crate) async fn claim(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<AcceptedRequest>> {
    let query = "delete from pillarbox_identity.accepted_request where id =
                     (select id from pillarbox_identity.accepted_request where id = $1 for update skip locked)
                 returning kind, email, name, locale, password_hash";
    sqlx::query_as(query).bind(id).fetch_optional(db).await
}

/// The ids of requests that are due, oldest first. Each is due again later, so that one that fails does not delay others.
pub(crate) async fn due(
    db: &mut PgConnection,
    now: DateTime<Utc>,
    again_at: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<Uuid>> {
    let query = "update pillarbox_identity.accepted_request set due_at = $2 where id in
                     (select id from pillarbox_identity.accepted_request where due_at <= $1
                      order by due_at limit $3 for update skip locked)
                 returning id";
    sqlx::query_scalar(query).bind(now).bind(again_at).bind(limit).fetch_all(db).await
}

/// Deletes the requests of an address, except those that are being processed: they wait for the account, which the caller has
/// locked, so waiting for them would be a deadlock. They find no account afterwards.
pub(crate) async fn delete_of_email(db: &mut PgConnection, email: &str) -> sqlx::Result<()> {
    let query = "delete from pillarbox_identity.accepted_request where id in
                     (select id from pillarbox_identity.accepted_request where email = $1 for update skip locked)";
    sqlx::query(query).bind(email).execute(db).await.map(drop)
}
