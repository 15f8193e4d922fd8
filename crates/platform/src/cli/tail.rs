//! `tail`: prints the log and follows it.

use std::io::Write;
use std::time::Duration;

use mailbox::log::{Filter, Message, MessagePattern, Reader, Snapshot};

use super::Failure;
use super::installation::connect;
use crate::operator::MessageView;
use crate::settings::Settings;

/// Messages per read, so that a long log is printed while it is read.
const CHUNK: u32 = 1_000;
/// Time between two polls for new messages.
const PAUSE: Duration = Duration::from_millis(200);

/// Prints messages as lines of JSON until it is stopped, or with `once` until the end of the log. Fails if the topic is
/// invalid or the database cannot be reached.
pub(super) async fn tail(
    settings: &Settings,
    from_beginning: bool,
    once: bool,
    topic: Option<String>,
) -> Result<(), Failure> {
    let pool = connect(settings)?;
    let mut db = pool.acquire().await?;
    let start = if from_beginning { Snapshot::beginning(&mut db).await? } else { Snapshot::now(&mut db).await? };
    let filter = match topic {
        Some(topic) => {
            let under = MessagePattern::topic(&format!("{topic}.#"));
            under.check().map_err(Failure::Other)?;
            Filter::matching(&under)
        }
        None => Filter::everything(),
    };
    let mut reader = Reader::of_all_shards(filter, &start);
    loop {
        reader.open_windows(&Snapshot::now(&mut db).await?);
        while !reader.is_done() {
            if print(reader.read(&mut db, CHUNK).await?).is_err() {
                return Ok(()); // the reader has closed the pipe
            }
        }
        if once {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn print(messages: Vec<Message>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for message in messages {
        serde_json::to_writer(&mut out, &MessageView::full(message))?;
        out.write_all(b"\n")?;
    }
    out.flush()
}
