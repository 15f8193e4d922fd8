//! Who keeps references into the log says from when on it needs it.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

/// From here on the log is kept for `holder`; None lets go. What is referred to newly is young, so a hold that is renewed
/// now and then is never too late.
pub async fn set(db: &mut PgConnection, holder: &str, from: Option<DateTime<Utc>>) -> sqlx::Result<()> {
    let query = match from {
        Some(_) => {
            "insert into pillarbox.hold (holder, from_at) values ($1, $2)
             on conflict (holder) do update set from_at = excluded.from_at"
        }
        None => "delete from pillarbox.hold where holder = $1 and $2::timestamptz is null",
    };
    sqlx::query(query).bind(holder).bind(from).execute(db).await.map(drop)
}
