//! Giving up all that waits, where nothing of it is to be sent: in a copy of a database.

use chrono::{DateTime, Utc};
use mailbox::log;
use sqlx::PgConnection;

use crate::dispatch::Event;
use crate::store;

/// Messages at a time: their content is in memory.
const SLICE: usize = 500;

/// Makes a dead letter of every message that waits, and lets every subscriber go on behind them; returns how many. Nobody
/// may be sending meanwhile.
pub async fn set_aside(tx: &mut PgConnection, now: DateTime<Utc>) -> sqlx::Result<u64> {
    store::aside::take_time(tx).await?;
    let mut count = 0;
    for subscriber in store::subscriber::all(tx).await? {
        let waiting = store::aside::waiting(tx, subscriber.id).await?;
        for slice in waiting.chunks(SLICE) {
            let places = store::aside::places(tx, subscriber.id, slice).await?;
            let messages = log::at_places(tx, &places).await?;
            let events: Vec<(i64, Event)> = messages.iter().map(|message| (message.id, Event::of(message))).collect();
            store::aside::bury(tx, &subscriber, slice, &events, now).await?;
        }
        count += waiting.len() as u64;
    }
    store::aside::pass_all(tx, now).await?;
    Ok(count)
}
