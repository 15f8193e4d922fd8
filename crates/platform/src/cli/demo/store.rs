//! SQL of the demo: what an application does in its own transaction.

use serde_json::Value;
use sqlx::PgPool;

/// Posts a message in a transaction, as an application does with its own change.
pub(super) async fn post_order(db: &PgPool, topic: &str, order: &Value, key: &str) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    sqlx::query("select pillarbox.post($1, $2::text::json, key => $3)")
        .bind(topic)
        .bind(order.to_string())
        .bind(key)
        .execute(&mut *tx)
        .await?;
    tx.commit().await
}
