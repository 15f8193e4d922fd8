//! Connections to PostgreSQL that are dead although they were not closed: a failed over server, a lost route, a firewall that
//! has forgotten them. No request and no worker waits for them for long, and `/readyz` tells the truth.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hyper::Method;
use pillarbox::database::{self, PoolLimits, is_no_response, step};
use runtime::deadline;
use serde_json::json;
use server::migrations;
use sqlx::Row;
use testkit::{Client, FaultProxy, TestDatabase, eventually};
use tokio_util::sync::CancellationToken;

use crate::hub::fixture::{numbered_events, subscribe};
use crate::hub::process::Replica;
use crate::hub::recorder::RequestRecorder;

const ALL_ROLES: &str = "api,relay,consume,fanout,dispatch,maintain";
/// With the default settings, but few connections.
const SETTINGS: [(&str, &str); 1] = [("PILLARBOX_LEASE_MS", "15000")];
/// The issue of this promise: everything works again this soon after the connections died.
const RECOVERY_MAX: Duration = Duration::from_secs(15);
/// "A few seconds": longer than the time limit of a batch of posts.
const FEW_SECONDS: Duration = Duration::from_secs(11);

/// The answer to one request.
#[derive(Debug, Clone, Copy)]
struct Answer {
    sent_at: Instant,
    answered_at: Instant,
    status: u16,
}

/// Sends requests one after the other until `stop`. `send` gets the number of answers with 2xx so far.
async fn send_until_stopped<F>(answers: Arc<Mutex<Vec<Answer>>>, stop: CancellationToken, send: impl Fn(usize) -> F)
where
    F: Future<Output = u16>,
{
    let mut accepted = 0;
    while !stop.is_cancelled() {
        let sent_at = Instant::now();
        let status = send(accepted).await;
        accepted += usize::from(status < 300);
        answers.lock().unwrap().push(Answer { sent_at, answered_at: Instant::now(), status });
        tokio::time::sleep(Duration::from_millis(10)).await; // the interval between two requests
    }
}

/// Posts the next round of numbered events.
async fn post_next(client: Client, accepted: usize) -> u16 {
    let body = json!({"events": numbered_events(2, [accepted + 1])});
    // A post without a response may have been committed: the key makes its repetition safe.
    let client = client.with_header("idempotency-key", &format!("round-{accepted}"));
    client.send(Method::POST, "/hub/v1/events/batch", Some(body)).await.status
}

async fn get(client: Client, path: &'static str) -> u16 {
    client.get(path).await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn work_continues_soon_after_all_connections_to_postgresql_fall_silent() {
    let database = TestDatabase::new(&migrations()).await;
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let mut replica = Replica::start_with(&proxy.url(&database.url()), ALL_ROLES, &SETTINGS);
    let admin = replica.admin().await;
    let recorder = RequestRecorder::start(|_, _, _, _| (200, Duration::ZERO)).await;
    subscribe(&admin, &recorder.url("s"), json!({})).await;
    let (posts, reads, checks) =
        <(Arc<Mutex<Vec<Answer>>>, Arc<Mutex<Vec<Answer>>>, Arc<Mutex<Vec<Answer>>>)>::default();
    let stop = CancellationToken::new();
    let clients = [admin.clone(), admin.clone(), admin.clone()];
    let [poster, reader, prober] = clients;
    let tasks = [
        tokio::spawn(send_until_stopped(posts.clone(), stop.clone(), move |accepted| {
            post_next(poster.clone(), accepted)
        })),
        tokio::spawn(send_until_stopped(reads.clone(), stop.clone(), move |_| {
            get(reader.clone(), "/hub/v1/subscribers")
        })),
        tokio::spawn(send_until_stopped(checks.clone(), stop.clone(), move |_| get(prober.clone(), "/readyz"))),
    ];
    recorder.wait_until_accepted(40, Duration::from_secs(30)).await;

    let silent_at = Instant::now();
    proxy.silence();
    let says_why = |line: &str| line.contains("WARN") && line.contains("connections to the database are dead");
    replica.process.wait_for_line(says_why, RECOVERY_MAX).await;
    eventually("posts are accepted again", RECOVERY_MAX, async || {
        posts.lock().unwrap().iter().any(|post| post.status == 202 && post.sent_at > silent_at + Duration::from_secs(1))
    })
    .await;
    let accepted_after = posts.lock().unwrap().iter().filter(|post| post.status == 202).count();
    let left = (silent_at + RECOVERY_MAX).saturating_duration_since(Instant::now());
    recorder.wait_until_accepted((accepted_after + 1) * 2, left).await;
    println!("fan-out and dispatch continued after {:?}", silent_at.elapsed());
    let left = (silent_at + RECOVERY_MAX).saturating_duration_since(Instant::now());
    eventually("the process is ready again", left, async || match admin.get("/readyz").await {
        answer if answer.json()["status"] == "ready" => Ok(()),
        other => Err(other.text),
    })
    .await;
    stop.cancel();
    for task in tasks {
        task.await.unwrap();
    }

    let answers = [("post", posts.lock().unwrap().clone()), ("read", reads.lock().unwrap().clone())];
    let few_seconds = FEW_SECONDS + busy_time(answers.iter().flat_map(|(_, answers)| answers), silent_at);
    for (what, answers) in &answers {
        check_answers(what, answers, silent_at, few_seconds);
    }
    let unready = checks.lock().unwrap().iter().filter(|check| check.status == 503).count();
    assert!(unready > 0, "/readyz never reported that nothing worked");
    let accepted = posts.lock().unwrap().iter().filter(|post| post.status == 202).count();
    recorder.wait_until_accepted(accepted * 2, Duration::from_secs(20)).await;
    recorder.check_lane_order();
    assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
}

/// What other work of this machine may add to the time of an answer: ten times the slowest answer before the silence.
fn busy_time<'a>(answers: impl Iterator<Item = &'a Answer>, silent_at: Instant) -> Duration {
    let before = answers.filter(|answer| answer.answered_at < silent_at);
    10 * before.map(|answer| answer.answered_at - answer.sent_at).max().unwrap_or_default()
}

/// Fails unless every request was answered within a few seconds, with success or 503, and none with 503 later on.
fn check_answers(what: &str, answers: &[Answer], silent_at: Instant, few_seconds: Duration) {
    for answer in answers {
        let took = answer.answered_at - answer.sent_at;
        assert!(took < few_seconds, "a {what} was answered {} after {took:?}", answer.status);
        match answer.status {
            200 | 202 => {}
            503 => assert!(
                answer.answered_at < silent_at + few_seconds,
                "a {what} was unavailable {:?} after the silence began",
                answer.answered_at - silent_at
            ),
            other => panic!("a {what} was answered {other}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_database_makes_the_process_unready_and_its_lag_unknown() {
    let database = TestDatabase::new(&migrations()).await;
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let mut replica = Replica::start_with(&proxy.url(&database.url()), ALL_ROLES, &SETTINGS);
    let admin = replica.admin().await;
    let lag = async || metric(&admin, "pillarbox_consumer_lag_seconds{consumer=\"hub.fanout\"}").await;
    let measured_at = async || metric(&admin, "pillarbox_lag_measured_timestamp_seconds").await;
    eventually("the lag is measured", Duration::from_secs(20), async || {
        lag().await.is_some_and(|lag| lag < 60.0) && measured_at().await.is_some_and(|at| at > 1e9)
    })
    .await;
    let consumers = admin.get("/admin/v1/consumers").await.json();
    assert!(consumers["items"][0]["measured_at"].is_string(), "{consumers}");

    proxy.stall();
    eventually("the process is unready", Duration::from_secs(8), async || match admin.get("/readyz").await {
        answer if answer.status == 503 => Ok(()),
        other => Err(other.text),
    })
    .await;
    // Not 0, and not the value of the last measurement.
    eventually("the lag is unknown", Duration::from_secs(15), async || lag().await.is_some_and(f64::is_nan)).await;
    let is_down = |name: &str, line: &str| line.contains("WARN") && line.contains(" down ") && line.contains(name);
    // The tasks that share the pool of workers may wait for one of its connections instead.
    let says_why = |line: &str| line.contains("no response") || line.contains("pool timed out");
    for name in ["watcher", "heartbeat", "lag"] {
        replica.process.wait_for_line(|line| is_down(name, line) && says_why(line), FEW_SECONDS).await;
    }
    let frozen = measured_at().await;
    let report = admin.get("/readyz").await.json();
    for name in ["postgres", "watcher", "heartbeat", "lag"] {
        let check = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap().clone();
        assert!(check["up"] == false && check["error"].is_string(), "{name}: {report}");
    }

    proxy.pass();
    eventually("the process is ready and measures again", Duration::from_secs(20), async || {
        let is_ready = admin.get("/readyz").await.json()["status"] == "ready";
        is_ready && lag().await.is_some_and(|lag| lag >= 0.0) && measured_at().await > frozen
    })
    .await;
    assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
}

/// The value of a metric of the process; None if it has no such metric.
async fn metric(client: &Client, name: &str) -> Option<f64> {
    let metrics = client.get("/metrics").await.text;
    metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_connections_do_not_occupy_their_pool() {
    const CONNECTIONS: u32 = 2;
    let database = TestDatabase::new(&migrations()).await;
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    for for_workers in [true, false] {
        let limits =
            PoolLimits { connections_min: 0, connections_max: CONNECTIONS, for_workers, ..PoolLimits::default() };
        let pool = database::pool(proxy.url(&database.url()).parse().unwrap(), limits);
        for round in 0..3 {
            // All connections are in use, one is returned while it is idle, and the proxy swallows everything from now on.
            let (one, two) = (pool.acquire().await.unwrap(), pool.acquire().await.unwrap());
            proxy.silence();
            let waiting = async {
                let mut one = one;
                sqlx::query("select 1").execute(&mut *one).await.map(drop)
            };
            let error = step(&pool, "test", Duration::from_millis(300), waiting).await.unwrap_err();
            assert!(is_no_response(&error) && error.to_string().contains("test"), "{error}");
            drop(two);
            eventually(&format!("both places are free, round {round}"), Duration::from_secs(6), async || {
                let began = Instant::now();
                let both = tokio::try_join!(pool.acquire(), pool.acquire());
                match both {
                    Ok(_) if began.elapsed() < Duration::from_secs(4) => Ok(()),
                    Ok(_) => Err("too slow".to_owned()),
                    Err(error) => Err(error.to_string()),
                }
            })
            .await;
        }
        pool.close().await;
    }
}

#[tokio::test]
async fn a_step_that_was_given_up_releases_its_locks_soon() {
    let database = TestDatabase::new(&migrations()).await;
    let pool = database::pool(database.connect_options(), PoolLimits { connections_min: 0, ..PoolLimits::default() });
    let statement = async {
        let query = "select pg_advisory_lock(1), pg_sleep(9)";
        sqlx::query(query).execute(&mut *pool.acquire().await?).await.map(drop)
    };
    let error = step(&pool, "test", Duration::from_millis(500), statement).await.unwrap_err();
    assert!(is_no_response(&error), "{error}");
    // PostgreSQL would notice it when the statement ends and its result cannot be sent.
    eventually("the lock is free", Duration::from_secs(5), async || {
        sqlx::query_scalar::<_, bool>("select pg_try_advisory_lock(1)").fetch_one(database.pool()).await.unwrap()
    })
    .await;
    pool.close().await;
}

/// sqlx knows of a transaction only after the response to `begin`.
#[tokio::test]
async fn a_connection_whose_begin_was_abandoned_runs_no_other_statement() {
    let database = TestDatabase::new(&migrations()).await;
    for for_workers in [false, true] {
        let limits = PoolLimits { connections_min: 0, connections_max: 1, for_workers, ..PoolLimits::default() };
        let pool = database::pool(database.url().parse().unwrap(), limits);
        database::ping(&pool).await.unwrap();
        for polls in 1..60 {
            // The pool tests what returns to it after a step was abandoned.
            let _ = deadline::within(Duration::ZERO, std::future::pending::<()>()).await;
            abandon(pool.begin(), polls).await;
            let query = sqlx::raw_sql("select now() <> statement_timestamp()");
            let is_in_transaction: bool = query.fetch_one(&pool).await.unwrap().get(0);
            assert!(!is_in_transaction, "abandoned after {polls} polls");
        }
        pool.close().await;
    }
}

/// Polls a future so many times, and drops it. The pauses are shorter than a response takes.
async fn abandon(future: impl Future, polls: usize) {
    let mut future = std::pin::pin!(future);
    for _ in 0..polls {
        if futures_util::poll!(&mut future).is_ready() {
            return;
        }
        std::thread::sleep(Duration::from_micros(20));
        tokio::task::yield_now().await;
    }
}
