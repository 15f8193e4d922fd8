//! `parked`: messages that wait for another try.

use clap::Subcommand;
use mailbox::parked;
use sqlx::PgPool;

use super::operate::{connect, say};
use super::{Failure, table};
use crate::operator::{ParkedView, flow};
use crate::settings::Settings;

const PAGE: i64 = 100;

#[derive(Subcommand)]
pub(super) enum Command {
    /// List them, in the order of parking
    List {
        /// Only this consumer's
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// A line of JSON each, for machines
        #[arg(long)]
        json: bool,
    },
    /// Try one at once
    Retry {
        /// The number in PLACE of `pillarbox parked list`
        place: i64,
    },
    /// Throw one away, and let what waits behind it go on
    Discard {
        /// The number in PLACE of `pillarbox parked list`
        place: i64,
    },
}

pub(super) async fn run(settings: &Settings, command: Command) -> Result<(), Failure> {
    let db = connect(settings)?;
    match command {
        Command::List { consumer, json } => list(&db, consumer.as_deref(), json).await,
        Command::Retry { place } => {
            let mut tx = db.begin().await?;
            flow::retry_parked(&mut tx, place).await?;
            tx.commit().await?;
            Ok(say(&format!("Place {place} is due; its owner tries it within seconds."))?)
        }
        Command::Discard { place } => {
            let mut tx = db.begin().await?;
            flow::discard_parked(&mut tx, place).await?;
            tx.commit().await?;
            Ok(say(&format!("Place {place} is discarded; its owner passes it when its turn comes."))?)
        }
    }
}

async fn list(db: &PgPool, consumer: Option<&str>, json: bool) -> Result<(), Failure> {
    let mut rows = Vec::new();
    let mut after = None;
    loop {
        let page = parked::list(db, consumer, after, PAGE).await?;
        let is_last = page.len() < PAGE as usize;
        after = page.last().map(|last| last.place);
        for parked in page.into_iter().map(ParkedView::from) {
            match json {
                true => table::json(&parked)?,
                false => rows.push(row(&parked)),
            }
        }
        if is_last {
            break;
        }
    }
    if !json {
        let heads = ["PLACE", "CONSUMER", "KEY", "TOPIC", "EVENT", "ATTEMPTS", "NEXT", "ERROR"];
        table::print(heads, &rows)?;
    }
    Ok(())
}

fn row(parked: &ParkedView) -> [String; 8] {
    let next = match (parked.discarded, parked.next_at) {
        (true, _) => "discarded".to_owned(),
        (false, Some(at)) => table::time(at),
        (false, None) => "behind its key".to_owned(),
    };
    [
        parked.place.to_string(),
        parked.consumer.clone(),
        table::shown(parked.message.key().unwrap_or("-")),
        parked.message.topic().to_owned(),
        parked.message.event_id().to_string(),
        parked.attempts.to_string(),
        next,
        table::shown(parked.last_error.as_deref().unwrap_or("-")),
    ]
}
