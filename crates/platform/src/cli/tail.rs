//! `tail`: the log, as it grows.

use std::io::Write;
use std::time::Duration;

use chrono::{DateTime, Utc};
use contracts::EventId;
use mailbox::filter::{Filter, Matching};
use mailbox::log::{Message, Reader};
use mailbox::moment::Moment;
use mailbox::post::AggregateId;
use serde::Serialize;
use serde_json::value::RawValue;

use super::Failure;
use super::operate::connect;
use crate::settings::Settings;

/// A long log is printed as it is read.
const CHUNK: u32 = 1_000;
const PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn tail(
    settings: &Settings,
    from_beginning: bool,
    once: bool,
    topic: Option<String>,
) -> Result<(), Failure> {
    let pool = connect(settings)?;
    let mut db = pool.acquire().await?;
    let start = if from_beginning { Moment::beginning(&mut db).await? } else { Moment::now(&mut db).await? };
    let filter = match topic {
        Some(topic) => {
            let under = Matching::topic(&format!("{topic}.#"));
            under.check().map_err(Failure::Other)?;
            Filter::matching(&under)
        }
        None => Filter::everything(),
    };
    let mut reader = Reader::of_all_shards(filter, &start);
    loop {
        reader.open(&Moment::now(&mut db).await?);
        while !reader.is_done() {
            if print(&reader.read(&mut db, CHUNK).await?).is_err() {
                return Ok(()); // whoever read it has enough
            }
        }
        if once {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
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
