//! Changes of routes: no message is lost between the former and the new filters.

use lapin::ExchangeKind;
use pillarbox::consumers::{Consumer, ConsumerKind, StartAt};
use pillarbox::log::{Filter, MessagePattern};
use server::migrations;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, post, relay_to, statuses};

/// The former routes of messages posted in SQL: `email.*` had a separate route.
fn former_route(name: &str) -> Consumer {
    let of_sql = |topics: &[&str]| MessagePattern {
        sources: vec!["events".to_owned(), "sql".to_owned()],
        topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
        ..MessagePattern::default()
    };
    let filter = match name {
        "relay.email" => Filter::matching(&of_sql(&["email.#"])),
        _ => Filter::matching(&of_sql(&[])).excluding([&of_sql(&["email.#"])]),
    };
    Consumer { name: name.to_owned(), kind: ConsumerKind::Relay, filter, start: StartAt::Now }
}

/// A database as processes with the former routes have left it: `relay.email` has read up to three hours ago, `relay.default` up to one
/// hour ago. `email.unread` was posted in between.
async fn database_with_the_former_routes() -> TestDatabase {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    post(db, "email.read", Some("k"), 1).await;
    former_route("relay.email").register(db).await.unwrap();
    post(db, "email.unread", Some("k"), 2).await;
    post(db, "order.created", Some("k"), 3).await;
    former_route("relay.default").register(db).await.unwrap();
    for (topic, hours) in [("email.read", 5), ("email.unread", 2), ("order.created", 2)] {
        let query = "update pillarbox.log set at = at - make_interval(hours => $1) where topic = $2";
        sqlx::query(query).bind(hours).bind(topic).execute(db).await.unwrap();
    }
    for (route, hours) in [("relay.email", 3), ("relay.default", 1)] {
        let query = "update pillarbox.position set at = at - make_interval(hours => $1),
                     old_at = old_at - make_interval(hours => $1), new_at = new_at - make_interval(hours => $1)
                     where consumer = $2";
        sqlx::query(query).bind(hours).bind(route).execute(db).await.unwrap();
    }
    database
}

/// Posts a message and returns the topics of everything that is published until it arrives.
async fn published_until(amqp: &BrokerClient, db: &PgPool, last: &str) -> Vec<String> {
    post(db, last, Some("k"), 9).await;
    let mut received = Vec::new();
    amqp.consume_until("mine", &mut received, |received| received.last().is_some_and(|one| one.kind == last)).await;
    received.into_iter().map(|one| one.kind).collect()
}

/// The routes whose replay is not requested yet.
async fn waiting_routes(db: &PgPool) -> Vec<String> {
    let query = "select consumer from pillarbox.filter_change where replay_from is not null order by consumer";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

/// How long the default route has waited for other processes, according to the metrics.
async fn waiting_seconds(app: &TestApp) -> f64 {
    let metrics = app.anonymous().get("/metrics").await.text;
    let prefix = "pillarbox_route_replay_waiting_seconds{consumer=\"relay.default\"} ";
    metrics.lines().find_map(|line| line.strip_prefix(prefix)).map_or(0.0, |value| value.parse().unwrap())
}

async fn wait_for_the_replay(db: &PgPool) {
    let query = "select coalesce(bool_and(done), false)
                 from pillarbox.replay_shard join pillarbox.replay on replay.id = replay where consumer = 'relay.default'";
    eventually("the replay is done", TIMEOUT, async || {
        sqlx::query_scalar::<_, bool>(query).fetch_one(db).await.unwrap()
    })
    .await;
}

#[tokio::test]
async fn a_message_between_the_former_and_the_new_routes_is_published_after_the_change() {
    let (database, vhost) = (database_with_the_former_routes().await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
    amqp.queue("mine", "pillarbox.events", "#").await;
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    wait_for_the_replay(db).await;
    // Neither what the other route had published, nor what this route had published itself.
    assert_eq!(published_until(&amqp, db, "order.last").await, ["email.unread", "order.last"]);
    assert_eq!(statuses(db, "relay.default", "email.unread").await, ["sent"]);
    app.stop().await;

    // The next start with the same routes replays nothing.
    let count =
        async || -> i64 { sqlx::query_scalar("select count(*) from pillarbox.replay").fetch_one(db).await.unwrap() };
    let before = count().await;
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    assert_eq!(published_until(&amqp, db, "order.again").await, ["order.again"]);
    assert_eq!(count().await, before);
    app.stop().await;
}

#[tokio::test]
async fn the_replay_waits_until_no_process_reads_with_the_former_filter() {
    let (database, vhost) = (database_with_the_former_routes().await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
    amqp.queue("mine", "pillarbox.events", "#").await;
    // A process with the former routes.
    let replica = uuid::Uuid::now_v7();
    let insert = "with process as (insert into pillarbox.replica (id, name, until) values ($1, 'former', now() + interval '1 h'))
                  insert into pillarbox.shard_worker (consumer, owner, replica, filter) values ('relay.default', $1, $1, 'former')";
    sqlx::query(insert).bind(replica).execute(db).await.unwrap();
    let own = "update pillarbox.lease set owner = $1 where consumer = 'relay.default'";
    sqlx::query(own).bind(replica).execute(db).await.unwrap();
    let app = TestApp::start_with(&database, relay_to(&vhost)).await;
    let workers = "select count(*) from pillarbox.shard_worker where consumer = 'relay.default' and filter <> 'former'";
    eventually("both workers have joined, and the other routes wait for nothing", TIMEOUT, async || {
        let workers: i64 = sqlx::query_scalar(workers).fetch_one(db).await.unwrap();
        workers == 2 && waiting_routes(db).await == ["relay.default"]
    })
    .await;
    // The workers of a process look for something to do with each of its heartbeats.
    let lease_ends = "select max(until) from pillarbox.replica where id <> $1";
    let lease_ends = async || -> chrono::DateTime<chrono::Utc> {
        sqlx::query_scalar(lease_ends).bind(replica).fetch_one(db).await.unwrap()
    };
    let before = lease_ends().await;
    let two_heartbeats = chrono::TimeDelta::milliseconds(900);
    eventually("two heartbeats", TIMEOUT, async || lease_ends().await >= before + two_heartbeats).await;
    assert_eq!(waiting_routes(db).await, ["relay.default"]);
    eventually("operators see that the route waits", TIMEOUT, async || waiting_seconds(&app).await > 0.0).await;
    // The replay also covers messages that this process reads while the route waits: here it has read up to now.
    post(db, "email.passed", Some("k"), 4).await;
    let passed = "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
                  select 'relay.default', array_agg(shard), array_agg(0::bigint), pg_current_snapshot(), last_value, now(),
                         pg_current_snapshot(), last_value, now()
                  from pillarbox.shards() as shard, pillarbox.log_id group by last_value";
    sqlx::query(passed).execute(db).await.unwrap();
    sqlx::query("delete from pillarbox.replica where id = $1").bind(replica).execute(db).await.unwrap();
    wait_for_the_replay(db).await;
    let mut published = published_until(&amqp, db, "order.last").await;
    published.sort();
    assert_eq!(published, ["email.passed", "email.unread", "order.last"]);
    assert_eq!(waiting_routes(db).await, [""; 0]);
    eventually("the route waits no longer", TIMEOUT, async || waiting_seconds(&app).await == 0.0).await;
    app.stop().await;
}
