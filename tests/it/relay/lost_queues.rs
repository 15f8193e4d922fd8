//! The queue of a service loses messages: it is deleted, recreated with other arguments, or its bindings are removed. The
//! publisher's database has everything, so it is published again, without an operator, and is reported.

use std::time::{Duration, Instant};

use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use server::settings::{Bus, Role};
use sqlx::PgPool;
use testkit::{CapturedLog, TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::joins::fixture::{new_event, post_event_update};
use crate::mail::fixture::post_raw_from;
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, installation_key, relay_to};

const QUEUE: &str = "pillarbox.joins.events";
/// The reports of the service and of the relay.
const DECLARED_AGAIN: &str =
    "the queue of a service was deleted and is declared again; the relays publish again what it has lost";
const PUBLISHED_AGAIN: &str = "the queue has lost messages, or was not bound for them; they were published to it again";

/// A database whose relay publishes, and a service that reads its queue into another database.
struct Site {
    vhost: TestVhost,
    amqp: BrokerClient,
    publishing: TestDatabase,
    receiving: TestDatabase,
    relay: TestApp,
    service: TestApp,
}

async fn start_service(vhost: &TestVhost, database: &TestDatabase, name: &str) -> TestApp {
    TestApp::start_with(database, |settings| {
        settings.secret_key = Some(Secret::new(installation_key(&vhost.amqp_url()).to_base64()));
        settings.amqp_url = Some(Secret::new(vhost.amqp_url()));
        settings.bus = Bus::Rabbitmq;
        settings.services = vec![name.to_owned()];
        settings.roles = vec![Role::Api, Role::Consume, Role::Maintain];
        settings.lease_ms = 2_000;
    })
    .await
}

impl Site {
    async fn start(service: &str, consumer: &str) -> Site {
        let (publishing, receiving) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
        let vhost = TestVhost::new().await;
        let amqp = BrokerClient::connect(&vhost).await;
        let relay = TestApp::start_with(&publishing, relay_to(&vhost)).await;
        let service = start_service(&vhost, &receiving, service).await;
        amqp.wait_for_consumer_queue(consumer).await;
        // Another queue receives every message, so none is unroutable.
        amqp.queue("others", "pillarbox.events", "#").await;
        let query = "select exists (select from pillarbox.position where consumer = $1)";
        eventually("the relay checks the queue", TIMEOUT, async || {
            let check = format!("check.pillarbox.{consumer}");
            sqlx::query_scalar::<_, bool>(query).bind(check).fetch_one(publishing.pool()).await.unwrap()
        })
        .await;
        Site { vhost, amqp, publishing, receiving, relay, service }
    }

    async fn publish_events(&self, count: usize) {
        for _ in 0..count {
            post_event_update(self.publishing.pool(), &new_event(Uuid::now_v7(), 1)).await;
        }
    }

    async fn wait_for_events(&self, count: i64) {
        wait_for_known(self.receiving.pool(), count).await;
    }

    /// Waits until the relay has published everything.
    async fn wait_for_publication(&self) {
        eventually("everything is published", TIMEOUT, async || {
            let query = "select count(*) from pillarbox.outbox_status
                         where consumer in ('relay.default', 'relay.smap') and status not in ('sent', 'unrouted')";
            match sqlx::query_scalar::<_, i64>(query).fetch_one(self.publishing.pool()).await.unwrap() {
                0 => Ok(()),
                waiting => Err(waiting),
            }
        })
        .await;
    }

    /// Waits until the relay has counted so many messages as lost by the queue. It counts when the broker has confirmed them again,
    /// and the service may be faster.
    async fn wait_for_lost(&self, queue: &str, count: u64) {
        let name = format!("pillarbox_service_queue_lost_messages_total{{queue=\"{queue}\"}} ");
        eventually("the relay counts what the queue has lost", TIMEOUT, async || {
            let metrics = self.relay.anonymous().get("/metrics").await.text;
            let lost: u64 = metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0);
            if lost >= count { Ok(()) } else { Err(lost) }
        })
        .await;
    }

    async fn stop(self) {
        self.service.stop().await;
        self.relay.stop().await;
    }
}

/// Name and error of everything that `/readyz` reports as down.
async fn down(app: &TestApp) -> Vec<String> {
    let report = app.anonymous().get("/readyz").await.json();
    let checks = report["checks"].as_array().unwrap();
    checks.iter().filter(|one| one["up"] == false).map(ToString::to_string).collect()
}

async fn wait_for_known(db: &PgPool, count: i64) {
    eventually("the service knows all events", TIMEOUT, async || {
        let query = "select count(*) from pillarbox_joins.event_capacity where status = 'published'";
        match sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() {
            known if known == count => Ok(()),
            known => Err(known),
        }
    })
    .await;
}

#[tokio::test]
async fn a_queue_that_is_deleted_again_and_again_under_load_loses_no_effect() {
    let log = CapturedLog::start();
    let site = Site::start("joins", "joins.events").await;
    for _ in 0..10 {
        site.publish_events(20).await;
        site.amqp.delete_queue(QUEUE).await;
    }
    site.wait_for_events(200).await;
    for warning in [DECLARED_AGAIN, PUBLISHED_AGAIN] {
        eventually(warning, TIMEOUT, async || log.has("WARN", &format!("{warning} queue=\"{QUEUE}\""))).await;
    }
    // The service is told that its queue is gone, and does not wait for the next check of the topology.
    for _ in 0..3 {
        site.amqp.delete_queue(QUEUE).await;
        let deleted_at = Instant::now();
        site.amqp.wait_for_queue(QUEUE).await;
        assert!(deleted_at.elapsed() < Duration::from_secs(5), "{:?}", deleted_at.elapsed());
    }
    site.stop().await;
}

#[tokio::test]
async fn a_queue_that_is_deleted_with_its_messages_while_the_service_is_down_gets_them_again() {
    let site = Site::start("joins", "joins.events").await;
    let Site { vhost, amqp, publishing, receiving, relay, service } = site;
    service.stop().await;
    for _ in 0..30 {
        post_event_update(publishing.pool(), &new_event(Uuid::now_v7(), 1)).await;
    }
    amqp.consume("others", 30).await;
    eventually("the relay reports the queue", TIMEOUT, async || {
        let down = down(&relay).await;
        if down.iter().any(|one| one.contains(QUEUE)) { Ok(()) } else { Err(down) }
    })
    .await;
    amqp.delete_queue(QUEUE).await;
    let service = start_service(&vhost, &receiving, "joins").await;
    wait_for_known(receiving.pool(), 30).await;
    let site = Site { vhost, amqp, publishing, receiving, relay, service };
    site.wait_for_lost(QUEUE, 30).await;
    eventually("nothing is wrong any more", TIMEOUT, async || {
        let down = down(&site.relay).await;
        if down.is_empty() { Ok(()) } else { Err(down) }
    })
    .await;
    site.stop().await;
}

#[tokio::test]
async fn messages_that_were_published_while_bindings_were_missing_arrive_later() {
    let site = Site::start("joins", "joins.events").await;
    for topic in ["event.published", "event.updated", "event.unpublished", "event.canceled"] {
        site.amqp.unbind(QUEUE, "pillarbox.events", topic).await;
    }
    site.publish_events(30).await;
    site.wait_for_publication().await;
    site.wait_for_events(30).await;
    site.publish_events(10).await;
    site.wait_for_events(40).await;
    site.wait_for_lost(QUEUE, 1).await;
    site.stop().await;
}

#[tokio::test]
async fn a_queue_with_other_arguments_makes_its_service_unready_and_loses_no_effect() {
    let site = Site::start("joins", "joins.events").await;
    site.amqp.delete_queue(QUEUE).await;
    eventually("the queue exists with other arguments", TIMEOUT, async || {
        // The service may have declared it before.
        match site.amqp.expiring_queue(QUEUE, 20).await {
            true => true,
            false => {
                site.amqp.delete_queue(QUEUE).await;
                false
            }
        }
    })
    .await;
    site.publish_events(100).await;
    let reported = eventually("the service is unready", TIMEOUT, async || {
        let report = site.service.anonymous().get("/readyz").await;
        if report.status == 503 { Ok(report.text) } else { Err(report.text) }
    })
    .await;
    for part in [QUEUE, "durable quorum queue", "x-message-ttl", "none but current is the value", "Delete it"] {
        assert!(reported.contains(part), "{part}: {reported}");
    }
    site.wait_for_events(100).await;
    site.amqp.delete_queue(QUEUE).await;
    site.publish_events(20).await;
    site.wait_for_events(120).await;
    eventually("the service is ready again", TIMEOUT, async || {
        site.service.anonymous().get("/readyz").await.status == 200
    })
    .await;
    site.stop().await;
}

#[tokio::test]
async fn the_deletion_of_an_account_that_a_queue_has_lost_still_deletes_its_projects() {
    let site = Site::start("progress", "progress.accounts").await;
    let user = Uuid::now_v7();
    let client = site.service.user(user, None);
    let created = client.post("/progress/v1/projects", json!({})).await;
    assert_eq!(created.status, 201, "{created:?}");
    site.amqp.unbind("pillarbox.progress.accounts", "smap.events", "account.deleted").await;
    site.amqp.unbind("pillarbox.progress.accounts", "pillarbox.events", "account.deleted").await;
    let deleted = json!({"user_id": user}).to_string();
    let (source, topic) = (contracts::identity::SOURCE, contracts::identity::ACCOUNT_DELETED);
    post_raw_from(site.publishing.pool(), source, topic, &deleted).await;
    eventually("the project is deleted", TIMEOUT, async || {
        let query = "select count(*) from pillarbox_progress.project";
        sqlx::query_scalar::<_, i64>(query).fetch_one(site.receiving.pool()).await.unwrap() == 0
    })
    .await;
    site.wait_for_lost("pillarbox.progress.accounts", 1).await;
    site.stop().await;
}
