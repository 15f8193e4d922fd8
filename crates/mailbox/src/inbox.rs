//! What has taken effect: a message takes effect once for each consumer and run, however often it comes.

use std::collections::HashSet;

use sqlx::PgConnection;
use uuid::Uuid;

/// Writes down that these take effect in this transaction; returns those that had not before.
pub async fn enter(
    tx: &mut PgConnection,
    consumer: &str,
    messages: &[(Uuid, i32)],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    let (ids, runs): (Vec<Uuid>, Vec<i32>) = messages.iter().copied().unzip();
    let fresh: Vec<(Uuid, i32)> = sqlx::query_as(
        "insert into pillarbox.inbox (consumer, message_id, run) select $1, * from unnest($2::uuid[], $3::integer[])
         on conflict do nothing returning message_id, run",
    )
    .bind(consumer)
    .bind(ids)
    .bind(runs)
    .fetch_all(tx)
    .await?;
    Ok(fresh.into_iter().collect())
}

/// The same for ids that other producers made, which may be any text.
pub async fn enter_foreign(tx: &mut PgConnection, consumer: &str, ids: &[String]) -> sqlx::Result<HashSet<String>> {
    let fresh: Vec<String> = sqlx::query_scalar(
        "insert into pillarbox.inbox_foreign (consumer, message_id) select distinct $1, id from unnest($2::text[]) as id
         on conflict do nothing returning message_id",
    )
    .bind(consumer)
    .bind(ids)
    .fetch_all(tx)
    .await?;
    Ok(fresh.into_iter().collect())
}
