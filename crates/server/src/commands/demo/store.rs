//! SQL of the demo: what an application does in its own transaction.

use serde_json::Value;
use sqlx::PgConnection;

/// Posts a message, as an application does in the transaction of a change.
pub(super) async fn post_order(db: &mut PgConnection, topic: &str, order: &Value, key: &str) -> sqlx::Result<()> {
    sqlx::query("select pillarbox.post($1, $2::text::json, key => $3)")
        .bind(topic)
        .bind(order.to_string())
        .bind(key)
        .execute(db)
        .await
        .map(drop)
}
