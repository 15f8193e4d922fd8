//! Joins over HTTP, compared with a naive implementation: one transaction per join, which locks the row of the event. The
//! naive implementation runs without HTTP and with its best number of clients. The data is checked after every run.

mod check;
mod naive;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http_kit::auth::TokenSigner;
use runtime::clock::Clock;
use runtime::secret::MasterKey;
use sqlx::PgPool;
use uuid::Uuid;

use crate::Outcome;
use crate::costs::Costs;
use crate::hub::poster::Poster;
use crate::installation::Installation;
use crate::report::{Pairs, Report};

const CLIENTS: usize = 256;
const EVENTS: usize = 1_000;
const HOT_CAPACITY: i32 = 1_000;
const CAPACITY: i32 = 10;
const TOKEN_TIME: Duration = Duration::from_secs(24 * 3600);
const NAIVE_CLIENTS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Joins of a run of the naive implementation, which is slower.
const NAIVE_RUN: usize = 2_000;

/// A user and the event to join.
pub(crate) struct Joiner {
    user: Uuid,
    event: Uuid,
    token: String,
}

pub(crate) async fn measure(pillarbox: &Path, pairs: usize, count: usize) -> Outcome<Report> {
    let key = MasterKey::generate();
    let settings = format!("secret_key = \"{}\"\n", key.to_base64());
    // The roles of `pillarbox up` with this service only.
    let args = ["--services", "joins", "--roles", "api,consume,maintain"];
    let installation = Installation::start(pillarbox, &settings, &args).await?;
    let mut report = Report::default();
    let outcome = measure_both(&installation, &TokenSigner::new(&key), pairs, count, &mut report).await;
    installation.end().await?;
    outcome.map(|()| report)
}

async fn measure_both(
    installation: &Installation,
    signer: &TokenSigner,
    pairs: usize,
    count: usize,
    report: &mut Report,
) -> Outcome<()> {
    let db = &installation.site.db;
    for (what, events, capacity) in [("one event", 1, HOT_CAPACITY), ("1,000 events", EVENTS, CAPACITY)] {
        let joiners = async |count: usize, signs: bool| -> Outcome<Vec<Joiner>> {
            let events = insert_events(db, events, capacity).await?;
            let joiner = |number: usize| -> Outcome<Joiner> {
                let user = Uuid::new_v4();
                let token = match signs {
                    true => signer.sign(user, None, Clock::system().now(), TOKEN_TIME)?,
                    false => String::new(),
                };
                Ok(Joiner { user, event: events[number % events.len()], token })
            };
            (0..count).map(joiner).collect()
        };
        let naive = async |clients: usize| -> Outcome<f64> {
            let rate = naive::run(&installation.site.url, joiners(NAIVE_RUN, false).await?, clients).await?;
            check::check(db).await?;
            Ok(rate)
        };
        let (mut best, mut best_rate) = (1, 0.0);
        for clients in NAIVE_CLIENTS {
            let rate = naive(clients).await?;
            eprintln!("{what}: one transaction per join, {clients} clients: {rate:.0}");
            if rate > best_rate {
                (best, best_rate) = (clients, rate);
            }
        }
        let (mut p50s, mut p99s, mut costs) = (Vec::new(), Vec::new(), Costs::default());
        run(installation, joiners(count / 4, true).await?).await?; // warm-up
        let ours = async || {
            let joiners = joiners(count, true).await?;
            let began = installation.used().await?;
            let (rate, mut times) = run(installation, joiners).await?;
            costs.add(began, installation.used().await?, count as u64);
            check::check(db).await?;
            times.sort_by(f64::total_cmp);
            p50s.push(times[times.len() / 2]);
            p99s.push(times[times.len() * 99 / 100]);
            Ok(rate)
        };
        let runs = Pairs::run(what, pairs, async || naive(best).await, ours).await?;
        report.add(&format!("{what}, one transaction per join, {best} clients"), "/s", runs.raws);
        report.add(&format!("{what}, over HTTP, {CLIENTS} clients"), "/s", runs.ours);
        report.add(&format!("{what}, ratio"), "", runs.ratios);
        report.add(&format!("{what}, p50"), "ms", p50s);
        report.add(&format!("{what}, p99"), "ms", p99s);
        costs.report(what, report);
    }
    Ok(())
}

/// Returns the joins per second and the time of each join in milliseconds.
async fn run(installation: &Installation, joiners: Vec<Joiner>) -> Outcome<(f64, Vec<f64>)> {
    let (next, joiners) = (Arc::new(AtomicUsize::new(0)), Arc::new(joiners));
    let mut posters = Vec::new();
    for _ in 0..CLIENTS {
        posters.push(Poster::connect(&installation.server.address, "").await?);
    }
    let began = Instant::now();
    let client = |poster| tokio::spawn(join_all(poster, joiners.clone(), next.clone()));
    let tasks: Vec<_> = posters.into_iter().map(client).collect();
    let mut times = Vec::with_capacity(joiners.len());
    for task in tasks {
        times.extend(task.await??);
    }
    Ok((joiners.len() as f64 / began.elapsed().as_secs_f64(), times))
}

async fn join_all(mut poster: Poster, joiners: Arc<Vec<Joiner>>, next: Arc<AtomicUsize>) -> Outcome<Vec<f64>> {
    let mut times = Vec::new();
    while let Some(joiner) = joiners.get(next.fetch_add(1, Ordering::Relaxed)) {
        let began = Instant::now();
        let headers = format!("authorization: Bearer {}\r\nidempotency-key: {}\r\n", joiner.token, joiner.user);
        let path = format!("/join/v1/events/{}/join", joiner.event);
        let (status, answer) = poster.send_with("POST", &path, &headers, "").await?;
        if status != 201 {
            return Err(format!("{path}: {status}: {}", String::from_utf8_lossy(answer)).into());
        }
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}

async fn insert_events(db: &PgPool, count: usize, capacity: i32) -> Outcome<Vec<Uuid>> {
    let events: Vec<Uuid> = (0..count).map(|_| Uuid::new_v4()).collect();
    sqlx::query(
        "insert into pillarbox_joins.event_capacity
             (event_id, owner_id, status, capacity, start_time, end_time, event_version, sweep_at)
         select id, gen_random_uuid(), 'published', $2, now() + '1 day', now() + '2 days', 1, now() + '2 days'
         from unnest($1::uuid[]) as id",
    )
    .bind(&events)
    .bind(capacity)
    .execute(db)
    .await?;
    Ok(events)
}
