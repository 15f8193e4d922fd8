//! Proves that every metric of the runbook is exported and moves, in a process with the shipped settings, and that
//! `/metrics` is well-formed.

use std::collections::BTreeSet;
use std::time::Duration;

use hyper::Method;
use lapin::ExchangeKind;
use serde_json::json;
use sqlx::PgPool;
use testkit::{Client, Receiver, Reply, TestDatabase, TestVhost, eventually};

use crate::hub::fixture::{post, subscribe};
use crate::hub::process::Replica;
use crate::relay::broker_client::BrokerClient;
use crate::server::exposition;
use crate::server::process::{ADMIN_KEY, DataFolder};

/// A sample of each metric of the runbook, and the least value that it has after [`cause_everything`].
const SAMPLES: &[(&str, f64)] = &[
    ("pillarbox_consumer_lag_seconds{consumer=\"stopped\"}", 3_600.0),
    ("pillarbox_consumer_lag_messages{consumer=\"stopped\"}", 2.0),
    ("pillarbox_consumer_parked{consumer=\"stopped\"}", 1.0),
    ("pillarbox_consumer_dead_letters{consumer=\"stopped\"}", 1.0),
    ("pillarbox_consumer_lapsed{consumer=\"lapsed\"}", 1.0),
    ("pillarbox_lag_measured_timestamp_seconds", 1.0),
    ("pillarbox_clock_ahead_seconds", -60.0),
    ("pillarbox_consumer_messages_total{consumer=\"relay.default\",outcome=\"unrouted\"}", 1.0),
    ("pillarbox_relay_published_total{route=\"default\"}", 1.0),
    ("pillarbox_relay_returned_total{route=\"default\"}", 1.0),
    ("event_publish_duration_seconds_count{route=\"default\"}", 1.0),
    ("pillarbox_intake_messages_total{queue=\"orders\"}", 1.0),
    ("pillarbox_worker_failures_total{worker=\"intake missing\"}", 1.0),
    ("eventhub_events_received_total", 3.0),
    ("eventhub_messages_delivered_total{outcome=\"delivered\"}", 1.0),
    ("eventhub_messages_delivered_total{outcome=\"failed\"}", 1.0),
    ("eventhub_messages_delivered_total{outcome=\"dead\"}", 1.0),
    ("eventhub_delivery_latency_seconds_count", 3.0),
    ("pillarbox_hub_deferred_events_lost_total", 1.0),
    ("pillarbox_hub_replayed_messages_total", 1.0),
    ("pillarbox_hub_replays{state=\"running\"}", 0.0),
    ("pillarbox_events_cache_total{outcome=\"miss\"}", 1.0),
    ("pillarbox_events_cache_total{outcome=\"hit\"}", 1.0),
];
/// The first one needs two services whose counts differ, and the next two services that read queues; the tests of
/// reconciliation and of lost queues check them. The next ones are measured
/// every 30 seconds; the tests of the hub's retention and of streams check them. Those of e-mails need a mail server; the tests
/// of its replies check them. Those of notifications need some that were given up; the tests of their operators check them. The
/// last ones need processes with different routes, and the Redis of progress; the tests of changed routes and of lost counts
/// check them.
const CHECKED_ELSEWHERE: [&str; 24] = [
    "pillarbox_reconcile_drift_total",
    "pillarbox_service_queues_created_total",
    "pillarbox_service_queue_lost_messages_total",
    "eventhub_pending_messages",
    "eventhub_dlq_size",
    "pillarbox_hub_stale_messages",
    "pillarbox_hub_stream_lag_messages",
    "pillarbox_hub_stream_lag_seconds",
    "pillarbox_hub_streams_lapsed",
    "pillarbox_mail_queued",
    "pillarbox_mail_oldest_seconds",
    "pillarbox_mail_sent_total",
    "pillarbox_mail_failures_total",
    "pillarbox_mail_dead",
    "pillarbox_mail_dead_total",
    "pillarbox_notifications_dead",
    "pillarbox_notifications_due",
    "pillarbox_notifications_oldest_seconds",
    "pillarbox_notifications_skipped_total",
    "pillarbox_route_replay_waiting_seconds",
    "pillarbox_progress_items_total",
    "pillarbox_progress_lost_total",
    "pillarbox_progress_redis_up",
    "pillarbox_progress_redis_memory_ratio",
];

#[tokio::test]
async fn every_metric_of_the_runbook_is_exported_and_moves() {
    let runbook = include_str!("../../../docs/runbook.md");
    let documented: Vec<&str> = runbook
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(|line| line.split(['{', '`']).next().unwrap())
        .filter(|name| name.starts_with("pillarbox_") || name.starts_with("event"))
        .collect();
    assert!(documented.len() > 10, "{documented:?}");
    for name in documented {
        let is_checked =
            CHECKED_ELSEWHERE.contains(&name) || SAMPLES.iter().any(|(sample, _)| sample.starts_with(name));
        assert!(is_checked, "{name} has no sample in this file");
    }

    let (database, vhost) = (TestDatabase::new(&server::migrations()).await, TestVhost::new().await);
    // Fan-out loads deferred events when it starts.
    let lost = "insert into pillarbox_hub.deferred_event (tenant, log_shard, log_id, log_at, matches, is_checked)
                values ('main', 0, 1000000, now(), 1, true)";
    sqlx::query(lost).execute(database.pool()).await.unwrap();
    let (folder, url, amqp_url) = (DataFolder::new(), database.url(), vhost.amqp_url());
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("orders", "", "").await;
    amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
    amqp.queue("bound", "pillarbox.events", "test.bound").await;
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url];
    let env = [
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_AMQP_URL", &amqp_url[..]),
        ("PILLARBOX_RELAY__INITIAL_DELAY_MS", "0"),
        ("PILLARBOX_RELAY__INTAKE", r#"[{queue="orders"}, {queue="missing"}]"#),
        ("PILLARBOX_HUB__ALLOWED_NETWORKS", "127.0.0.0/8"),
    ];
    let mut process = testkit::Pillarbox::start(testkit::program(), &args, &env);
    let admin = Client::new(&process.base_url().await).bearer(ADMIN_KEY);
    cause_everything(&admin, database.pool(), &amqp).await;
    eventually("every metric has moved", Duration::from_secs(60), async || {
        let exported = admin.get("/metrics").await.text;
        let missing: Vec<_> =
            SAMPLES.iter().filter(|(sample, least)| value(&exported, sample) < Some(*least)).collect();
        if missing.is_empty() { Ok(()) } else { Err(format!("{missing:?}")) }
    })
    .await;
    assert_eq!(exposition::violations(&admin.get("/metrics").await.text), [""; 0]);
    process
        .wait_for_line(|line| line.contains("ERROR") && line.contains("the log no longer has a deferred event"), SOON)
        .await;
    process.wait_for_line(|line| line.contains("WARN") && line.contains("no queue is bound for a message"), SOON).await;
    assert!(process.terminate().await.success());
}

/// The counters that a page names: every word that ends with `_total`.
fn counters_of(page: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = page.split(|c| !is_part(c));
    words
        .filter(|word| word.ends_with("_total") && (word.starts_with("pillarbox_") || word.starts_with("event")))
        .collect()
}

#[tokio::test]
async fn every_counter_of_the_runbook_and_the_alerts_is_at_0_right_after_the_start() {
    let runbook = include_str!("../../../docs/runbook.md");
    let mut expected = counters_of(runbook);
    expected.extend(counters_of(include_str!("../../../docs/alerts.yml")));
    expected.extend(["eventhub_delivery_latency_seconds_count", "event_publish_duration_seconds_count"]);
    assert!(expected.len() > 18, "{expected:?}");

    let (database, vhost) = (TestDatabase::new(&server::migrations()).await, TestVhost::new().await);
    let (folder, url, amqp_url) = (DataFolder::new(), database.url(), vhost.amqp_url());
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url];
    let env = [
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_AMQP_URL", &amqp_url[..]),
        ("PILLARBOX_BUS", "rabbitmq"),
        ("PILLARBOX_RELAY__INTAKE", r#"[{queue="orders"}]"#),
    ];
    let mut process = testkit::Pillarbox::start(testkit::program(), &args, &env);
    let admin = Client::new(&process.base_url().await).bearer(ADMIN_KEY);
    // A relay learns of the queues of services from their announcements.
    eventually("every counter is exported", SOON, async || {
        let exported = admin.get("/metrics").await.text;
        let is_exported = |name: &&&str| exported.lines().any(|line| line.split(['{', ' ']).next() == Some(**name));
        let missing: Vec<_> = expected.iter().filter(|name| !is_exported(name)).copied().collect();
        if missing.is_empty() { Ok(()) } else { Err(missing) }
    })
    .await;
    let exported = admin.get("/metrics").await.text;
    for sample in [
        "eventhub_messages_delivered_total{outcome=\"delivered\"}",
        "eventhub_messages_delivered_total{outcome=\"failed\"}",
        "eventhub_messages_delivered_total{outcome=\"dead\"}",
        "pillarbox_mail_failures_total{kind=\"server\"}",
        "pillarbox_notifications_skipped_total{channel=\"in_app\"}",
        "pillarbox_reconcile_drift_total{service=\"joins\"}",
        "pillarbox_consumer_messages_total{consumer=\"relay.default\",outcome=\"unrouted\"}",
        "pillarbox_consumer_messages_total{consumer=\"hub.fanout\",outcome=\"dead\"}",
        "pillarbox_relay_returned_total{route=\"email\"}",
        "pillarbox_intake_messages_total{queue=\"orders\"}",
        "pillarbox_worker_failures_total{worker=\"upkeep\"}",
    ] {
        assert_eq!(value(&exported, sample), Some(0.0), "{sample}");
    }
    assert_eq!(exposition::violations(&exported), [""; 0]);
    assert!(process.terminate().await.success());
}

fn value(exported: &str, sample: &str) -> Option<f64> {
    let line = exported.lines().find(|line| line.strip_prefix(sample).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit(' ').next()?.parse().ok()
}

const SOON: Duration = Duration::from_secs(20);

/// Causes something that each metric counts.
async fn cause_everything(admin: &Client, db: &PgPool, amqp: &BrokerClient) {
    // The old messages come first: the lag of a shard is the age of its first unread message.
    sqlx::raw_sql(
        "insert into pillarbox.log (shard, message_id, source, tenant, topic, payload, at)
         select 0, gen_random_uuid(), 'old', 'main', 'test.old', '1', now() - interval '2 hours' from generate_series(1, 2);
         select pillarbox.post('test.bound', '1'::json), pillarbox.post('test.without_queue', '1'::json);
         insert into pillarbox.cursor (consumer, kind, included, lapsed_at)
         values ('stopped', 'handler', '^old ', null), ('lapsed', 'handler', '^old ', now());
         insert into pillarbox.parked (consumer, shard, run, attempts, log_id, message_id, source, tenant, topic, headers,
                                       payload, at)
         select 'stopped', 0, 0, 1, 1, gen_random_uuid(), 'old', 'main', 'test.old', '{}', '1', now();
         insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
                                            topic, headers, payload, at)
         select 'stopped', 0, 0, 1, 'x', 1, gen_random_uuid(), 'old', 'main', 'test.old', '{}', '1', now()",
    )
    .execute(db)
    .await
    .unwrap();
    amqp.publish("orders", Some("1"), Some("order.placed"), None, b"1").await;
    for (status, name) in [(200, "good"), (400, "refusing"), (503, "failing")] {
        let receiver = Receiver::with_reply(move |_| Reply::status(status)).await;
        let fields = json!({"event_types": [format!("test.{name}")], "retry_backoff_seconds": [3600]});
        subscribe(admin, &receiver.url(), fields).await;
        post(admin, &format!("test.{name}"), json!({}), None).await;
        eventually("the webhook is sent", Duration::from_secs(20), async || receiver.count() == 1).await;
    }
    let replayed = json!({"from": "2026-01-31T08:00:00Z", "event_types": ["test.failing"]});
    assert_eq!(admin.post("/hub/v1/replays", replayed).await.status, 202);
    for _ in 0..2 {
        assert_eq!(admin.send(Method::GET, "/event/v1/events", None).await.status, 200);
    }
}

#[tokio::test]
async fn a_gauge_that_cannot_be_measured_is_unknown_and_the_others_are_not() {
    let database = TestDatabase::new(&server::migrations()).await;
    // Only the number of stale messages is read from this table.
    let hide = "alter table pillarbox_hub.attempt rename to hidden";
    sqlx::query(hide).execute(database.pool()).await.unwrap();
    let mut measuring = Replica::start_as(&database.url(), "api,maintain");
    eventually("the gauges are set", SOON, async || {
        let mut values = Vec::new();
        for name in ["eventhub_pending_messages", "eventhub_dlq_size", "pillarbox_hub_stale_messages"] {
            values.push(measuring.metric(name).await.map(|value| value.to_string()));
        }
        if values == ["0", "0", "NaN"].map(|value| Some(value.to_owned())) { Ok(()) } else { Err(values) }
    })
    .await;
    assert!(measuring.process.terminate().await.success());
}
