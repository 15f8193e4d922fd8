//! `status`: the server, its dependencies and the consumers of the log.

use std::collections::BTreeMap;
use std::process::ExitCode;

use kit::health::{Health, Kind, State};
use mailbox::database::{self, cluster_identity};
use mailbox::operations::dead_letters::{self, Selection};
use mailbox::operations::status::ConsumerStatus;
use serde::Serialize;

use super::consumers::{Consumer, ConsumerState, load_consumers};
use super::installation::{database_options, pool};
use super::table::{self, print_line};
use super::{Failure, consumers, readyz};
use crate::checks::Checks;
use crate::data_dir::DataDir;
use crate::embedded;
use crate::settings::Settings;

const NOT_RUNNING: &str = "none in this data folder. Is it running? Start it with `pillarbox up`, or name its folder with \
                           --data-dir DIR";

#[derive(Serialize)]
struct Report {
    data: String,
    /// The server that uses the data folder. Absent when `database_url` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    database: Option<String>,
    /// All dependencies, and the tasks that fail.
    checks: Vec<State>,
    lacks_migrations: Vec<i64>,
    is_restored: bool,
    consumers: Vec<Consumer>,
    /// The number of dead letters by name, for intake queues and for consumers that no longer exist.
    other_dead_letters: BTreeMap<String, i64>,
    /// Webhooks of all tenants that were given up and can be retried, counted up to 10,000.
    dead_webhooks: i64,
    /// E-mails that were given up and can be retried.
    dead_emails: i64,
    /// Notifications that were given up and can be retried.
    dead_notifications: i64,
}

/// Prints the status. Returns the exit code 1 when a required dependency is down, the database was restored, or a consumer
/// needs attention. Fails when a setting is invalid or the database fails while it is read.
pub(super) async fn run(settings: &Settings, json: bool) -> Result<ExitCode, Failure> {
    let report = load(settings).await?;
    match json {
        true => table::print_json(&report)?,
        false => print(&report)?,
    }
    let needs_attention = report.checks.iter().any(|check| check.required && !check.up)
        || report.is_restored
        || report.consumers.iter().any(Consumer::needs_attention);
    Ok(if needs_attention { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn load(settings: &Settings) -> Result<Report, Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    let is_local = settings.database_url.is_none();
    let server = data_dir.holder().filter(|_| is_local);
    let db = pool(database_options(settings, &data_dir)?);
    let health = Health::default();
    Checks::new(settings, &db, None, settings.broker()?, &health)?.run().await;
    let local_checks = health.report();
    let mut report = Report {
        data: data_dir.path().display().to_string(),
        server: is_local.then(|| server.clone().unwrap_or_else(|| NOT_RUNNING.to_owned())),
        database: is_local.then(|| embedded::address(&data_dir)),
        checks: Vec::new(),
        lacks_migrations: Vec::new(),
        is_restored: false,
        consumers: Vec::new(),
        other_dead_letters: BTreeMap::new(),
        dead_webhooks: 0,
        dead_emails: 0,
        dead_notifications: 0,
    };
    // The checks of the server take precedence: it does the work, and its settings may differ from those of this command.
    if let Some(server) = &server {
        report.checks = readyz::load(server).await;
    }
    let is_known = |check: &State| report.checks.iter().any(|known| known.name == check.name);
    let others: Vec<State> = local_checks.iter().filter(|check| !is_known(check)).cloned().collect();
    report.checks.extend(others);
    report.checks.retain(|check| check.kind == Kind::Dependency || !check.up);
    if local_checks.iter().any(|check| check.required && !check.up) {
        return Ok(report);
    }
    report.lacks_migrations = database::missing_migrations(&db).await?;
    if report.lacks_migrations.is_empty() {
        report.is_restored = cluster_identity::is_restored(&mut *db.acquire().await?).await?;
        report.consumers = load_consumers(&db, &report.checks).await?;
        report.other_dead_letters =
            dead_letters::without_consumer(&db, &Selection::default()).await?.into_iter().collect();
        report.dead_webhooks = hub::webhook_totals(&db).await?.dead_letter_count();
        let given_up = notify::given_up(&db).await?;
        (report.dead_emails, report.dead_notifications) = (given_up.mails, given_up.notifications);
    }
    Ok(report)
}

fn print(report: &Report) -> std::io::Result<()> {
    let line = |name: &str, text: &str| print_line(&format!("{name:9} {text}"));
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
            missing => format!("lacks the migrations {missing:?}: `pillarbox migrate` applies them"),
        },
    )?;
    if report.is_restored {
        line("log", "restored or copied: nothing is sent until you run `pillarbox recover --from TIME` or `--skip`")?;
    }
    let in_state = |state| report.consumers.iter().filter(move |consumer| consumer.state == state);
    for Consumer { status: ConsumerStatus { consumer, .. }, .. } in in_state(ConsumerState::Lapsed) {
        line(
            "lapsed",
            &format!("{consumer}: `pillarbox cursors reset {consumer}` or `pillarbox cursors drop {consumer}`"),
        )?;
    }
    let idle: Vec<&str> = in_state(ConsumerState::Nobody)
        .filter(|consumer| consumer.is_behind())
        .map(|consumer| &*consumer.status.consumer)
        .collect();
    if !idle.is_empty() {
        let advice = "start a process with their role and settings, or drop them with `pillarbox cursors drop NAME`";
        line("idle", &format!("no process runs {}: {advice}", idle.join(", ")))?;
    }
    for ConsumerStatus { consumer, unrouted, .. } in report.consumers.iter().map(|consumer| &consumer.status) {
        if *unrouted > 0 {
            let advice = "bind a queue to its exchange, then send them again with";
            line(
                "unrouted",
                &format!("{unrouted} of {consumer}: {advice} `pillarbox replay --consumer {consumer} --from 2h`"),
            )?;
        }
    }
    print_given_up(report)?;
    if !report.consumers.is_empty() {
        print_line("")?;
        consumers::print(&report.consumers)?;
    }
    Ok(())
}

/// What an operator can retry. It changes no exit code: nothing waits behind it.
fn print_given_up(report: &Report) -> std::io::Result<()> {
    let dead = |text: &str| print_line(&format!("{:9} {text}", "dead"));
    for (consumer, count) in &report.other_dead_letters {
        dead(&format!("{count} of {consumer}: `pillarbox dead-letters list --consumer {consumer}`"))?;
    }
    if report.dead_webhooks > 0 {
        let list = "`pillarbox webhook-dead-letters list --tenant NAME`";
        let webhooks = table::count(report.dead_webhooks, "webhook", "webhooks");
        dead(&format!("{webhooks}: {list} shows why; it also retries and discards them"))?;
    }
    let kinds = [
        (report.dead_emails, ["e-mail", "e-mails"], "mail"),
        (report.dead_notifications, ["notification", "notifications"], "notifications"),
    ];
    for (count, [one, many], route) in kinds {
        if count > 0 {
            let reasons = format!("GET /admin/v1/{route}?status=dead shows why");
            dead(&format!(
                "{}: {reasons}, and `pillarbox {route} retry --all` retries them",
                table::count(count, one, many)
            ))?;
        }
    }
    Ok(())
}
