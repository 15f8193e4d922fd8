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
