//! Processes on a database whose time is moved: webhooks that wait for days, the age of trending events, and a process whose
//! clock is far ahead of the database's.

use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox::operations::maintenance::Retention;
use serde_json::{Value, json};
use server::settings::Role;
use sqlx::PgPool;
use testkit::{Client, Receiver, TestApp, eventually};

use crate::days::support::{DAY, Server, day, exists, maintain, start};
use crate::events::fixture::{
    event_id, feed_titles, in_hours, join_message, meetup_with, new_user, post_messages, publish_event,
};
use crate::hub::fixture::{post, subscribe, subscriber_path, wait_for_outcome, wait_for_webhooks};
use crate::support::DEADLINE;

/// 32 bytes in base64.
const SECRET_KEY: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
const ALL_ROLES: &str = "api,consume,fanout,dispatch,maintain";
/// Without other consumers, for which retention would wait, too.
const HUB_ROLES: &str = "api,fanout,dispatch,maintain";

/// The start of the log that a retention hold preserves.
async fn retention_start(db: &PgPool) -> Option<chrono::DateTime<chrono::Utc>> {
    let query = "select from_at from pillarbox.retention_hold where holder = 'hub'";
    sqlx::query_scalar(query).fetch_optional(db).await.unwrap()
}

/// Waits until fan-out has advanced to the current time, so that retention no longer waits for it. It advances with new events.
async fn wait_for_fan_out(db: &PgPool, admin: &Client) {
    eventually("fan-out has read the log", DEADLINE, async || {
        post(admin, "other.posted", json!({}), None).await;
        let query = "select count(*) = 16 and min(old_at) > now() - interval '1 hour' from pillarbox.shards() as shard
                     cross join lateral pillarbox.latest_position('hub.fanout', shard)";
        sqlx::query_scalar::<_, bool>(query).fetch_one(db).await.unwrap()
    })
    .await;
}

#[tokio::test]
async fn the_log_is_retained_for_a_webhook_that_is_not_sent_yet() {
    let time = start().await;
    let (db, receiver) = (time.database().pool(), Receiver::start().await);
    let mut server = Server::start(&time.database().url(), SECRET_KEY, HUB_ROLES, &time.environment());
    let admin = server.admin().await;
    let subscriber = subscribe(&admin, &receiver.url(), json!({"event_types": ["test.posted"]})).await;
    let path = subscriber_path(&subscriber);
    assert_eq!(admin.post(&format!("{path}/pause"), json!({})).await.status, 200);
    let event = post(&admin, "test.posted", json!({"n": 1}), None).await;
    wait_for_outcome(&admin, &event, &subscriber, "pending").await;
    let (log, messages) = (day(db, "pillarbox.log", 0).await, day(db, "pillarbox_hub.message", 0).await);
    assert!(server.process.terminate().await.success());

    time.advance(10 * DAY);
    let mut server = Server::start(&time.database().url(), SECRET_KEY, HUB_ROLES, &time.environment());
    let admin = server.admin().await;
    // The first round of the hub's maintenance: it holds the log and moves the pending message to today.
    eventually("the old messages are dropped", DEADLINE, async || !exists(db, &messages).await).await;
    assert!(retention_start(db).await.is_some(), "the hub holds the log");
    // Retention waits for no consumer any more.
    wait_for_fan_out(db, &admin).await;
    maintain(db, Retention::default()).await;
    assert!(exists(db, &log).await, "the content of the webhook is in the log");
    assert_eq!(admin.post(&format!("{path}/resume"), json!({})).await.status, 200);
    wait_for_webhooks(&receiver, 1).await;
    assert_eq!(receiver.received()[0].json(), json!({"n": 1}));
    wait_for_outcome(&admin, &event, &subscriber, "delivered").await;
    let is_saved =
        "select exists (select from pillarbox_hub.position where n >= (select max(n) from pillarbox_hub.message))";
    eventually("the position of the subscriber is saved", DEADLINE, async || {
        sqlx::query_scalar::<_, bool>(is_saved).fetch_one(db).await.unwrap()
    })
    .await;
    assert!(server.process.terminate().await.success());

    let mut server = Server::start(&time.database().url(), SECRET_KEY, HUB_ROLES, &time.environment());
    let admin = server.admin().await;
    eventually("the hold is removed", DEADLINE, async || retention_start(db).await.is_none()).await;
    wait_for_fan_out(db, &admin).await;
    maintain(db, Retention::default()).await;
    assert!(!exists(db, &log).await, "retention goes on");
    assert!(server.process.terminate().await.success());
    assert_eq!(receiver.count(), 1);
}

#[tokio::test]
async fn the_position_of_a_subscriber_outlives_its_day() {
    let time = start().await;
    let (db, receiver) = (time.database().pool(), Receiver::start().await);
    let mut server = Server::start(&time.database().url(), SECRET_KEY, ALL_ROLES, &time.environment());
    let admin = server.admin().await;
    let subscriber = subscribe(&admin, &receiver.url(), json!({})).await;
    post(&admin, "test.posted", json!({"n": 1}), None).await;
    wait_for_webhooks(&receiver, 1).await;
    let newest = async || {
        let query = "select max(n) from pillarbox_hub.position";
        sqlx::query_scalar::<_, Option<i64>>(query).fetch_one(db).await.unwrap()
    };
    eventually("its position is saved", DEADLINE, async || newest().await == Some(1)).await;
    assert!(server.process.terminate().await.success());
    let stored = day(db, "pillarbox_hub.position", 0).await;

    time.advance(20 * DAY);
    let mut server = Server::start(&time.database().url(), SECRET_KEY, ALL_ROLES, &time.environment());
    let admin = server.admin().await;
    eventually("the day is dropped", DEADLINE, async || !exists(db, &stored).await).await;
    assert_eq!(newest().await, Some(1), "the position is not");
    let event = post(&admin, "test.posted", json!({"n": 2}), None).await;
    wait_for_outcome(&admin, &event, &subscriber, "delivered").await;
    assert!(server.process.terminate().await.success());
    assert_eq!(receiver.count(), 2);
}

#[tokio::test]
async fn trending_decays_with_the_age_of_an_event() {
    let time = start().await;
    let db = time.database().pool();
    let app = TestApp::start_with(time.database(), |settings| settings.roles = vec![Role::Api, Role::Consume]).await;
    let secret_key = app.settings.secret_key.as_ref().unwrap().reveal().clone();
    let scorer = Server::start(&time.database().url(), &secret_key, "api,maintain", &time.environment());
    let owner = new_user(&app);
    let publish = async |title: &str, participants: i32| {
        let times = json!({"start_time": in_hours(24 * 90), "end_time": in_hours(24 * 90 + 2)});
        let mut fields = json!({"title": title, "capacity": 0});
        fields.as_object_mut().unwrap().extend(times.as_object().unwrap().clone());
        let event = publish_event(&owner, meetup_with(fields)).await;
        post_messages(db, "joins", &[join_message(event_id(&event), participants, 1)]).await;
        let counted = "select count(*) = 1 from pillarbox_events.event where title = $1 and active_participants = $2";
        eventually("the participants are counted", DEADLINE, async || {
            sqlx::query_scalar::<_, bool>(counted).bind(title).bind(participants).fetch_one(db).await.unwrap()
        })
        .await;
    };
    publish("crowd", 1_000).await;
    publish("club", 50).await;
    let reader = app.anonymous();
    wait_for_titles(&reader, &["crowd", "club"]).await;
    // An event loses 5 points an hour; the crowd had 3,000 points more than the club.
    time.advance(30 * DAY);
    scorer.process.wait_for_line(|line| line.contains("listening"), DEADLINE).await;
    // The clock of the server follows the database's within a second or two.
    eventually("the server has noticed the new day", DEADLINE, async || {
        reader.get("/readyz").await.json()["checks"]
            .as_array()
            .unwrap()
            .iter()
            .any(|check| check["name"] == "clock" && check["up"] == false)
    })
    .await;
    publish("news", 50).await;
    wait_for_titles(&reader, &["news", "crowd", "club"]).await;
    app.stop().await;
}

/// Waits until the trending feed has these titles. A cached page may be 15 s old; another limit is another page.
async fn wait_for_titles(reader: &Client, expected: &[&str]) {
    let mut limit = 10;
    eventually("the events are scored", DEADLINE, async || {
        limit = limit % 99 + 1;
        match feed_titles(reader, &format!("sort=trending&limit={}", limit.max(10))).await {
            found if found == expected => Ok(()),
            other => Err(other),
        }
    })
    .await;
}

/// The number of rows of each partition of the log, the consumers and the hub.
async fn rows(db: &PgPool) -> BTreeMap<String, i64> {
    let query = "select inhrelid::regclass::text from pg_inherits join pg_class on pg_class.oid = inhrelid
                 where relnamespace::regnamespace::text like 'pillarbox%' and relkind = 'r'";
    let partitions: Vec<String> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
    let mut counted = BTreeMap::new();
    for partition in partitions {
        let query = format!("select count(*) from {partition}");
        counted.insert(partition, sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(db).await.unwrap());
    }
    counted
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap()
}

#[tokio::test]
async fn a_process_whose_clock_is_far_ahead_deletes_nothing_and_says_why() {
    let time = start().await;
    let (db, receiver) = (time.database().pool(), Receiver::start().await);
    let url = time.database().url();
    let mut server = Server::start(&url, SECRET_KEY, ALL_ROLES, &[]);
    let admin = server.admin().await;
    let subscriber = subscribe(&admin, &receiver.url(), json!({})).await;
    for n in 0..20 {
        let event = post(&admin, "test.posted", json!({ "n": n }), Some("lane")).await;
        if n == 19 {
            wait_for_outcome(&admin, &event, &subscriber, "delivered").await;
        }
    }
    assert_eq!(admin.get("/readyz").await.json()["status"], "ready");
    assert!(server.process.terminate().await.success());
    assert_eq!(receiver.count(), 20);
    let before = rows(db).await;

    let mut ahead = Server::start(&url, SECRET_KEY, ALL_ROLES, &time.environment_ahead(40 * DAY));
    let admin = ahead.admin().await;
    let says_why = |line: &str| line.contains("ERROR") && line.contains("s ahead of the database's");
    let line = ahead.process.wait_for_line(says_why, DEADLINE).await;
    assert!(line.contains("this process does not maintain the database until then"), "{line}");
    let report = eventually("the maintenance tasks report it", DEADLINE, async || {
        let report = admin.get("/readyz").await.json();
        let down = ["clock", "maintain", "hub.maintain", "events.trending", "joins.sweep"].iter().all(|name| {
            check(&report, name)["error"].as_str().is_some_and(|error| error.contains("ahead of the database's"))
        });
        if down { Ok(report) } else { Err(report) }
    })
    .await;
    assert_eq!(report["status"], "degraded");
    let metrics = admin.get("/metrics").await.text;
    let difference = metrics.lines().find_map(|line| line.strip_prefix("pillarbox_clock_ahead_seconds ")).unwrap();
    let difference: f64 = difference.parse().unwrap();
    assert!((difference - 40.0 * 86_400.0).abs() < 60.0, "{difference}");
    // It still serves, by the database's time.
    let event = post(&admin, "test.posted", json!({"n": 20}), Some("lane")).await;
    wait_for_outcome(&admin, &event, &subscriber, "delivered").await;
    assert!(ahead.process.terminate().await.success());
    let after = rows(db).await;
    let lost: Vec<_> = before.iter().filter(|(name, rows)| after.get(*name).is_none_or(|left| left < *rows)).collect();
    assert!(lost.is_empty(), "{lost:?}");

    // Nothing that it has written makes another process send a webhook again.
    let mut server = Server::start(&url, SECRET_KEY, ALL_ROLES, &[]);
    let admin = server.admin().await;
    let event = post(&admin, "test.posted", json!({"n": 21}), Some("lane")).await;
    wait_for_outcome(&admin, &event, &subscriber, "delivered").await;
    assert_eq!(admin.get("/readyz").await.json()["status"], "ready");
    assert!(server.process.terminate().await.success());
    assert_eq!(receiver.count(), 22, "each webhook once");
}

#[tokio::test]
async fn a_clock_that_differs_by_half_a_minute_is_accepted() {
    let time = start().await;
    let url = time.database().url();
    let mut server = Server::start(&url, SECRET_KEY, "api,maintain", &time.environment_ahead(Duration::from_secs(30)));
    let report = server.admin().await.get("/readyz").await.json();
    assert_eq!(report["status"], "ready", "{report}");
    assert!(server.process.terminate().await.success());
    let mut server = Server::start(&url, SECRET_KEY, "api,maintain", &time.environment_ahead(Duration::from_secs(90)));
    let report = server.admin().await.get("/readyz").await.json();
    assert_eq!(report["status"], "degraded", "{report}");
    assert!(server.process.terminate().await.success());
}
