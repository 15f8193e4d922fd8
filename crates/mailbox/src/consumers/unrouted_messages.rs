//! Storage of unrouted messages: RabbitMQ had no queue for them, and their route does not require one. The route has passed
//! them, so these rows distinguish them from messages that were sent.

use sqlx::PgConnection;

/// Deletes the rows of the messages that were published again, and inserts the messages that no queue took.
pub(super) async fn replace(
    tx: &mut PgConnection,
    consumer: &str,
    repeated: &[i64],
    unrouted: &[i64],
) -> sqlx::Result<()> {
    if !repeated.is_empty() {
        let query = "delete from pillarbox.unrouted where consumer = $1 and log_id = any($2)";
        sqlx::query(query).bind(consumer).bind(repeated).execute(&mut *tx).await?;
    }
    if !unrouted.is_empty() {
        let query = "insert into pillarbox.unrouted (consumer, log_id) select $1, * from unnest($2::bigint[])";
        sqlx::query(query).bind(consumer).bind(unrouted).execute(tx).await?;
    }
    Ok(())
}
