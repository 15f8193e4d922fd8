//! Gives up webhooks that wait: the whole backlog of a restored copy of a database, in which nothing of it must be sent, and
//! the deferred events that fan-out is to skip.

use chrono::{DateTime, Utc};
use pillarbox::log;
use sqlx::PgConnection;

use crate::deliveries::message::HubEvent;
use crate::fanout::store;
use crate::{events, subscribers};

/// Messages that are processed at a time: their content is in memory.
const CHUNK: usize = 500;

/// Makes a dead letter of every message without a final outcome, and moves every subscriber's position after the newest
/// message. Returns how many dead letters it made. No dispatcher may run at the same time.
pub async fn dead_letter_backlog(tx: &mut PgConnection, now: DateTime<Utc>) -> sqlx::Result<u64> {
    store::recovery::disable_statement_timeout(tx).await?;
    let mut count = 0;
    for subscriber in subscribers::store::load_all(tx).await? {
        let pending = store::recovery::pending_messages(tx, subscriber.id).await?;
        for chunk in pending.chunks(CHUNK) {
            let log_refs = store::recovery::log_refs(tx, subscriber.id, chunk).await?;
            let messages = log::load_messages(tx, &log_refs).await?;
            let events: Vec<(i64, HubEvent)> =
                messages.iter().map(|message| (message.id, HubEvent::from_log(message))).collect();
            store::recovery::insert_dead_letters(tx, &subscriber, chunk, &events, now).await?;
        }
        count += pending.len() as u64;
    }
    // Like the events that fan-out has not read yet, those that it has deferred get no messages.
    events::store::deferred::delete_before(tx, None).await?;
    store::recovery::skip_to_newest(tx, now).await?;
    Ok(count)
}

/// The number of events that fan-out has read from the log and deferred.
pub async fn count_deferred(db: &mut PgConnection) -> sqlx::Result<i64> {
    events::store::deferred::count(db).await
}

/// Skips the deferred events that were posted before a time; None: all. Returns how many. No fan-out may be able to commit a
/// turn: the caller has removed its shard worker in the same transaction.
pub async fn skip_deferred(tx: &mut PgConnection, before: Option<DateTime<Utc>>) -> sqlx::Result<u64> {
    events::store::deferred::delete_before(tx, before).await
}
