//! The inbox: ids of messages that a handler has already processed. A message takes effect once for each consumer and
//! run, however often it is delivered.

use std::collections::HashSet;

use sqlx::PgConnection;
use uuid::Uuid;

/// Records that the transaction processes these messages (id and run). Returns those that were not processed before.
pub async fn insert(
    tx: &mut PgConnection,
    consumer: &str,
    messages: &[(Uuid, i32)],
) -> sqlx::Result<HashSet<(Uuid, i32)>> {
    let (ids, runs): (Vec<Uuid>, Vec<i32>) = messages.iter().copied().unzip();
    let new: Vec<(Uuid, i32)> = sqlx::query_as(
        "insert into pillarbox.inbox (consumer, message_id, run) select $1, * from unnest($2::uuid[], $3::integer[])
         on conflict do nothing returning message_id, run",
    )
    .bind(consumer)
    .bind(ids)
    .bind(runs)
    .fetch_all(tx)
    .await?;
    Ok(new.into_iter().collect())
}

/// Records that the transaction processes messages of other producers, whose ids can be any text. Returns those that were
/// not processed before.
pub async fn insert_foreign(tx: &mut PgConnection, consumer: &str, ids: &[String]) -> sqlx::Result<HashSet<String>> {
    let new: Vec<String> = sqlx::query_scalar(
        "insert into pillarbox.inbox_foreign (consumer, message_id) select distinct $1, id from unnest($2::text[]) as id
         on conflict do nothing returning message_id",
    )
    .bind(consumer)
    .bind(ids)
    .fetch_all(tx)
    .await?;
    Ok(new.into_iter().collect())
}
