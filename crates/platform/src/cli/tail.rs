//! `tail`: the log, as it grows.

use std::io::Write;
use std::time::Duration;

use mailbox::filter::{Filter, Matching};
use mailbox::log::{Message, Reader};
use mailbox::moment::Moment;

use super::Failure;
use super::operate::connect;
use crate::operator::MessageView;
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
            if print(reader.read(&mut db, CHUNK).await?).is_err() {
                return Ok(()); // whoever read it has enough
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
        serde_json::to_writer(&mut out, &MessageView::whole(message))?;
        out.write_all(b"\n")?;
    }
    out.flush()
}
