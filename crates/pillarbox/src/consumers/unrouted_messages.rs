//! Storage of unrouted messages: RabbitMQ had no queue for them, and their route does not require one. The route has passed
//! them, so these rows distinguish them from messages that were sent.

use sqlx::PgConnection;

use crate::log::Message;

/// Deletes the rows of the messages that were published again, and inserts the messages that no queue took.
pub(super) async fn replace(
    tx: &mut PgConnection,
    consumer: &str,
    republished: &[&Message],
    unrouted: &[i64],
) -> sqlx::Result<()> {
    if let Some(oldest) = republished.iter().map(|message| message.at).min() {
        // No row is older than its message, so older days need not be searched. A margin of one hour: the clock may have been
        // set back.
        let query = "delete from pillarbox.unrouted
                     where consumer = $1 and log_id = any($2) and at >= $3::timestamptz - interval '1 hour'";
        let ids: Vec<i64> = republished.iter().map(|message| message.id).collect();
        sqlx::query(query).bind(consumer).bind(ids).bind(oldest).execute(&mut *tx).await?;
    }
    if !unrouted.is_empty() {
        let query = "insert into pillarbox.unrouted (consumer, log_id) select $1, * from unnest($2::bigint[])";
        sqlx::query(query).bind(consumer).bind(unrouted).execute(tx).await?;
    }
    Ok(())
}
