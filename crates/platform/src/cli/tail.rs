//! `tail`: the log, as it grows.

use std::io::Write;
use std::time::Duration;

use chrono::{DateTime, Utc};
use contracts::EventId;
use mailbox::log::{Message, Moment, Place, SHARDS};
use mailbox::post::AggregateId;
use serde::Serialize;
use serde_json::value::RawValue;

use super::Failure;
use super::operate::connect;
use crate::settings::Settings;

/// Of each shard at a time: a long log is printed as it is read.
const CHUNK: u32 = 100;
const PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn tail(
    settings: &Settings,
    from_beginning: bool,
    once: bool,
    topic: Option<String>,
) -> Result<(), Failure> {
    let pool = connect(settings)?;
    let mut db = pool.acquire().await?;
    let start = if from_beginning { Moment::beginning() } else { Moment::now(&mut db).await? };
    let mut places = vec![Place::behind(start); SHARDS as usize];
    loop {
        let now = Moment::now(&mut db).await?;
        places.iter_mut().for_each(|place| place.open(now.clone()));
        while !places.iter().all(Place::is_done) {
            let mut messages = Vec::new();
            for (shard, place) in (0..).zip(&mut places).filter(|(_, place)| !place.is_done()) {
                messages.extend(place.read(&mut db, shard, CHUNK).await?);
            }
            messages.retain(|message| topic.as_deref().is_none_or(|topic| is_under(&message.topic, topic)));
            messages.sort_by_key(|message| message.id);
            if print(&messages).is_err() {
                return Ok(()); // whoever read it has enough
            }
        }
        if once {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn is_under(topic: &str, wanted: &str) -> bool {
    topic.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[derive(Serialize)]
struct Line<'a> {
    id: i64,
    event_id: EventId,
    at: DateTime<Utc>,
    source: &'a str,
    tenant: &'a str,
    topic: &'a str,
    key: Option<&'a str>,
    aggregate_type: Option<&'a str>,
    aggregate_id: Option<&'a AggregateId>,
    headers: &'a RawValue,
    payload: &'a RawValue,
}

fn print(messages: &[Message]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for message in messages {
        let line = Line {
            id: message.id,
            event_id: EventId(message.message_id),
            at: message.at,
            source: &message.source,
            tenant: &message.tenant,
            topic: &message.topic,
            key: message.key.as_deref(),
            aggregate_type: message.aggregate_type.as_deref(),
            aggregate_id: message.aggregate_id.as_ref(),
            headers: &message.headers,
            payload: &message.payload,
        };
        serde_json::to_writer(&mut out, &line)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_covers_itself_and_what_is_below_it() {
        assert!(is_under("order", "order") && is_under("order.created", "order"));
        assert!(!is_under("orders.created", "order") && !is_under("order", "order.created"));
    }
}
