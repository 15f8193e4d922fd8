//! Comparing the counts of events and joins, on demand.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use chrono::Utc;
use clap::Args;
use events::reconcile::{Asked, begin, progress};

use super::Failure;
use super::operate::{connect, say};
use crate::settings::Settings;

const LOOK_PAUSE: Duration = Duration::from_millis(200);

#[derive(Args)]
pub(super) struct Reconcile {
    /// Only look, repair nothing
    #[arg(long)]
    dry_run: bool,
    /// Take no version on trust, and say every event again under a new one: after one of the databases was set back
    #[arg(long)]
    force: bool,
    /// How long to wait for the answers
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    wait_seconds: u32,
}

/// Starts a run and waits for its end; fails when it gets no answer.
pub(super) async fn run(settings: &Settings, asked: Reconcile) -> Result<ExitCode, Failure> {
    let db = connect(settings)?;
    let begun = begin(&db, Asked { dry_run: asked.dry_run, force: asked.force }, Utc::now()).await;
    let run = begun.map_err(|error| Failure::Other(error.to_string()))?;
    let (patience, started) = (Duration::from_secs(u64::from(asked.wait_seconds)), Instant::now());
    let mut seen = None;
    loop {
        let now = progress(&db, run).await?.ok_or_else(|| Failure::Other("the run is gone".to_owned()))?;
        if seen != Some(now.answered) {
            eprintln!("{} of {} parts are answered", now.answered, now.parts.unwrap_or_default());
            seen = Some(now.answered);
        }
        if now.finished_at.is_some() {
            say(&format!(
                "events: {} checked, {} drifted, {} repaired; joins: {} drifted, {} repaired",
                now.checked, now.drifted, now.repaired, now.joins_drifted, now.joins_repaired
            ))?;
            return Ok(ExitCode::SUCCESS);
        }
        if started.elapsed() >= patience {
            let missing = now.parts.unwrap_or_default() - now.answered;
            eprintln!(
                "error: {missing} parts got no answer within {} s: do `events` and `joins` run with the role `consume`? \
                 What is answered later is taken over then, too.",
                asked.wait_seconds
            );
            return Ok(ExitCode::FAILURE);
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}
