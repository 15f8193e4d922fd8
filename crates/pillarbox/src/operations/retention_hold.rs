//! Retention holds: a component that references old log entries states from when on it needs them.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

/// Makes retention preserve the log from this time on for `holder`; None removes the hold. New references are to young
/// entries, so a hold that is renewed from time to time is never too late.
pub async fn set(db: &mut PgConnection, holder: &str, from: Option<DateTime<Utc>>) -> sqlx::Result<()> {
    let query = match from {
        Some(_) => {
            "insert into pillarbox.retention_hold (holder, from_at) values ($1, $2)
             on conflict (holder) do update set from_at = excluded.from_at"
        }
        None => "delete from pillarbox.retention_hold where holder = $1 and $2::timestamptz is null",
    };
    sqlx::query(query).bind(holder).bind(from).execute(db).await.map(drop)
}

/// Identifies a state of a hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldVersion(String);

/// Makes retention also preserve the log from this time on for `holder`, as part of the caller's transaction: for new
/// references to old entries, which a renewal from time to time could miss.
pub async fn extend(tx: &mut PgConnection, holder: &str, from: DateTime<Utc>) -> sqlx::Result<()> {
    // Always an update, so that the row has another version although it has the same time.
    let query = "insert into pillarbox.retention_hold (holder, from_at) values ($1, $2)
                 on conflict (holder) do update set from_at = least(retention_hold.from_at, excluded.from_at)";
    sqlx::query(query).bind(holder).bind(from).execute(tx).await.map(drop)
}

/// Returns the version of a hold, which changes with each [`extend`]; None if there is no hold.
pub async fn version(db: &mut PgConnection, holder: &str) -> sqlx::Result<Option<HoldVersion>> {
    let query = "select xmin::text from pillarbox.retention_hold where holder = $1";
    Ok(sqlx::query_scalar(query).bind(holder).fetch_optional(db).await?.map(HoldVersion))
}

/// Removes a hold, unless it was extended since this version. Waits for transactions that are extending it.
pub async fn remove_version(db: &mut PgConnection, holder: &str, version: &HoldVersion) -> sqlx::Result<()> {
    let query = "delete from pillarbox.retention_hold where holder = $1 and xmin::text = $2";
    sqlx::query(query).bind(holder).bind(&version.0).execute(db).await.map(drop)
}
