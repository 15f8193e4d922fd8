//! The audit trail of accounts.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

/// An action on an account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum AuditAction {
    Deleted,
    Expired,
    RoleGranted,
    RoleWithdrawn,
}

pub(crate) async fn insert(
    db: &mut PgConnection,
    user_id: Uuid,
    action: AuditAction,
    actor: &str,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let query = "insert into pillarbox_identity.audit (at, user_id, action, actor) values ($1, $2, $3, $4)";
    sqlx::query(query).bind(now).bind(user_id).bind(action.into_str()).bind(actor).execute(db).await.map(drop)
}
