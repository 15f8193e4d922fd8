//! Dependencies (PostgreSQL, RabbitMQ, Redis, SMTP) that fail and recover.

use std::time::Duration;

use runtime::secret::Secret;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, FaultProxy, Response, TestApp, TestDatabase, TestRedis, TestVhost, eventually};
use uuid::Uuid;

use crate::events::fixture::meetup;

const SOON: Duration = Duration::from_secs(15);

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap()
}

async fn readiness(client: &Client, wanted: &str) -> Response {
    eventually(wanted, SOON, async || {
        let answer = client.get("/readyz").await;
        if answer.json()["status"] == wanted { Ok(answer) } else { Err(answer) }
    })
    .await
}

#[tokio::test]
async fn readiness_names_an_unreachable_database_and_recovers() {
    let database = TestDatabase::new(&migrations()).await;
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let url = proxy.url(&database.url());
    let app = TestApp::start_with(&database, |settings| settings.database_url = Some(Secret::new(url))).await;
    let client = app.anonymous();
    readiness(&client, "ready").await;

    proxy.refuse();
    let unready = eventually("readiness names the database", SOON, async || {
        let answer = client.get("/readyz").await;
        if check(&answer.json(), "postgres")["up"] == false { Ok(answer) } else { Err(answer) }
    })
    .await;
    assert_eq!((unready.status, unready.json()["status"].as_str()), (503, Some("unready")));
    // A key that cannot be looked up is an outage of the server, not an error of the caller.
    let answer = client.bearer("pbx_some_key_of_a_customer_01").get("/admin/v1/keys").await;
    answer.assert_problem(503, "unavailable");
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(client.get("/healthz").await.status, 200, "the process itself is alive");

    proxy.pass();
    assert_eq!(readiness(&client, "ready").await.status, 200);
    assert_eq!(app.admin().get("/admin/v1/keys").await.status, 200);
    app.stop().await;
}

#[tokio::test]
async fn a_connection_closed_in_the_middle_of_the_protocol_is_unavailable_and_no_internal_error() {
    let database = TestDatabase::new(&migrations()).await;
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let url = proxy.url(&database.url());
    let app = TestApp::start_with(&database, |settings| settings.database_url = Some(Secret::new(url))).await;
    let (admin, user) = (app.admin(), app.user(Uuid::now_v7(), None));
    let keyed = admin.with_header("idempotency-key", "once");
    readiness(&app.anonymous(), "ready").await;
    let event = json!({"event_type": "order.paid", "payload": 1});
    assert_eq!(admin.post("/hub/v1/events", event.clone()).await.status, 202);
    proxy.truncate();
    // Open connections end within a response, and new ones before their first.
    for _ in 0..5 {
        let join = format!("/join/v1/events/{}/join", Uuid::now_v7());
        let answers = [
            app.anonymous().bearer("pbx_some_key_of_a_customer_01").get("/admin/v1/keys").await,
            admin.get("/admin/v1/keys").await,
            admin.get("/hub/v1/subscribers").await,
            admin.get("/admin/v1/consumers").await,
            app.anonymous().get("/event/v1/events").await,
            user.post("/event/v1/events", meetup()).await,
            admin.post("/hub/v1/events", event.clone()).await,
            keyed.post("/hub/v1/events", event.clone()).await,
            keyed.post("/admin/v1/keys", json!({"name": "x", "role": "ingest"})).await,
            user.with_header("idempotency-key", "a").post(&join, json!({})).await,
        ];
        for answer in answers {
            answer.assert_problem(503, "unavailable");
            assert_eq!(answer.header("retry-after"), "1");
        }
    }
    proxy.pass();
    let recovered = async || admin.post("/hub/v1/events", event.clone()).await.status == 202;
    eventually("posts are accepted again", SOON, recovered).await;
    app.stop().await;
}

#[tokio::test]
async fn a_stalled_database_makes_the_server_unready() {
    let database = TestDatabase::new(&migrations()).await;
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let url = proxy.url(&database.url());
    let app = TestApp::start_with(&database, |settings| settings.database_url = Some(Secret::new(url))).await;
    readiness(&app.anonymous(), "ready").await;
    proxy.stall();
    assert_eq!(readiness(&app.anonymous(), "unready").await.status, 503);
    proxy.pass();
    assert_eq!(readiness(&app.anonymous(), "ready").await.status, 200);
    app.stop().await;
}

#[tokio::test]
async fn missing_optional_dependencies_degrade_the_server() {
    let (database, vhost, redis) = (TestDatabase::new(&migrations()).await, TestVhost::new().await, TestRedis::new());
    let rabbit_proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let redis_proxy = FaultProxy::in_front_of(&redis.url()).await;
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let app = TestApp::start_with(&database, |settings| {
        settings.amqp_url = Some(Secret::new(rabbit_proxy.url(&vhost.amqp_url())));
        settings.redis_url = Some(Secret::new(redis_proxy.url(&redis.url())));
        settings.smtp_url = Some(Secret::new(format!("smtp://{free}")));
    })
    .await;
    let client = app.anonymous();
    let wait_for_down = async |names: &[&str]| {
        eventually("exactly the expected dependencies are down", SOON, async || {
            let answer = client.get("/readyz").await;
            let report = answer.json();
            let down = report["checks"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|check| check["up"] == false && check["kind"] == "dependency");
            let down: Vec<String> = down.map(|check| check["name"].as_str().unwrap().to_owned()).collect();
            if down == names { Ok(answer) } else { Err(answer) }
        })
        .await
    };
    let report = wait_for_down(&["smtp"]).await;
    assert_eq!((report.status, report.json()["status"].as_str()), (200, Some("degraded")));
    rabbit_proxy.refuse();
    redis_proxy.refuse();
    assert_eq!(wait_for_down(&["rabbitmq", "redis", "smtp"]).await.status, 200);
    assert_eq!(app.admin().get("/admin/v1/keys").await.status, 200);
    rabbit_proxy.pass();
    redis_proxy.pass();
    wait_for_down(&["smtp"]).await;
    app.stop().await;
}

#[tokio::test]
async fn a_busy_pool_does_not_make_the_server_unready() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| settings.pool_max = 1).await;
    // The only connection of the pool waits for this lock.
    let mut lock = database.pool().begin().await.unwrap();
    sqlx::query("lock table pillarbox_admin.api_key").execute(&mut *lock).await.unwrap();
    let (client, admin) = (app.anonymous(), app.admin());
    let waiting = tokio::spawn(async move { admin.get("/admin/v1/keys").await });
    let until = std::time::Instant::now() + Duration::from_secs(6);
    while std::time::Instant::now() < until {
        assert_eq!(client.get("/readyz").await.status, 200);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    lock.rollback().await.unwrap();
    assert_eq!(waiting.await.unwrap().status, 200);
    app.stop().await;
}

#[tokio::test]
async fn stalled_dependencies_do_not_delay_a_stop() {
    let database = TestDatabase::new(&migrations()).await;
    let (proxy, vhost) = (FaultProxy::in_front_of(&database.url()).await, TestVhost::new().await);
    let rabbit_proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.database_url = Some(Secret::new(proxy.url(&database.url())));
        settings.amqp_url = Some(Secret::new(rabbit_proxy.url(&vhost.amqp_url())));
        settings.drain_timeout_ms = 500;
    })
    .await;
    readiness(&app.anonymous(), "ready").await;
    proxy.stall();
    rabbit_proxy.stall();
    let admin = app.admin();
    let stuck = tokio::spawn(async move { admin.try_send(hyper::Method::GET, "/admin/v1/keys", None).await });
    tokio::time::timeout(Duration::from_secs(20), app.stop()).await.expect("every step of the stop has a timeout");
    assert!(stuck.await.unwrap().is_err(), "the connection of the request is closed");
}

#[tokio::test]
async fn a_stalled_broker_gets_few_connection_attempts() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let proxy = FaultProxy::in_front_of(&vhost.amqp_url()).await;
    proxy.stall();
    let url = proxy.url(&vhost.amqp_url());
    let app = TestApp::start_with(&database, |settings| settings.amqp_url = Some(Secret::new(url))).await;
    let until = std::time::Instant::now() + Duration::from_secs(8);
    while std::time::Instant::now() < until {
        assert_eq!(check(&app.anonymous().get("/readyz").await.json(), "rabbitmq")["up"], false);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // There are two connections, one to publish and one to receive. All users of one wait for the same attempt; each attempt costs
    // a thread and a socket.
    assert!(proxy.accepted() <= 4, "{} attempts", proxy.accepted());
    proxy.pass();
    readiness(&app.anonymous(), "ready").await;
    app.stop().await;
}

#[tokio::test]
async fn the_pool_opens_its_minimum_of_connections() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| (settings.pool_min, settings.pool_max) = (4, 5)).await;
    let count =
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'pillarbox'";
    eventually("four connections of the pool and one of the health check are open", SOON, async || {
        let open: i64 = sqlx::query_scalar(count).fetch_one(database.pool()).await.unwrap();
        open >= 5
    })
    .await;
    app.stop().await;
}
