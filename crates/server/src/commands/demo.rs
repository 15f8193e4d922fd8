//! `demo`: believable traffic on a running installation, so that a newcomer sees everything move.
//!
//! - [`setup`]: creates tenants, keys, subscribers and streams, and removes them at the end.
//! - [`receiver`]: the endpoints of the subscribers, some of which fail for a while.
//! - [`traffic`]: orders, events of tenants and business events. [`gatherings`]: events that people join, and projects.
//! - [`account`]: a person with an account, who gets e-mails.
//!
//! Everything it creates has a name that begins with `demo-`.

mod account;
mod gatherings;
mod receiver;
mod setup;
mod store;
mod traffic;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use cli::api::{Api, ApiError, is_on_this_machine};
use cli::pages::encoded;
use cli::table::print_line;
use http_kit::auth::Role;
use runtime::secret::Secret;
use serde_json::Value;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::Failure;
use super::access::{local_address, sign_token};
use super::installation::connect;
use super::one_installation::require_one_installation;
use super::serve::StopSignal;
use crate::settings::Settings;
use receiver::Receiver;
use setup::Created;

/// Time between two lines about the progress.
const REPORT_PAUSE: Duration = Duration::from_secs(10);
/// Tokens stay valid this long after the end, for the removal of what was created.
const TOKEN_TIME_AFTER: Duration = Duration::from_secs(600);
const SUBSCRIBERS: &str = "/hub/v1/subscribers?limit=100";

#[derive(Args)]
pub(super) struct DemoArgs {
    /// How long it runs
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,
    /// Events per second, of all kinds together
    #[arg(long, value_name = "COUNT", default_value_t = 5.0, value_parser = rate)]
    rate: f64,
    /// Also on an installation that does not use the embedded PostgreSQL, or that has receivers outside of this machine
    #[arg(long)]
    force: bool,
}

fn minutes(text: &str) -> Result<f64, &'static str> {
    let given: Option<f64> = text.parse().ok();
    given.filter(|minutes| (0.01..=1_200.0).contains(minutes)).ok_or("must be a number from 0.01 to 1200")
}

fn rate(text: &str) -> Result<f64, &'static str> {
    let given: Option<f64> = text.parse().ok();
    given.filter(|rate| (0.1..=200.0).contains(rate)).ok_or("must be a number from 0.1 to 200")
}

/// What the tasks of the demo share.
#[derive(Clone)]
struct Demo {
    settings: Arc<Settings>,
    db: PgPool,
    operator: Api,
    token_time: Duration,
    /// The pause between two events of one kind.
    pause: Duration,
    counts: Arc<Counts>,
    stop: CancellationToken,
}

/// What has happened so far.
#[derive(Default)]
struct Counts {
    orders: AtomicU64,
    tenant_events: AtomicU64,
    notifications: AtomicU64,
    gatherings: AtomicU64,
    joins: AtomicU64,
    items: AtomicU64,
    refused: AtomicU64,
}

impl Demo {
    /// A client of a user without a role.
    fn user(&self, id: Uuid) -> Result<Api, Failure> {
        Ok(self.operator.with_bearer(sign_token(&self.settings, id, None, self.token_time)?))
    }

    /// Counts a request by its result. Requests may fail in a demo: the server may be restarted or out of capacity.
    fn count(&self, result: Result<Value, ApiError>, counter: &AtomicU64) -> Option<Value> {
        match result {
            Ok(body) => {
                counter.fetch_add(1, Ordering::Relaxed);
                Some(body)
            }
            Err(_) => {
                self.counts.refused.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Waits for the pause. Returns false when the demo ends.
    async fn wait(&self, pause: Duration) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    fn report(&self) -> String {
        let Counts { orders, tenant_events, notifications, gatherings, joins, items, refused } = &*self.counts;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        format!(
            "{} orders posted in SQL, {} events of tenants, {} business events, {} gatherings with {} joins and \
             cancellations, {} items of projects, {} requests refused",
            count(orders),
            count(tenant_events),
            count(notifications),
            count(gatherings),
            count(joins),
            count(items),
            count(refused)
        )
    }
}

fn refused(reason: &str) -> Failure {
    Failure::Other(format!(
        "the demo posts orders and events, and {reason}. If this installation is for trying things out, repeat the command with --force"
    ))
}

/// Fails if the messages of the demo would leave this machine. The server is asked, because its settings may differ from those
/// of this command.
async fn refuse_other_receivers(demo: &Demo) -> Result<(), Failure> {
    let servers = [
        ("rabbitmq", "this installation publishes them to RabbitMQ"),
        ("smtp", "this installation sends e-mails about them"),
    ];
    let used = used_servers(&demo.operator).await?;
    if let Some((_, reason)) = servers.into_iter().find(|(name, _)| used.iter().any(|used| used == name)) {
        return Err(refused(reason));
    }
    match subscriber_elsewhere(&demo.operator).await? {
        Some(name) => Err(refused(&format!("the subscriber {name} would receive them outside of this machine"))),
        None => Ok(()),
    }
}

/// The names of the servers that the server of the installation checks, such as `rabbitmq`.
async fn used_servers(operator: &Api) -> Result<Vec<String>, Failure> {
    let report = operator.get("/readyz").await?;
    let names = report["checks"].as_array().into_iter().flatten().filter_map(|check| check["name"].as_str());
    Ok(names.map(str::to_owned).collect())
}

/// The name of a subscriber whose endpoint is not on this machine.
async fn subscriber_elsewhere(operator: &Api) -> Result<Option<String>, Failure> {
    let mut path = SUBSCRIBERS.to_owned();
    loop {
        let page = operator.get(&path).await?;
        let mut subscribers = page["items"].as_array().into_iter().flatten();
        let is_elsewhere = |one: &&Value| !is_on_this_machine(one["url"].as_str().unwrap_or_default());
        if let Some(found) = subscribers.find(is_elsewhere) {
            return Ok(Some(found["name"].as_str().unwrap_or_default().to_owned()));
        }
        match page["next_cursor"].as_str() {
            Some(next) => path = format!("{SUBSCRIBERS}&cursor={}", encoded(next)),
            None => return Ok(None),
        }
    }
}

/// Runs the demo until its time is over or it is stopped, and removes what it has created. Fails if there is no server on this
/// machine, or if `--force` is not given and others would receive its messages.
pub(super) async fn run(settings: &Settings, args: DemoArgs) -> Result<(), Failure> {
    let mut stop = StopSignal::listen()?;
    if settings.database_url.is_some() && !args.force {
        return Err(refused("this installation does not use the embedded PostgreSQL"));
    }
    // Before the token is signed: without a server, its error explains more than one about a missing secret key.
    let db = connect(settings)?;
    let base = local_address(settings)?;
    require_one_installation(settings, &base).await?;
    let time = Duration::from_secs_f64(args.minutes * 60.0);
    let token_time = time + TOKEN_TIME_AFTER;
    let operator_token = sign_token(settings, Uuid::now_v7(), Some(Role::Admin), token_time)?;
    let demo = Demo {
        settings: Arc::new(settings.clone()),
        db,
        operator: Api::new(&base, operator_token)?,
        token_time,
        pause: Duration::from_secs_f64(traffic::KINDS / args.rate),
        counts: Arc::default(),
        stop: CancellationToken::new(),
    };
    if !args.force {
        refuse_other_receivers(&demo).await?;
    }
    let receiver = Receiver::start(demo.stop.clone()).await?;
    let mut created = Created::default();
    let set_up = setup::create(&demo, &receiver, &mut created).await;
    let result = match set_up {
        Ok(()) => run_traffic(&demo, &created, &receiver, time, &mut stop).await,
        Err(error) => Err(error),
    };
    demo.stop.cancel();
    setup::remove(&demo, &created).await;
    result?;
    print_line(&format!("The demo has ended, and its tenants, subscribers and keys are removed: {}.", demo.report()))?;
    Ok(())
}

async fn run_traffic(
    demo: &Demo,
    created: &Created,
    receiver: &Receiver,
    time: Duration,
    stop: &mut StopSignal,
) -> Result<(), Failure> {
    let base = demo.operator.base();
    print_line(&format!("Pillarbox has traffic for {:.0} s. Watch it at {base}/console/", time.as_secs_f64()))?;
    print_line(
        "  webhooks go to endpoints inside this command: one is well, one fails for a while, one is slow, one refuses",
    )?;
    print_line(
        "  stop it with Ctrl-C: it then removes its tenants, subscribers and keys, whose names begin with demo-",
    )?;
    let tasks = TaskTracker::new();
    traffic::start(demo, created, &tasks)?;
    gatherings::start(demo, &tasks)?;
    tasks.close();
    let mut reports = tokio::time::interval(REPORT_PAUSE);
    reports.tick().await;
    let end = tokio::time::sleep(time);
    tokio::pin!(end);
    loop {
        tokio::select! {
            () = &mut end => break,
            () = stop.wait() => break,
            _ = reports.tick() => {
                let (delivered, failed) = receiver.counts();
                print_line(&format!("  {}; {delivered} webhooks accepted, {failed} refused", demo.report()))?;
            }
        }
    }
    demo.stop.cancel();
    tasks.wait().await;
    Ok(())
}

/// A client with the key of a tenant.
fn with_key(demo: &Demo, key: &Secret<String>) -> Api {
    demo.operator.with_bearer(key.clone())
}
