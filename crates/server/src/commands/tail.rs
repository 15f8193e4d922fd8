//! `tail`: prints the log and follows it.

use std::time::Duration;

use admin::operator::MessageView;
use chrono::{DateTime, Utc};
use cli::table::print_json;
use pillarbox::log::{Filter, Message, MessagePattern, Reader, Snapshot};

use super::Failure;
use super::installation::connect;
use crate::settings::Settings;

/// Messages per read, so that a long log is printed while it is read.
const CHUNK: u32 = 1_000;
/// Time between two polls for new messages.
const PAUSE: Duration = Duration::from_millis(200);

/// The first message that is printed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start {
    Beginning,
    /// The first that was posted at this time or later.
    Time(DateTime<Utc>),
    /// The next one that is posted.
    Now,
}

/// Prints messages as lines of JSON, in the order of the log, until it is stopped, or with `once` until the end of the log.
/// Fails if the topic is invalid or the database cannot be reached.
pub(super) async fn tail(settings: &Settings, start: Start, once: bool, topic: Option<String>) -> Result<(), Failure> {
    let pool = connect(settings)?;
    let mut db = pool.acquire().await?;
    let (snapshot, since) = match start {
        Start::Beginning => (Snapshot::beginning(&mut db).await?, None),
        Start::Time(time) => (Snapshot::beginning(&mut db).await?, Some(time)),
        Start::Now => (Snapshot::now(&mut db).await?, None),
    };
    let filter = match topic {
        Some(topic) => {
            let under = MessagePattern::topic(&format!("{topic}.#"));
            under.check().map_err(|error| Failure::Other(error.to_string()))?;
            Filter::matching(&under)
        }
        None => Filter::everything(),
    };
    let mut reader = Reader::of_all_shards(filter, &snapshot).in_log_order();
    reader.open_windows(&Snapshot::now(&mut db).await?);
    if let Some(time) = since {
        reader.skip_to(&mut db, time).await?;
    }
    loop {
        while !reader.is_done() {
            let mut messages = reader.read(&mut db, CHUNK).await?;
            messages.retain(|message| since.is_none_or(|time| message.at >= time));
            if print(messages).is_err() {
                return Ok(()); // the reader has closed the pipe
            }
        }
        if once {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
        reader.open_windows(&Snapshot::now(&mut db).await?);
    }
}

fn print(messages: Vec<Message>) -> std::io::Result<()> {
    messages.into_iter().try_for_each(|message| print_json(&MessageView::full(message)))
}
