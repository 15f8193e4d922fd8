//! Replays while their process and PostgreSQL are killed.

use std::collections::HashSet;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use testkit::{Client, PrivateServers, Received, Receiver, Server, eventually};

use crate::hub::fixture::{numbered_events, post_batch, subscribe, test_size, wait_for_webhooks};
use crate::hub::process::Replica;
use crate::hub::recorder::RequestRecorder;
use crate::hub::replays::{hour_ago, request_replay};
use crate::support::text;

const LANES: usize = 20;
const TIME_MAX: Duration = Duration::from_secs(120);

/// The request of a replay with its lane and its number.
fn replayed(received: &[Received]) -> Vec<(String, u64)> {
    let of_replay = received.iter().filter(|request| request.headers.contains_key("webhook-replay"));
    of_replay
        .map(|request| request.json())
        .map(|payload| (text(&payload["lane"]).to_owned(), payload["n"].as_u64().unwrap()))
        .collect()
}

/// Fails unless the first requests of each lane are 1, 2, 3 and so on, up to `last`.
fn check_first_requests(requests: &[(String, u64)], last: u64) {
    let mut seen = HashSet::new();
    let first: Vec<&(String, u64)> = requests.iter().filter(|request| seen.insert(*request)).collect();
    for lane in 0..LANES {
        let lane = format!("lane-{lane}");
        let numbers: Vec<u64> = first.iter().filter(|(of, _)| *of == lane).map(|(_, n)| *n).collect();
        assert_eq!(numbers, (1..=last).collect::<Vec<_>>(), "{lane}");
    }
}

async fn wait_until_created(db: &PgPool, least: i64) {
    eventually(&format!("{least} messages are created"), TIME_MAX, async || {
        let query = "select created from pillarbox_hub.replay";
        match sqlx::query_scalar::<_, i64>(query).fetch_one(db).await {
            Ok(created) if created >= least => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

async fn wait_until_delivered(client: &Client, replay: &Value, count: usize) {
    let path = format!("/hub/v1/replays/{}", text(&replay["id"]));
    eventually("the replay is delivered", TIME_MAX, async || {
        let shown = client.get(&path).await.json();
        match shown["state"] == "finished" && shown["delivered"] == count && shown["waiting"] == 0 {
            true => Ok(()),
            false => Err(shown),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_killed_twice_and_with_its_database_finishes_with_none_missing() {
    let last = test_size(250, 5_000);
    let count = last * LANES;
    let servers = PrivateServers::start(&[Server::Postgres]).await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let db = PgPool::connect(servers.postgres_url()).await.unwrap();
    let mut replica = Replica::start(servers.postgres_url());
    let admin = replica.admin().await;
    let receiver = Receiver::start().await;
    subscribe(&admin, &receiver.url(), json!({})).await;
    for first in (1..=last).step_by(50) {
        post_batch(&admin, numbered_events(LANES, first..first + 50)).await;
    }
    wait_for_webhooks(&receiver, count).await;
    // Slow enough to be killed on the way.
    let rate = test_size(2_000, 4_000);
    let replay = request_replay(&admin, json!({"from": hour_ago(), "rate_per_second": rate})).await;
    let mut parts = (1..=3).map(|part| (count * part / 5) as i64);
    wait_until_created(&db, parts.next().unwrap()).await;
    replica.process.kill9();
    replica = Replica::start(servers.postgres_url());
    wait_until_created(&db, parts.next().unwrap()).await;
    servers.while_postgres_is_down(async {}).await;
    let db = PgPool::connect(servers.postgres_url()).await.unwrap();
    wait_until_created(&db, parts.next().unwrap()).await;
    replica.process.kill9();
    let replica = Replica::start(servers.postgres_url());
    wait_until_delivered(&replica.admin().await, &replay, count).await;
    let query =
        "select count(*), count(distinct (subscriber, log_id)) from pillarbox_hub.message where replay is not null";
    let created: (i64, i64) = sqlx::query_as(query).fetch_one(&db).await.unwrap();
    assert_eq!(created, (count as i64, count as i64), "each message is created once");
    check_first_requests(&replayed(&receiver.received()), last as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_killed_twice_sends_history_and_live_events_of_a_lane_in_order() {
    const LANES: usize = 5;
    let history = test_size(80, 2_000);
    let servers = PrivateServers::start(&[Server::Postgres]).await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let db = PgPool::connect(servers.postgres_url()).await.unwrap();
    let recorder = RequestRecorder::start(|_, _, n, _| (200, Duration::from_millis(n % 3))).await;
    let api = Replica::start_as(servers.postgres_url(), "api");
    let admin = api.admin().await;
    for first in (1..=history).step_by(40) {
        post_batch(&admin, numbered_events(LANES, first..first + 40)).await;
    }
    let fields = json!({"backfill": {"from": hour_ago()}, "ordering_key": "/lane"});
    subscribe(&admin, &recorder.url("new"), fields).await;
    let rate = (history * LANES / 4) as i32;
    sqlx::query("update pillarbox_hub.replay set rate_per_second = $1").bind(rate).execute(&db).await.unwrap();
    let start_workers = || Replica::start_as(servers.postgres_url(), "fanout,dispatch");
    let (mut workers, mut live) = (start_workers(), history);
    for part in 1..=2 {
        wait_until_created(&db, (history * LANES * part / 5) as i64).await;
        for _ in 0..10 {
            live += 1;
            post_batch(&admin, numbered_events(LANES, [live])).await;
        }
        workers.process.kill9();
        workers = start_workers();
    }
    sqlx::query("update pillarbox_hub.replay set rate_per_second = null").execute(&db).await.unwrap();
    let has_ended = "select state = 'finished' from pillarbox_hub.replay";
    eventually("the backfill ends while events are posted", TIME_MAX, async || {
        live += 1;
        post_batch(&admin, numbered_events(LANES, [live])).await;
        sqlx::query_scalar::<_, bool>(has_ended).fetch_one(&db).await.unwrap()
    })
    .await;
    live += 1;
    post_batch(&admin, numbered_events(LANES, [live])).await;
    recorder.wait_until_accepted(LANES * live, TIME_MAX).await;
    let repeats = recorder.check_lane_order();
    let query =
        "select count(*), count(distinct log_id), count(*) filter (where replay is null) from pillarbox_hub.message";
    let (messages, events, of_live): (i64, i64, i64) = sqlx::query_as(query).fetch_one(&db).await.unwrap();
    assert_eq!((messages, events), ((LANES * live) as i64, (LANES * live) as i64), "each event has one message");
    assert!(of_live >= LANES as i64, "the last event is live");
    println!("{repeats} of {messages} were sent again after two kills");
    drop(workers);
}
