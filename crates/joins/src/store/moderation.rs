//! Reads of moderation: bans, and the history.

use chrono::{DateTime, Utc};
use http_kit::auth::Principal;
use sqlx::{AssertSqlSafe, PgConnection, QueryBuilder};
use uuid::Uuid;

use crate::domain::{Ban, StoredEntry};

const ENTRY_COLUMNS: &str = "event_id, version, user_id, action, seq, from_status::text as from_status,
    to_status::text as to_status, by, reason, at";
/// The condition of the partial indexes on moderation.
const IS_MODERATION: &str = "action in ('kicked', 'banned', 'unbanned')";

/// Selects moderation of all events; a None field matches all.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AuditFilter {
    pub(crate) event_id: Option<Uuid>,
    pub(crate) by: Option<Principal>,
}

/// Time, event and version of an entry.
pub(crate) type AuditPosition = (DateTime<Utc>, Uuid, i64);

/// The bans of an event that are in force, newest first, before `before`.
pub(crate) async fn bans(
    db: &mut PgConnection,
    event_id: Uuid,
    now: DateTime<Utc>,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> sqlx::Result<Vec<Ban>> {
    let mut query = QueryBuilder::new("select * from pillarbox_joins.event_bans where event_id = ");
    query.push_bind(event_id).push(" and (expires_at is null or expires_at > ").push_bind(now).push(")");
    if let Some((created_at, id)) = before {
        query.push(" and (created_at, id) < (").push_bind(created_at).push(", ").push_bind(id).push(")");
    }
    query.push(" order by created_at desc, id desc limit ").push_bind(i64::from(limit));
    query.build_query_as().fetch_all(db).await
}

/// The history of an event, oldest first, after this version.
pub(crate) async fn history(
    db: &mut PgConnection,
    event_id: Uuid,
    after: Option<i64>,
    limit: u32,
) -> sqlx::Result<Vec<StoredEntry>> {
    let query = format!(
        "select {ENTRY_COLUMNS} from pillarbox_joins.history
         where event_id = $1 and version > $2 order by version limit $3"
    );
    let query = sqlx::query_as(AssertSqlSafe(query)).bind(event_id).bind(after.unwrap_or(0)).bind(i64::from(limit));
    query.fetch_all(db).await
}

/// The kicks, bans and lifted bans of all events, newest first, before `before`. A partial index serves each filter; of one
/// event there are few.
pub(crate) async fn audit(
    db: &mut PgConnection,
    filter: &AuditFilter,
    before: Option<AuditPosition>,
    limit: u32,
) -> sqlx::Result<Vec<StoredEntry>> {
    let mut query =
        QueryBuilder::new(format!("select {ENTRY_COLUMNS} from pillarbox_joins.history where {IS_MODERATION}"));
    if let Some(event_id) = filter.event_id {
        query.push(" and event_id = ").push_bind(event_id);
    }
    if let Some(by) = filter.by {
        query.push(" and by = ").push_bind(by.to_string());
    }
    if let Some((at, event_id, version)) = before {
        query.push(" and (at, event_id, version) < (").push_bind(at).push(", ");
        query.push_bind(event_id).push(", ").push_bind(version).push(")");
    }
    query.push(" order by at desc, event_id desc, version desc limit ").push_bind(i64::from(limit));
    query.build_query_as().fetch_all(db).await
}
