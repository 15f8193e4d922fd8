//! `status`: what runs, what it depends on, and how far the consumers are.

use std::collections::BTreeMap;
use std::process::ExitCode;

use kit::health::{Health, Kind, State};
use mailbox::dead_letter::{self, Which};
use mailbox::status::{self, ConsumerStatus};
use mailbox::{database, home};
use serde::Serialize;
use sqlx::PgPool;

use super::operate::{database_options, pool, say};
use super::{Failure, cursors, ready, table};
use crate::checks::Checks;
use crate::data_dir::DataDir;
use crate::embedded;
use crate::settings::Settings;

/// From here on a consumer is behind; the runbook's alert has the same number.
const BEHIND_SECONDS: f64 = 60.0;

#[derive(Serialize)]
struct Report {
    data: String,
    /// Who serves from the data folder; not looked for when the database is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    database: Option<String>,
    /// Every server that is depended on, and tasks that fail.
    checks: Vec<State>,
    lacks_migrations: Vec<i64>,
    is_restored: bool,
    consumers: Vec<Reader>,
    /// Of queues that are read in, and of consumers that are gone: how many.
    other_dead_letters: BTreeMap<String, i64>,
}

/// A consumer, and in a word how it is.
#[derive(Serialize)]
pub(super) struct Reader {
    pub(super) state: Condition,
    #[serde(flatten)]
    pub(super) status: ConsumerStatus,
}

/// Of several that hold, the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Condition {
    Good,
    /// Something waits for another try.
    Parked,
    /// The oldest message that it has not read is more than a minute old.
    Behind,
    /// It fails as a whole, and tries again.
    Stalled,
    /// No process works for it.
    Nobody,
    /// It was behind for too long, and waits for an operator.
    Lapsed,
}

impl Condition {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Condition::Good => "good",
            Condition::Parked => "parked",
            Condition::Behind => "behind",
            Condition::Stalled => "stalled",
            Condition::Nobody => "nobody",
            Condition::Lapsed => "lapsed",
        }
    }
}

impl Reader {
    fn is_behind(&self) -> bool {
        self.status.lag_seconds > BEHIND_SECONDS
    }

    /// Whether somebody should look at once: what is parked is tried again, and a consumer that has read all may be alone.
    fn is_bad(&self) -> bool {
        self.is_behind() || matches!(self.state, Condition::Lapsed | Condition::Stalled)
    }
}

/// Fails when something required is down, or a consumer should be looked at.
pub(super) async fn run(settings: &Settings, json: bool) -> Result<ExitCode, Failure> {
    let report = look(settings).await?;
    match json {
        true => table::json(&report)?,
        false => print(&report)?,
    }
    let is_bad = report.checks.iter().any(|check| check.required && !check.up)
        || report.is_restored
        || report.consumers.iter().any(Reader::is_bad);
    Ok(if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The consumers, with what the server of the data folder says of their tasks.
pub(super) async fn readers(db: &PgPool, checks: &[State]) -> Result<Vec<Reader>, Failure> {
    let fails = |consumer: &str| {
        let of = |check: &State| check.name.split_once('/').is_some_and(|(name, _)| name == consumer);
        checks.iter().any(|check| !check.up && check.kind == Kind::Task && of(check))
    };
    let condition = |status: &ConsumerStatus| match () {
        () if status.lapsed_at.is_some() => Condition::Lapsed,
        () if status.workers.is_empty() => Condition::Nobody,
        () if fails(&status.consumer) => Condition::Stalled,
        () if status.lag_seconds > BEHIND_SECONDS => Condition::Behind,
        () if status.parked > 0 => Condition::Parked,
        () => Condition::Good,
    };
    let consumers = status::consumers(db).await?;
    Ok(consumers.into_iter().map(|status| Reader { state: condition(&status), status }).collect())
}

async fn look(settings: &Settings) -> Result<Report, Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    let is_local = settings.database_url.is_none();
    let holder = data_dir.holder().filter(|_| is_local);
    let db = pool(database_options(settings, &data_dir)?);
    let health = Health::default();
    Checks::new(settings, &db, None, settings.broker()?, &health)?.run().await;
    let seen_here = health.report();
    let mut report = Report {
        data: data_dir.path().display().to_string(),
        server: is_local.then(|| holder.clone().unwrap_or_else(|| "not running from this data folder".to_owned())),
        database: is_local.then(|| embedded::address(&data_dir)),
        checks: Vec::new(),
        lacks_migrations: Vec::new(),
        is_restored: false,
        consumers: Vec::new(),
        other_dead_letters: BTreeMap::new(),
    };
    // What the server says counts: it may have other settings than this command, and it is what does the work.
    if let Some(holder) = &holder {
        report.checks = ready::ask(holder).await;
    }
    let is_known = |check: &State| report.checks.iter().any(|known| known.name == check.name);
    let others: Vec<State> = seen_here.iter().filter(|check| !is_known(check)).cloned().collect();
    report.checks.extend(others);
    report.checks.retain(|check| check.kind == Kind::Dependency || !check.up);
    if seen_here.iter().any(|check| check.required && !check.up) {
        return Ok(report);
    }
    report.lacks_migrations = database::missing_migrations(&db).await?;
    if report.lacks_migrations.is_empty() {
        report.is_restored = home::is_restored(&mut *db.acquire().await?).await?;
        report.consumers = readers(&db, &report.checks).await?;
        report.other_dead_letters = dead_letter::without_consumer(&db, &Which::default()).await?.into_iter().collect();
    }
    Ok(report)
}

fn print(report: &Report) -> std::io::Result<()> {
    let line = |name: &str, text: &str| say(&format!("{name:9} {text}"));
    line("data", &report.data)?;
    for (name, text) in [("server", &report.server), ("database", &report.database)] {
        if let Some(text) = text {
            line(name, text)?;
        }
    }
    for check in &report.checks {
        line(&check.name, check.error.as_deref().unwrap_or("up"))?;
    }
    if report.checks.iter().any(|check| check.required && !check.up) && report.consumers.is_empty() {
        return Ok(());
    }
    line(
        "schema",
        &match report.lacks_migrations.as_slice() {
            [] => "up to date".to_owned(),
            missing => format!("lacks migrations {missing:?}: `pillarbox migrate` applies them"),
        },
    )?;
    if report.is_restored {
        line("log", "restored or copied: nothing is sent until `pillarbox recover --from TIME` or `--skip`")?;
    }
    let named = |condition| report.consumers.iter().filter(move |one| one.state == condition);
    for Reader { status: ConsumerStatus { consumer, .. }, .. } in named(Condition::Lapsed) {
        line(
            "lapsed",
            &format!("{consumer}: `pillarbox cursors reset {consumer}` or `pillarbox cursors drop {consumer}`"),
        )?;
    }
    let idle: Vec<&str> =
        named(Condition::Nobody).filter(|one| one.is_behind()).map(|one| &*one.status.consumer).collect();
    if !idle.is_empty() {
        let advice =
            "start a process with their role and settings, or `pillarbox cursors drop NAME` what is not needed";
        line("nobody", &format!("works for {}: {advice}", idle.join(", ")))?;
    }
    for (consumer, count) in &report.other_dead_letters {
        line("dead", &format!("{count} of {consumer}: `pillarbox dead-letters list --consumer {consumer}`"))?;
    }
    if !report.consumers.is_empty() {
        say("")?;
        cursors::print(&report.consumers)?;
    }
    Ok(())
}
