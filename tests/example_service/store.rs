//! SQL of the greetings service. Every function joins the caller's transaction.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

pub(super) async fn insert(db: &mut PgConnection, id: Uuid, name: &str, at: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "insert into pillarbox_greetings.greeting (id, name, received_at) values ($1, $2, $3)";
    sqlx::query(query).bind(id).bind(name).bind(at).execute(db).await.map(drop)
}

pub(super) async fn mark_answered(db: &mut PgConnection, id: Uuid) -> sqlx::Result<()> {
    let query = "update pillarbox_greetings.greeting set answered = true where id = $1";
    sqlx::query(query).bind(id).execute(db).await.map(drop)
}

pub(super) async fn delete_answered(db: &mut PgConnection, before: DateTime<Utc>) -> sqlx::Result<()> {
    let query = "delete from pillarbox_greetings.greeting where answered and received_at < $1";
    sqlx::query(query).bind(before).execute(db).await.map(drop)
}
