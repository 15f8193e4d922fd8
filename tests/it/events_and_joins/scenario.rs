//! Events and joins together, connected by messages only: over one log, or over the broker with separate databases.

use std::time::{Duration, Instant};

use chrono::Utc;
use events::reconcile::{self, ReconcileOptions};
use pillarbox::database::Database;
use runtime::secret::Secret;
use serde_json::{Value, json};
use server::migrations;
use server::settings::{Bus, Role};
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::events::fixture::{
    DEADLINE, event_id, event_path, meetup_with, post_action, publish_event, second_of_this_machine,
};
use crate::joins::fixture::post_join_action;
use crate::joins::invariants::check_invariants;
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::relay_to;

/// The two services and their databases.
pub(crate) struct EventScenario<'a> {
    events: &'a TestApp,
    joins: &'a TestApp,
    db: &'a PgPool,
    joins_db: &'a PgPool,
}

impl<'a> EventScenario<'a> {
    /// Both services in one process and database.
    pub(crate) fn in_one_process(app: &'a TestApp, database: &'a TestDatabase) -> EventScenario<'a> {
        EventScenario { events: app, joins: app, db: database.pool(), joins_db: database.pool() }
    }

    async fn join(&self, event: &Value, user: Uuid) -> Value {
        let joined = post_join_action(&self.joins.user(user, None), event_id(event), "join").await;
        assert_eq!(joined.status, 201, "{joined:?}");
        joined.json()
    }

    async fn registration(&self, event: &Value, user: Uuid) -> Value {
        self.joins.user(user, None).get(&format!("/join/v1/events/{}/my", event_id(event))).await.json()
    }

    async fn wait_for_status(&self, event: &Value, user: Uuid, status: &str) -> Value {
        eventually(&format!("a registration is {status}"), DEADLINE, async || {
            match self.registration(event, user).await {
                mine if mine["status"] == status => Ok(mine),
                other => Err(other),
            }
        })
        .await
    }

    /// Waits until the event shows this count. Returns the time it took.
    async fn wait_for_count(&self, event: &Value, count: i64) -> Duration {
        let (began, reader) = (Instant::now(), self.events.anonymous());
        eventually(&format!("{count} participants"), DEADLINE, async || {
            match reader.get(&event_path(event)).await.json()["active_participants"].as_i64() {
                found if found == Some(count) => Ok(()),
                other => Err(other),
            }
        })
        .await;
        began.elapsed()
    }

    /// Runs the whole life of an event: publication, full, waitlist, cancellation, promotion, drift and repair, canceled event.
    pub(crate) async fn run(&self) {
        let owner = self.events.user(Uuid::now_v7(), None);
        let event = publish_event(&owner, meetup_with(json!({"capacity": 2, "city": "Ålesund"}))).await;
        let known = format!("/join/v1/events/{}/stats", event_id(&event));
        let admin = self.joins.admin();
        eventually("the joins service knows the event", DEADLINE, async || admin.get(&known).await.status == 200).await;

        let [first, second, third, fourth] = [(); 4].map(|()| Uuid::now_v7());
        let mut took = Vec::new();
        assert_eq!(self.join(&event, first).await["status"], "active");
        took.push(self.wait_for_count(&event, 1).await);
        // A message posted by SQL does not count as one of the joins service.
        let forged = json!({"event_id": event["id"], "user_id": first, "occurred_at": Utc::now(), "trace_id": "",
                            "counts": {"active": 99, "waitlisted": 0, "version": 1_000}});
        let post = "select pillarbox.post('join.confirmed', $1::text::json, key => $2)";
        sqlx::query(post)
            .bind(forged.to_string())
            .bind(event_id(&event).to_string())
            .execute(self.joins_db)
            .await
            .unwrap();
        assert_eq!(self.join(&event, second).await["status"], "active");
        took.push(self.wait_for_count(&event, 2).await);
        for (user, position) in [(third, 1), (fourth, 2)] {
            let waits = self.join(&event, user).await;
            assert_eq!((&waits["status"], &waits["position"]), (&json!("waitlisted"), &json!(position)));
        }
        let canceled = post_join_action(&self.joins.user(first, None), event_id(&event), "cancel").await;
        assert_eq!(canceled.status, 200, "{canceled:?}");
        let promoted = self.registration(&event, third).await;
        assert_eq!(promoted["status"], "active", "promoted in the transaction that freed the seat");
        assert!(promoted["activated_at"].is_string(), "{promoted}");
        assert_eq!(self.registration(&event, fourth).await["status"], "waitlisted");

        let more = owner.send(hyper::Method::PATCH, &event_path(&event), Some(json!({"capacity": 5}))).await;
        assert_eq!(more.status, 200, "{more:?}");
        self.wait_for_status(&event, fourth, "active").await;
        took.push(self.wait_for_count(&event, 3).await);
        took.sort();
        let bound = second_of_this_machine(&self.events.anonymous(), &event).await;
        assert!(took[1] < bound, "the count is shown within a second ({bound:?} beside other work): {took:?}");
        let (feed, began) = ("/event/v1/events?city=alesund", Instant::now());
        eventually("the feed shows the count", DEADLINE, async || {
            let found = self.events.anonymous().get(feed).await.json()["items"][0].clone();
            if found["active_participants"] == 3 { Ok(()) } else { Err(found) }
        })
        .await;
        assert!(began.elapsed() < Duration::from_secs(15));

        // Corrupt the count.
        sqlx::query("update pillarbox_events.event set active_participants = 77 where id = $1")
            .bind(event_id(&event))
            .execute(self.db)
            .await
            .unwrap();
        let run = reconcile::begin(&Database::new(self.db.clone()), ReconcileOptions::default()).await.unwrap();
        let found =
            eventually("the run finishes", DEADLINE, async || match reconcile::progress(self.db, run).await.unwrap() {
                Some(progress) if progress.finished_at.is_some() => Ok(progress),
                other => Err(other),
            })
            .await;
        assert_eq!((found.drifted, found.repaired), (1, 1), "{found:?}");
        self.wait_for_count(&event, 3).await;

        assert_eq!(post_action(&owner, &event, "cancel").await.status, 200);
        for user in [second, third, fourth] {
            self.wait_for_status(&event, user, "expired").await;
        }
        self.wait_for_count(&event, 0).await;
        let late = post_join_action(&self.joins.user(Uuid::now_v7(), None), event_id(&event), "join").await;
        late.assert_problem(409, "event-canceled");
    }
}

#[tokio::test]
async fn the_life_of_an_event_in_one_process_with_one_database() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    EventScenario::in_one_process(&app, &database).run().await;
    check_invariants(database.pool(), &[]).await;
    app.stop().await;
}

#[tokio::test]
async fn the_life_of_an_event_over_the_broker_with_separate_databases() {
    let vhost = TestVhost::new().await;
    let start = async |database: &TestDatabase, service: &str| {
        TestApp::start_with(database, |settings| {
            relay_to(&vhost)(settings);
            settings.amqp_url = Some(Secret::new(vhost.amqp_url()));
            settings.bus = Bus::Rabbitmq;
            settings.services = vec![service.to_owned()];
            settings.roles = vec![Role::Api, Role::Relay, Role::Consume, Role::Maintain];
        })
        .await
    };
    let (events_database, joins_database) =
        (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let (events, joins) = (start(&events_database, "events").await, start(&joins_database, "joins").await);
    let outside = BrokerClient::connect(&vhost).await;
    outside.wait_for_consumer_queue("events.counts").await;
    outside.wait_for_consumer_queue("joins.events").await;
    EventScenario { events: &events, joins: &joins, db: events_database.pool(), joins_db: joins_database.pool() }
        .run()
        .await;
    check_invariants(joins_database.pool(), &[]).await;
    joins.stop().await;
    events.stop().await;
}
