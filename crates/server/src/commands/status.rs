//! `status`: the server, its dependencies and the consumers of the log.

use std::collections::BTreeMap;
use std::process::ExitCode;

use admin::operator::{ConsumerState, ConsumerView, consumers_with_state};
use cli::cursors;
use cli::table::{self, print_line};
use pillarbox::database::{self, Database, cluster_identity};
use pillarbox::operations::dead_letters::{self, Selection};
use pillarbox::operations::status::{self, ConsumerStatus};
use runtime::health::{Health, Kind, State};
use serde::Serialize;

use super::installation::{database_options, pool, print_database};
use super::{Failure, readyz};
use crate::checks::Checks;
use crate::data_dir::DataDir;
use crate::settings::{Bus, Settings};
use crate::{embedded, migrations};

const NOT_RUNNING: &str = "none in this data folder. Is it running? Start it with `pillarbox up`, or name its folder with \
                           --data-dir DIR";
const NO_PROCESS: &str = "none runs on this database: start one with `pillarbox serve`";

#[derive(Serialize)]
struct Report {
    data: String,
    /// The server that uses the data folder. Absent when `database_url` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    database: Option<String>,
    /// The file with the address of the embedded PostgreSQL over TCP, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    over_tcp: Option<String>,
    /// All dependencies, and the tasks that fail.
    checks: Vec<State>,
    lacks_migrations: Vec<String>,
    is_restored: bool,
    /// The processes that run on this database. Absent: they were not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    processes: Option<Vec<String>>,
    consumers: Vec<ConsumerView>,
    /// The default routes to RabbitMQ to which no queue has to be bound.
    #[serde(skip)]
    optional_routes: Vec<String>,
    /// The default routes to RabbitMQ that are off.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes_off: Vec<String>,
    /// The number of dead letters by name, for intake queues and for consumers that no longer exist.
    other_dead_letters: BTreeMap<String, i64>,
    /// Webhooks of all tenants that were given up and can be retried, counted up to 10,000.
    dead_webhooks: i64,
    /// E-mails that were given up and can be retried.
    dead_emails: i64,
    /// Notifications that were given up and can be retried.
    dead_notifications: i64,
}

/// Prints the status. Returns the exit code 1 when a required dependency is down, no process runs, the database was restored, or a
/// consumer needs attention. Fails when a setting is invalid or the database fails while it is read.
pub(super) async fn run(settings: &Settings, json: bool) -> Result<ExitCode, Failure> {
    let report = load(settings).await?;
    if json {
        table::print_json(&report)?;
    } else {
        print(&report)?;
    }
    let needs_attention = report.checks.iter().any(|check| check.required && !check.up)
        || report.processes.as_ref().is_some_and(Vec::is_empty)
        || report.is_restored
        || report.consumers.iter().any(ConsumerView::needs_attention);
    Ok(if needs_attention { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn load(settings: &Settings) -> Result<Report, Failure> {
    let data_dir = DataDir::at(&settings.data_dir)?;
    let is_local = settings.database_url.is_none();
    let server = data_dir.holder().filter(|_| is_local);
    let database = database_options(settings, &data_dir)?;
    print_database(settings, &database);
    let db = pool(database);
    let health = Health::default();
    Checks::new(settings, &db, None, settings.broker()?, &health)?.run().await;
    let local_checks = health.report();
    let mut report = Report {
        data: data_dir.path().display().to_string(),
        server: is_local.then(|| server.clone().unwrap_or_else(|| NOT_RUNNING.to_owned())),
        database: is_local.then(|| embedded::address(&data_dir)),
        over_tcp: is_local.then(|| over_tcp(&data_dir)).flatten(),
        checks: Vec::new(),
        lacks_migrations: Vec::new(),
        is_restored: false,
        processes: None,
        consumers: Vec::new(),
        optional_routes: settings.relay.optional_routes(),
        routes_off: Vec::new(),
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
    report.lacks_migrations =
        database::missing_migrations(&db, &migrations()).await?.iter().map(ToString::to_string).collect();
    if report.lacks_migrations.is_empty() {
        report.is_restored = cluster_identity::is_restored(&mut *db.acquire().await?).await?;
        report.processes = Some(status::processes(&db).await?);
        report.consumers = consumers_with_state(&db, &report.checks).await?;
        report.routes_off = routes_off(settings, &report);
        report.other_dead_letters =
            dead_letters::without_consumer(&db, &Selection::default()).await?.into_iter().collect();
        let db = Database::new(db);
        report.dead_webhooks = hub::webhook_totals(&db).await?.dead_letter_count();
        let given_up = notify::given_up(&db).await?;
        (report.dead_emails, report.dead_notifications) = (given_up.mails, given_up.notifications);
    }
    Ok(report)
}

fn over_tcp(data_dir: &DataDir) -> Option<String> {
    embedded::address_file(data_dir).map(|file| format!("the address is in {}", file.display()))
}

/// The default routes that are off, if the server uses RabbitMQ. A route with a cursor is not among them: it may be on by the
/// settings of the server, which may differ from those of this command.
fn routes_off(settings: &Settings, report: &Report) -> Vec<String> {
    if !report.checks.iter().any(|check| check.name == "rabbitmq") {
        return Vec::new();
    }
    let has_cursor = |name: &String| report.consumers.iter().any(|consumer| consumer.status.consumer == *name);
    let mut off = settings.relay.routes_without_reader(settings.bus == Bus::Rabbitmq);
    off.retain(|name| !has_cursor(name));
    off
}

fn print(report: &Report) -> std::io::Result<()> {
    let line = |name: &str, text: &str| print_line(&format!("{name:9} {text}"));
    line("data", &report.data)?;
    for (name, text) in [("server", &report.server), ("database", &report.database), ("over TCP", &report.over_tcp)] {
        if let Some(text) = text {
            line(name, text)?;
        }
    }
    // With an embedded database, the one process is the server above.
    if let (None, Some(processes)) = (&report.server, &report.processes) {
        line("servers", &if processes.is_empty() { NO_PROCESS.to_owned() } else { processes.join(", ") })?;
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
            missing => format!("lacks the migrations {}: `pillarbox migrate` applies them", missing.join(", ")),
        },
    )?;
    if report.is_restored {
        line("log", "restored or copied: nothing is sent until you run `pillarbox recover --from TIME` or `--skip`")?;
    }
    let in_state = |state| report.consumers.iter().filter(move |consumer| consumer.state == state);
    for ConsumerView { status: ConsumerStatus { consumer, .. }, .. } in in_state(ConsumerState::Lapsed) {
        line(
            "lapsed",
            &format!("{consumer}: `pillarbox cursors reset {consumer}` or `pillarbox cursors drop {consumer}`"),
        )?;
    }
    let idle: Vec<&str> = in_state(ConsumerState::NoWorker)
        .filter(|consumer| consumer.is_behind())
        .map(|consumer| &*consumer.status.consumer)
        .collect();
    if !idle.is_empty() {
        let advice = "start a process with their role and settings, or drop them with `pillarbox cursors drop NAME`";
        line("idle", &format!("no process runs {}: {advice}", idle.join(", ")))?;
    }
    if !report.routes_off.is_empty() {
        let advice = "no service reads their queues; relay.enable_routes turns them on";
        line("off", &format!("{}: {advice}", report.routes_off.join(", ")))?;
    }
    print_unrouted(report)?;
    print_given_up(report)?;
    if !report.consumers.is_empty() {
        print_line("")?;
        let consumers = report.consumers.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        cursors::print(&consumers)?;
    }
    Ok(())
}

/// The messages for which RabbitMQ had no queue. That is normal for a default route: it publishes for those who bind one.
fn print_unrouted(report: &Report) -> std::io::Result<()> {
    for ConsumerStatus { consumer, unrouted, .. } in report.consumers.iter().map(|consumer| &consumer.status) {
        if *unrouted > 0 {
            let advice = if report.optional_routes.contains(consumer) {
                "no queue is bound for them, and none has to be. To receive them,"
            } else {
                "RabbitMQ had no queue for them:"
            };
            let command = format!("`pillarbox replay --consumer {consumer} --from 2h`");
            let line =
                format!("{unrouted} of {consumer}: {advice} bind a queue to its exchange, then send them again with");
            print_line(&format!("{:9} {line} {command}", "unrouted"))?;
        }
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
