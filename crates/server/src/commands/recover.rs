//! `recover`: resumes the consumers after the database was restored or copied.

use admin::operator::flow;
use chrono::{DateTime, Utc};
use clap::Args;
use cli::table::{self, print_line};
use cli::time;
use pillarbox::operations::recovery::Recovery;
use pillarbox::operations::status;

use super::Failure;
use super::installation::{connect, require_same_time};
use crate::settings::Settings;

#[derive(Args)]
#[group(required = true, multiple = false)]
pub(super) struct RecoverArgs {
    /// All consumers read again what was posted since: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    from: Option<DateTime<Utc>>,
    /// Send nothing that was restored; parked messages and pending webhooks become dead letters
    #[arg(long)]
    skip: bool,
}

/// Resumes the consumers of a restored database, and prints what they do. Fails if the database cannot be reached.
pub(super) async fn run(settings: &Settings, args: RecoverArgs) -> Result<(), Failure> {
    let db = connect(settings)?;
    let (recovery, effect) = match args.from {
        Some(from) => {
            let effect = format!("every consumer reads again what was posted since {}", table::format_time(from));
            (Recovery::From(from), effect)
        }
        None => {
            (Recovery::Skip, "nothing that was restored is sent, and parked messages are dead letters now".to_owned())
        }
    };
    require_same_time(&db).await?;
    let Some(skipped) = flow::recover(&db, recovery).await? else {
        print_line("This database was not restored or copied; nothing is changed.")?;
        return Ok(());
    };
    print_line(&format!("Recovered: {effect}."))?;
    if skipped > 0 {
        print_line(&format!(
            "{} of the hub now.",
            table::count(skipped, "pending webhook is a dead letter", "pending webhooks are dead letters")
        ))?;
    }
    let consumers = status::consumers(&db).await?;
    let names: Vec<&str> = consumers.iter().map(|consumer| consumer.consumer.as_str()).collect();
    print_line(&match names.as_slice() {
        [] => "There are no consumers yet.".to_owned(),
        names => format!("These consumers resume within seconds: {}.", names.join(", ")),
    })?;
    Ok(())
}
