//! Backfills: a new subscriber gets what was posted before it was created, in the order of its lanes, and then live events.

use std::time::Duration;

use serde_json::{Value, json};
use server::settings::Role;
use sqlx::PgPool;
use testkit::{Client, Receiver, TestApp, eventually};
use uuid::Uuid;
use webhook_client::AllowedNetworks;

use crate::hub::fixture::{
    Fixture, error_pointers, numbered_events, patch_subscriber, post_batch, subscribe, test_size, wait_for_webhooks,
};
use crate::hub::recorder::RequestRecorder;
use crate::hub::replays::{hour_ago, is_delivered, lanes_of, request_replay, wait_for_replay};
use crate::support::{DEADLINE, text, uuid_of};

/// The backfill of a new subscriber.
async fn backfill_of(manager: &Client, subscriber: &Value) -> Value {
    let path = format!("/hub/v1/replays?subscriber_id={}", text(&subscriber["id"]));
    let replays = manager.get(&path).await.json();
    assert_eq!(replays["items"][0]["kind"], "backfill", "{replays}");
    replays["items"][0].clone()
}

#[tokio::test]
async fn history_and_live_events_of_a_lane_arrive_in_order() {
    const LANES: usize = 5;
    let (history, live) = (test_size(120, 4_000), test_size(60, 2_000));
    let Fixture { app, manager, database } = Fixture::start().await;
    let recorder = RequestRecorder::start(|_, _, n, _| (200, Duration::from_millis(n % 3))).await;
    for first in (1..=history).step_by(60) {
        post_batch(&manager, numbered_events(LANES, first..(first + 60).min(history + 1))).await;
    }
    let posting = async {
        for n in history + 1..=history + live {
            post_batch(&manager, numbered_events(LANES, [n])).await;
        }
    };
    let subscribing = async {
        // One lane at a time would be too easy: the values in the payload span the shards of the log.
        let fields = json!({"backfill": {"from": hour_ago()}, "ordering_key": "/lane"});
        subscribe(&manager, &recorder.url("new"), fields).await
    };
    let ((), subscriber) = tokio::join!(posting, subscribing);
    let backfill = backfill_of(&manager, &subscriber).await;
    wait_for_replay(&manager, &backfill, "the backfill ends", |shown| shown["state"] == "finished").await;
    post_batch(&manager, numbered_events(LANES, [history + live + 1])).await;
    let all = LANES * (history + live + 1);
    recorder.wait_until_accepted(all, DEADLINE * 2).await;
    assert_eq!(recorder.check_lane_order(), 0, "no event is sent twice");
    let query = "select count(*) from (
                     select lane from pillarbox_hub.message where subscriber = $1::text::uuid
                     group by lane having min(seq) <> 1 or max(seq) <> count(*) or count(distinct seq) <> count(*)) as bad";
    let bad: i64 = sqlx::query_scalar(query).bind(text(&subscriber["id"])).fetch_one(database.pool()).await.unwrap();
    assert_eq!(bad, 0, "the numbers of each lane begin with 1 and have no gap");
    app.stop().await;
}

/// Fan-out reads the directory first and the replay later in one transaction. In between, a subscriber is committed that the
/// replay belongs to.
#[tokio::test]
async fn a_replay_of_a_subscriber_that_is_newer_than_the_directory_does_not_fail() {
    let Fixture { app, manager, database } = Fixture::start().await;
    let receiver = Receiver::start().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    post_batch(&manager, numbered_events(1, 1..=4)).await;
    wait_for_webhooks(&receiver, 4).await;
    let body = json!({"subscriber_id": subscriber["id"], "from": hour_ago(), "rate_per_second": 1});
    let replay = request_replay(&manager, body).await;
    let mut tx = database.pool().begin().await.unwrap();
    let new = Uuid::now_v7();
    let id = text(&replay["id"]);
    let lock = "select from pillarbox_hub.replay where id = $1::text::uuid for update";
    sqlx::query(lock).bind(id).execute(&mut *tx).await.unwrap();
    for query in [
        "insert into pillarbox_hub.subscriber
         select (jsonb_populate_record(known, jsonb_build_object('id', $2::uuid))).*
         from pillarbox_hub.subscriber as known, pillarbox_hub.replay
         where replay.id = $1::text::uuid and known.id = replay.subscriber",
        "update pillarbox_hub.replay set subscriber = $2 where id = $1::text::uuid",
    ] {
        sqlx::query(query).bind(id).bind(new).execute(&mut *tx).await.unwrap();
    }
    eventually("fan-out waits for the replay", DEADLINE, async || {
        let query = "select count(*) from pg_stat_activity
                     where datname = current_database() and wait_event_type = 'Lock' and query like '%pillarbox_hub.replay%'";
        let waiting: i64 = sqlx::query_scalar(query).fetch_one(database.pool()).await.unwrap();
        if waiting > 0 { Ok(()) } else { Err(waiting) }
    })
    .await;
    tx.commit().await.unwrap();
    let has_ended = |shown: &Value| !matches!(shown["state"].as_str(), Some("pending" | "running"));
    let shown = wait_for_replay(&manager, &replay, "the replay ends", has_ended).await;
    assert_eq!(shown["state"], "finished", "{shown}");
    app.stop().await;
}

async fn insert_in(tx: &mut sqlx::PgConnection, lane: &str, n: u64) {
    let query = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
                 values (pillarbox.shard_of('acme', $2), $1, 'hub', 'acme', 'test.numbered', $2, '{}', $3::json)";
    let payload = json!({"lane": lane, "n": n}).to_string();
    sqlx::query(query).bind(Uuid::now_v7()).bind(lane).bind(payload).execute(tx).await.unwrap();
}

async fn start_workers(database: &testkit::TestDatabase) -> TestApp {
    TestApp::start_with(database, |settings| {
        settings.hub.allowed_networks = Some(AllowedNetworks::loopback());
        settings.roles = vec![Role::Fanout, Role::Dispatch];
    })
    .await
}

async fn created_count(db: &PgPool) -> i64 {
    sqlx::query_scalar("select max(created) from pillarbox_hub.replay").fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn a_transaction_that_commits_during_the_backfill_is_neither_lost_nor_late() {
    const HISTORY: usize = 40;
    let Fixture { app, manager, database } = Fixture::start_with(|settings| settings.roles = vec![Role::Api]).await;
    let (db, receiver, other) = (database.pool(), Receiver::start().await, Receiver::start().await);
    subscribe(&manager, &other.url(), json!({})).await;
    // Its ids are lower than those of everything that is posted below.
    let mut late = db.begin().await.unwrap();
    insert_in(&mut late, "lane-0", 1).await;
    insert_in(&mut late, "lane-9", 1).await;
    let workers = start_workers(&database).await;
    post_batch(&manager, numbered_events(1, 2..HISTORY + 2)).await;
    wait_for_webhooks(&other, HISTORY).await;
    workers.stop().await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({"backfill": {"from": hour_ago()}})).await;
    let slowly = "update pillarbox_hub.replay set rate_per_second = 40";
    sqlx::query(slowly).execute(db).await.unwrap();
    let workers = start_workers(&database).await;
    eventually("the backfill has begun", DEADLINE, async || created_count(db).await > 0).await;
    late.commit().await.unwrap();
    post_batch(&manager, vec![numbered_events(10, [2]).pop().unwrap()]).await;
    wait_for_webhooks(&other, HISTORY + 3).await;
    assert!(created_count(db).await < HISTORY as i64, "the transaction has committed during the backfill");
    sqlx::query("update pillarbox_hub.replay set rate_per_second = null").execute(db).await.unwrap();
    let backfill = backfill_of(&manager, &subscriber).await;
    wait_for_replay(&manager, &backfill, "the backfill ends", is_delivered).await;
    post_batch(&manager, vec![numbered_events(10, [3]).pop().unwrap()]).await;
    wait_for_webhooks(&receiver, HISTORY + 4).await;
    let received = receiver.received();
    let numbers = |lane: &str| -> Vec<u64> {
        let of_lane = received.iter().map(|request| request.json()).filter(|payload| payload["lane"] == lane);
        of_lane.map(|payload| payload["n"].as_u64().unwrap()).collect()
    };
    assert_eq!(numbers("lane-9"), [1, 2, 3], "what was posted later waits for it");
    let mut first_lane = numbers("lane-0");
    assert_eq!(first_lane.iter().position(|n| *n == 1), Some(HISTORY), "it was not visible before");
    first_lane.sort_unstable();
    assert_eq!(first_lane, (1..=HISTORY as u64 + 1).collect::<Vec<_>>());
    workers.stop().await;
    app.stop().await;
}

#[tokio::test]
async fn a_paused_backfill_delays_live_events_and_a_canceled_one_continues_with_them() {
    let Fixture { app, manager, database } = Fixture::start_with(|settings| settings.roles = vec![Role::Api]).await;
    let receiver = Receiver::start().await;
    post_batch(&manager, numbered_events(1, 1..=10)).await;
    let held =
        subscribe(&manager, &format!("{}/held", receiver.url()), json!({"backfill": {"from": hour_ago()}})).await;
    let ended =
        subscribe(&manager, &format!("{}/ended", receiver.url()), json!({"backfill": {"from": hour_ago()}})).await;
    let live = subscribe(&manager, &format!("{}/live", receiver.url()), json!({})).await;
    for (subscriber, action) in [(&held, "pause"), (&ended, "cancel")] {
        let backfill = backfill_of(&manager, subscriber).await;
        let changed = manager.post(&format!("/hub/v1/replays/{}/{action}", text(&backfill["id"])), json!({})).await;
        assert_eq!(changed.status, 200, "{changed:?}");
    }
    let refused = patch_subscriber(&manager, uuid_of(&live["id"]), json!({"backfill": {"from": hour_ago()}})).await;
    assert_eq!(error_pointers(&refused), ["/backfill"]);
    let workers = start_workers(&database).await;
    post_batch(&manager, numbered_events(1, 11..=12)).await;
    let lane_at = |path: &str| {
        let at_path = |request: &testkit::Received| request.path.ends_with(path);
        let received: Vec<_> = receiver.received().into_iter().filter(at_path).collect();
        let mut lanes = lanes_of(&received, None);
        lanes.remove("lane-0").unwrap_or_default()
    };
    // Events 1 to 10 were not read when the others were created: they are live for both.
    eventually("live events arrive", DEADLINE, async || lane_at("/live").len() == 12 && lane_at("/ended").len() == 12)
        .await;
    assert_eq!(lane_at("/held"), Vec::<u64>::new());
    let backfill = backfill_of(&manager, &held).await;
    let resumed = manager.post(&format!("/hub/v1/replays/{}/resume", text(&backfill["id"])), json!({})).await;
    assert_eq!(resumed.status, 200, "{resumed:?}");
    wait_for_replay(&manager, &backfill, "the backfill ends", is_delivered).await;
    post_batch(&manager, numbered_events(1, [13])).await;
    eventually("the next event is live", DEADLINE, async || lane_at("/held") == [13]).await;
    let received = receiver.received();
    let lanes = lanes_of(&received, backfill["id"].as_str());
    assert_eq!(lanes["lane-0"], (1..=12).collect::<Vec<u64>>());
    workers.stop().await;
    app.stop().await;
}
