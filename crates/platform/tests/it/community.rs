//! Events and joins together: they know each other by messages alone, over one log or over the broker with a database each.

use std::time::{Duration, Instant};

use chrono::Utc;
use events::reconcile::{self, Asked};
use kit::secret::Secret;
use mailbox::database::migrations;
use pillarbox::settings::{Bus, Role};
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, TestVhost, drain};
use uuid::Uuid;

use crate::broker::Outside;
use crate::events_world::{PATIENCE, act, id, meetup_with, path, published};
use crate::joins_world;
use crate::relaying::relaying;

/// Where people find each service, and where each keeps what is its own.
pub(crate) struct Community<'a> {
    events: &'a TestApp,
    joins: &'a TestApp,
    db: &'a PgPool,
    joins_db: &'a PgPool,
}

impl<'a> Community<'a> {
    /// Both services in one place.
    pub(crate) fn of(app: &'a TestApp, database: &'a TestDatabase) -> Community<'a> {
        Community { events: app, joins: app, db: database.pool(), joins_db: database.pool() }
    }

    async fn join(&self, event: &Value, user: Uuid) -> Value {
        let joined = joins_world::act(&self.joins.user(user, None), id(event), "join").await;
        assert_eq!(joined.status, 201, "{joined:?}");
        joined.json()
    }

    async fn my(&self, event: &Value, user: Uuid) -> Value {
        self.joins.user(user, None).get(&format!("/join/v1/events/{}/my", id(event))).await.json()
    }

    async fn until_mine(&self, event: &Value, user: Uuid, status: &str) -> Value {
        drain(&format!("a registration is {status}"), PATIENCE, async || match self.my(event, user).await {
            mine if mine["status"] == status => Ok(mine),
            other => Err(other),
        })
        .await
    }

    /// How long it takes until the event says so many.
    async fn until_count(&self, event: &Value, count: i64) -> Duration {
        let (began, reader) = (Instant::now(), self.events.anyone());
        drain(&format!("{count} participants"), PATIENCE, async || {
            match reader.get(&path(event)).await.json()["active_participants"].as_i64() {
                found if found == Some(count) => Ok(()),
                other => Err(other),
            }
        })
        .await;
        began.elapsed()
    }

    /// From the draft to the end: full, waitlist, cancellation, promotion, drift, and the event is off.
    pub(crate) async fn live(&self) {
        let owner = self.events.user(Uuid::now_v7(), None);
        let event = published(&owner, meetup_with(json!({"capacity": 2, "city": "Ålesund"}))).await;
        let known = format!("/join/v1/events/{}/stats", id(&event));
        let admin = self.joins.admin();
        drain("joins know the event", PATIENCE, async || admin.get(&known).await.status == 200).await;

        let [first, second, third, fourth] = [(); 4].map(|()| Uuid::now_v7());
        let mut took = Vec::new();
        assert_eq!(self.join(&event, first).await["status"], "active");
        took.push(self.until_count(&event, 1).await);
        // Whoever may post by SQL is not the joins service, whatever they say.
        let forged = json!({"event_id": event["id"], "user_id": first, "occurred_at": Utc::now(), "trace_id": "",
                            "counts": {"active": 99, "waitlisted": 0, "version": 1_000}});
        let post = "select pillarbox.post('join.confirmed', $1::text::json, key => $2)";
        sqlx::query(post).bind(forged.to_string()).bind(id(&event).to_string()).execute(self.joins_db).await.unwrap();
        assert_eq!(self.join(&event, second).await["status"], "active");
        took.push(self.until_count(&event, 2).await);
        for (user, position) in [(third, 1), (fourth, 2)] {
            let waits = self.join(&event, user).await;
            assert_eq!((&waits["status"], &waits["position"]), (&json!("waitlisted"), &json!(position)));
        }
        let left = joins_world::act(&self.joins.user(first, None), id(&event), "cancel").await;
        assert_eq!(left.status, 200, "{left:?}");
        let promoted = self.my(&event, third).await;
        assert_eq!(promoted["status"], "active", "in the transaction that freed the seat");
        assert!(promoted["activated_at"].is_string(), "{promoted}");
        assert_eq!(self.my(&event, fourth).await["status"], "waitlisted");

        let more = owner.send(hyper::Method::PATCH, &path(&event), Some(json!({"capacity": 5}))).await;
        assert_eq!(more.status, 200, "{more:?}");
        self.until_mine(&event, fourth, "active").await;
        took.push(self.until_count(&event, 3).await);
        took.sort();
        assert!(took[1] < Duration::from_secs(1), "the count is right within a second: {took:?}");
        let (feed, began) = ("/event/v1/events?city=alesund", Instant::now());
        drain("the feed's count", PATIENCE, async || {
            let found = self.events.anyone().get(feed).await.json()["items"][0].clone();
            if found["active_participants"] == 3 { Ok(()) } else { Err(found) }
        })
        .await;
        assert!(began.elapsed() < Duration::from_secs(15));

        // Someone has tampered with the count.
        sqlx::query("update pillarbox_events.event set active_participants = 77 where id = $1")
            .bind(id(&event))
            .execute(self.db)
            .await
            .unwrap();
        let run = reconcile::begin(self.db, Asked::default(), Utc::now()).await.unwrap();
        let found =
            drain("both have compared", PATIENCE, async || match reconcile::progress(self.db, run).await.unwrap() {
                Some(progress) if progress.finished_at.is_some() => Ok(progress),
                other => Err(other),
            })
            .await;
        assert_eq!((found.drifted, found.repaired), (1, 1), "{found:?}");
        self.until_count(&event, 3).await;

        assert_eq!(act(&owner, &event, "cancel").await.status, 200);
        for user in [second, third, fourth] {
            self.until_mine(&event, user, "expired").await;
        }
        self.until_count(&event, 0).await;
        let late = joins_world::act(&self.joins.user(Uuid::now_v7(), None), id(&event), "join").await;
        late.assert_problem(409, "event-canceled");
    }
}

#[tokio::test]
async fn people_meet_in_one_process_with_one_database() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    Community::of(&app, &database).live().await;
    joins_world::check(database.pool(), &[]).await;
    app.stop().await;
}

#[tokio::test]
async fn people_meet_over_the_broker_with_a_database_for_each_service() {
    let vhost = TestVhost::new().await;
    let start = async |database: &TestDatabase, service: &str| {
        TestApp::start_with(database, |settings| {
            relaying(&vhost)(settings);
            settings.amqp_url = Some(Secret::new(vhost.amqp_url()));
            settings.bus = Bus::Rabbitmq;
            settings.services = vec![service.to_owned()];
            settings.roles = vec![Role::Api, Role::Relay, Role::Consume, Role::Maintain];
        })
        .await
    };
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let (events, joins) = (start(&here, "events").await, start(&there, "joins").await);
    let outside = Outside::of(&vhost).await;
    outside.until_listening("events.counts").await;
    outside.until_listening("joins.events").await;
    Community { events: &events, joins: &joins, db: here.pool(), joins_db: there.pool() }.live().await;
    joins_world::check(there.pool(), &[]).await;
    joins.stop().await;
    events.stop().await;
}
