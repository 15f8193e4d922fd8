//! The naive implementation: one transaction per join that locks the event, decides, writes the same rows, and commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use pillarbox::log::{Post, Source, post};
use serde_json::json;
use serde_json::value::to_raw_value;
use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use super::Joiner;
use crate::Outcome;

/// Returns the joins per second.
pub(super) async fn run(url: &str, joiners: Vec<Joiner>, clients: usize) -> Outcome<f64> {
    let (next, joiners) = (Arc::new(AtomicUsize::new(0)), Arc::new(joiners));
    let mut connections = Vec::new();
    for _ in 0..clients {
        connections.push(PgConnection::connect(url).await?);
    }
    let began = Instant::now();
    let client = |connection| tokio::spawn(join_all(connection, joiners.clone(), next.clone()));
    let tasks: Vec<_> = connections.into_iter().map(client).collect();
    for task in tasks {
        task.await??;
    }
    Ok(joiners.len() as f64 / began.elapsed().as_secs_f64())
}

async fn join_all(mut connection: PgConnection, joiners: Arc<Vec<Joiner>>, next: Arc<AtomicUsize>) -> Outcome<()> {
    while let Some(joiner) = joiners.get(next.fetch_add(1, Ordering::Relaxed)) {
        join(&mut connection, joiner).await?;
    }
    connection.close().await?;
    Ok(())
}

async fn join(connection: &mut PgConnection, joiner: &Joiner) -> Outcome<()> {
    let mut tx = connection.begin().await?;
    let (capacity, active, waitlisted, seq, version): (i32, i32, i32, i64, i64) = sqlx::query_as(
        "select capacity, active_count, waitlist_count, next_seq, version from pillarbox_joins.event_capacity
         where event_id = $1 for update",
    )
    .bind(joiner.event)
    .fetch_one(&mut *tx)
    .await?;
    let has_seat = active < capacity;
    let (status, topic) = if has_seat { ("active", "join.confirmed") } else { ("waitlisted", "join.waitlisted") };
    let (active, waitlisted) = (active + i32::from(has_seat), waitlisted + i32::from(!has_seat));
    let (id, key) = (Uuid::now_v7(), joiner.user.as_bytes().as_slice());
    let answer = json!({"id": id, "event_id": joiner.event, "user_id": joiner.user, "status": status, "seq": seq});
    store_response(&mut tx, key, &serde_json::to_vec(&answer)?).await?;
    sqlx::query(
        "insert into pillarbox_joins.joins (id, event_id, user_id, status, seq, created_at, updated_at, activated_at)
         values ($1, $2, $3, $4::pillarbox_joins.join_status, $5, now(), now(), case when $4 = 'active' then now() end)",
    )
    .bind(id)
    .bind(joiner.event)
    .bind(joiner.user)
    .bind(status)
    .bind(seq)
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "insert into pillarbox_joins.history (event_id, version, user_id, action, seq, to_status, by, at)
         values ($1, $2, $3, 'joined', $4, $5::pillarbox_joins.join_status, $6, now())",
    )
    .bind(joiner.event)
    .bind(version + 1)
    .bind(joiner.user)
    .bind(seq)
    .bind(status)
    .bind(format!("user:{}", joiner.user))
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "update pillarbox_joins.event_capacity
         set active_count = $2, waitlist_count = $3, next_seq = $4, version = $5 where event_id = $1",
    )
    .bind(joiner.event)
    .bind(active)
    .bind(waitlisted)
    .bind(seq + 1)
    .bind(version + 1)
    .execute(&mut *tx)
    .await?;
    let counts = json!({"active": active, "waitlisted": waitlisted, "version": version + 1});
    let payload = json!({"event_id": joiner.event, "user_id": joiner.user, "join_id": id, "status": status, "seq": seq,
        "counts": counts, "occurred_at": chrono::Utc::now(), "trace_id": format!("{:032x}", id.as_u128())});
    let message = Post::new(topic, to_raw_value(&payload)?).with_key(joiner.event.to_string());
    post(&mut tx, &Source::new("joins"), &message).await?;
    tx.commit().await?;
    Ok(())
}

/// Stores the response under the idempotency key, as the service does.
async fn store_response(db: &mut PgConnection, key: &[u8], body: &[u8]) -> Outcome<()> {
    let insert = "insert into pillarbox.idempotency (id, fingerprint, status, body, expires_at)
                  values ($1, $1, 201, $2, now() + '24 hours') on conflict do nothing";
    sqlx::query(insert).bind(key).bind(body).execute(db).await?;
    Ok(())
}
