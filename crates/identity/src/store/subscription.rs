//! Subscriptions to paid plans.

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use crate::domain::Subscription;

const COLUMNS: &str = "id, user_id, plan, status, created_at, updated_at, ended_at, version";

/// Inserts a subscription. Returns false if the user has a live one to the same plan.
pub(crate) async fn insert(db: &mut PgConnection, new: &Subscription) -> sqlx::Result<bool> {
    let query =
        "insert into pillarbox_identity.subscription (id, user_id, plan, status, created_at, updated_at, version)
                 values ($1, $2, $3, $4, $5, $6, $7)
                 on conflict (user_id, plan) where status not in ('cancelled', 'expired') do nothing";
    let done = sqlx::query(query)
        .bind(new.id)
        .bind(new.user_id)
        .bind(&new.plan)
        .bind(new.status.into_str())
        .bind(new.created_at)
        .bind(new.updated_at)
        .bind(new.version)
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// The number of subscriptions of a user that have not ended.
pub(crate) async fn count_live(db: &mut PgConnection, user_id: Uuid) -> sqlx::Result<i64> {
    let query = "select count(*) from pillarbox_identity.subscription
                 where user_id = $1 and status not in ('cancelled', 'expired')";
    sqlx::query_scalar(query).bind(user_id).fetch_one(db).await
}

pub(crate) async fn find(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Subscription>> {
    let query = format!("select {COLUMNS} from pillarbox_identity.subscription where id = $1");
    sqlx::query_as(AssertSqlSafe(query)).bind(id).fetch_optional(db).await
}

/// Finds a subscription and locks its row until the end of the transaction.
pub(crate) async fn lock(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Subscription>> {
    let query = format!("select {COLUMNS} from pillarbox_identity.subscription where id = $1 for update");
    sqlx::query_as(AssertSqlSafe(query)).bind(id).fetch_optional(db).await
}

/// Finds the subscriptions of a user that have not ended, and locks their rows.
pub(crate) async fn lock_live(db: &mut PgConnection, user_id: Uuid) -> sqlx::Result<Vec<Subscription>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_identity.subscription
         where user_id = $1 and status not in ('cancelled', 'expired') order by created_at, id for update"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(user_id).fetch_all(db).await
}

/// The subscriptions of a user, newest first.
pub(crate) async fn list(
    db: &mut PgConnection,
    user_id: Uuid,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> sqlx::Result<Vec<Subscription>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_identity.subscription
         where user_id = $1 and ($2::timestamptz is null or (created_at, id) < ($2, $3))
         order by created_at desc, id desc limit $4"
    );
    sqlx::query_as(AssertSqlSafe(query))
        .bind(user_id)
        .bind(before.map(|(at, _)| at))
        .bind(before.map(|(_, id)| id))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await
}

pub(crate) async fn update(db: &mut PgConnection, changed: &Subscription) -> sqlx::Result<()> {
    let query = "update pillarbox_identity.subscription set status = $2, updated_at = $3, ended_at = $4, version = $5
                 where id = $1";
    sqlx::query(query)
        .bind(changed.id)
        .bind(changed.status.into_str())
        .bind(changed.updated_at)
        .bind(changed.ended_at)
        .bind(changed.version)
        .execute(db)
        .await
        .map(drop)
}
