//! `reconcile`: compares the counts of events with the registrations themselves.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use events::reconcile::{ReconcileOptions, begin, progress};
use pillarbox::database::Database;

use super::installation::connect;
use super::{Failure, InvalidDuration, seconds};
use crate::settings::Settings;
use cli::table::{print_line, print_note};

/// Time between two progress checks.
const POLL_PAUSE: Duration = Duration::from_millis(200);

const RUN_DELETED: &str = "the run was deleted before it ended, for example because the database was restored; run \
                           `pillarbox reconcile` again";

#[derive(Args)]
pub(super) struct Reconcile {
    /// Report differences without repairing them
    #[arg(long)]
    dry_run: bool,
    /// Ignore versions, and publish every event again under a new version. Use it after one of the databases was restored
    #[arg(long)]
    force: bool,
    /// How long to wait for the responses: a number of seconds, or a duration such as 90s or 5m
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = wait_time)]
    wait_seconds: Duration,
}

fn wait_time(text: &str) -> Result<Duration, InvalidDuration> {
    seconds(text, 3_600)
}

/// Starts a run and waits for its end. Returns the exit code 1 when the services do not respond in time. Fails if the run cannot
/// be started, or is deleted before it ends.
pub(super) async fn run(settings: &Settings, args: Reconcile) -> Result<ExitCode, Failure> {
    let db = connect(settings)?;
    let options = ReconcileOptions { dry_run: args.dry_run, force: args.force };
    let begun = begin(&Database::new(db.clone()), options).await;
    let run = begun.map_err(|error| Failure::Other(error.to_string()))?;
    let (time_max, started) = (args.wait_seconds, Instant::now());
    let mut seen = None;
    loop {
        let now = progress(&db, run).await?.ok_or_else(|| Failure::Other(RUN_DELETED.to_owned()))?;
        if seen != Some(now.answered) {
            print_note(&format!("{} of {} parts have a response", now.answered, now.parts.unwrap_or_default()));
            seen = Some(now.answered);
        }
        if now.finished_at.is_some() {
            print_line(&format!(
                "events: {} checked, {} drifted, {} repaired; joins: {} drifted, {} repaired",
                now.checked, now.drifted, now.repaired, now.joins_drifted, now.joins_repaired
            ))?;
            return Ok(ExitCode::SUCCESS);
        }
        if started.elapsed() >= time_max {
            let missing = now.parts.unwrap_or_default() - now.answered;
            print_note(&format!(
                "error: {missing} parts got no response within {} s: check that `events` and `joins` run with the role `consume`. \
                 Later responses are still applied.",
                time_max.as_secs()
            ));
            return Ok(ExitCode::FAILURE);
        }
        tokio::time::sleep(POLL_PAUSE).await;
    }
}
