//! The audit trail: the status changes of all events, newest first.

use chrono::{DateTime, Utc};
use http_kit::auth::Principal;
use sqlx::{PgConnection, QueryBuilder};
use uuid::Uuid;

use super::event::STATUS_CHANGE_COLUMNS;
use crate::domain::StatusChange;

/// Selects status changes; a None field matches all.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AuditFilter {
    pub(crate) event_id: Option<Uuid>,
    pub(crate) by: Option<Principal>,
}

/// Time, event and version of a status change.
pub(crate) type AuditPosition = (DateTime<Utc>, Uuid, i64);

/// The status changes before `before`. An index serves each filter, in this order; of one event there are few.
pub(crate) async fn list(
    db: &mut PgConnection,
    filter: &AuditFilter,
    before: Option<AuditPosition>,
    limit: u32,
) -> sqlx::Result<Vec<StatusChange>> {
    let mut query =
        QueryBuilder::new(format!("select {STATUS_CHANGE_COLUMNS} from pillarbox_events.status_change where true"));
    if let Some(event_id) = filter.event_id {
        query.push(" and event_id = ").push_bind(event_id);
    }
    if let Some(by) = filter.by {
        query.push(" and changed_by = ").push_bind(by.id()).push(" and by_key = ").push_bind(by.is_key());
    }
    if let Some((at, event_id, version)) = before {
        query.push(" and (at, event_id, version) < (").push_bind(at).push(", ");
        query.push_bind(event_id).push(", ").push_bind(version).push(")");
    }
    query.push(" order by at desc, event_id desc, version desc limit ").push_bind(i64::from(limit));
    query.build_query_as().fetch_all(db).await
}
