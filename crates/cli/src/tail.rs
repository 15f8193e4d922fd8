//! `tail`: prints the log and follows it.

use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use clap::Args;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::pages::encoded;
use crate::table::print_line;
use crate::time;

const PATH: &str = "/admin/v1/log/tail";
/// Time between two requests for new messages.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Args)]
pub struct Tail {
    /// Start with the oldest message of the log instead of the next one
    #[arg(long)]
    from_beginning: bool,
    /// Start with what was posted since: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse, conflicts_with = "from_beginning")]
    from: Option<DateTime<Utc>>,
    /// Stop after the newest message instead of waiting for the next one
    #[arg(long)]
    once: bool,
    /// Only this topic and the topics below it
    #[arg(long, value_name = "NAME")]
    topic: Option<String>,
    #[command(flatten)]
    pub server: ServerArgs,
}

/// A page of the log. Messages stay as they are: a payload may have numbers that JSON cannot represent exactly.
#[derive(Deserialize)]
struct Page {
    items: Vec<Box<RawValue>>,
    next: String,
    is_at_end: bool,
}

/// Prints messages as lines of JSON, in the order of the log, until it is stopped, or with `--once` until the end of the log. Fails
/// if the topic is invalid or the server cannot be reached.
pub async fn run(api: &Api, args: Tail) -> Result<(), Failure> {
    let from = args.from.or_else(|| args.from_beginning.then_some(DateTime::UNIX_EPOCH));
    let from = from.map(|from| from.to_rfc3339_opts(SecondsFormat::Micros, true));
    let given = [("from", from), ("topic", args.topic)].into_iter();
    let filters: Vec<String> = given.filter_map(|(name, value)| Some(format!("{name}={}", encoded(&value?)))).collect();
    let (filters, mut after) = (filters.join("&"), String::new());
    loop {
        let text = api.get_text(&format!("{PATH}?{filters}{after}")).await?;
        let page: Page = serde_json::from_str(&text)
            .map_err(|error| Failure::Other(format!("the server's response is not a page of the log: {error}")))?;
        page.items.iter().try_for_each(|message| print_line(message.get()))?;
        if page.is_at_end {
            if args.once {
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
        after = format!("&after={}", encoded(&page.next));
    }
}
