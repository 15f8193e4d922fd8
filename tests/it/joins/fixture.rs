//! The fixture of the joins service's tests: replicas, messages of the events service, and queries on the tables that share
//! no code with the service.

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use contracts::events::{self, EventChanged, EventStatus};
use futures_util::future::join_all;
use pillarbox::log::{Post, Source, post};
use serde_json::value::to_raw_value;
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, Response, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::joins::invariants::check_invariants;
use crate::support::DEADLINE;

pub(crate) struct Fixture {
    pub(crate) database: TestDatabase,
    pub(crate) apps: Vec<TestApp>,
    pub(crate) owner: Uuid,
}

impl Fixture {
    /// Starts `replicas` servers on one database.
    pub(crate) async fn start(replicas: usize) -> Fixture {
        Fixture::start_with(replicas, |_| {}).await
    }

    pub(crate) async fn start_with(replicas: usize, change: impl Fn(&mut Settings)) -> Fixture {
        let database = TestDatabase::new(&migrations()).await;
        let apps = join_all((0..replicas).map(|_| TestApp::start_with(&database, &change))).await;
        Fixture { database, apps, owner: Uuid::now_v7() }
    }

    pub(crate) fn db(&self) -> &PgPool {
        self.database.pool()
    }

    /// A published event of the fixture's owner that the service knows.
    pub(crate) async fn create_event(&self, capacity: i32) -> EventChanged {
        let event = new_event(self.owner, capacity);
        self.post_update(&event).await;
        self.wait_until_known(&event).await;
        event
    }

    /// Posts an update of an event, as the events service does.
    pub(crate) async fn post_update(&self, event: &EventChanged) {
        post_event_update(self.db(), event).await;
    }

    pub(crate) async fn wait_until_known(&self, event: &EventChanged) {
        wait_until_known(self.db(), event).await;
    }

    pub(crate) fn user(&self, id: Uuid) -> Client {
        // Users are spread over the replicas; each user always calls the same one.
        self.apps[(id.as_u128() % self.apps.len() as u128) as usize].user(id, None)
    }

    pub(crate) fn organizer(&self) -> Client {
        self.user(self.owner)
    }

    pub(crate) async fn join(&self, event: &EventChanged, user: Uuid) -> Response {
        post_join_action(&self.user(user), event.event_id, "join").await
    }

    /// Lets `count` new users join, one after the other. Returns their ids.
    pub(crate) async fn join_users(&self, event: &EventChanged, count: usize) -> Vec<Uuid> {
        let mut users = Vec::new();
        for _ in 0..count {
            let user = Uuid::now_v7();
            let joined = self.join(event, user).await;
            assert_eq!(joined.status, 201, "{joined:?}");
            users.push(user);
        }
        users
    }

    pub(crate) async fn cancel(&self, event: &EventChanged, user: Uuid) -> Response {
        post_join_action(&self.user(user), event.event_id, "cancel").await
    }

    pub(crate) async fn status(&self, event: &EventChanged, user: Uuid) -> String {
        let query = "select status::text from pillarbox_joins.joins where event_id = $1 and user_id = $2";
        sqlx::query_scalar(query).bind(event.event_id).bind(user).fetch_one(self.db()).await.unwrap()
    }

    /// The stored counts: active, waitlisted.
    pub(crate) async fn counts(&self, event: &EventChanged) -> (i32, i32) {
        let query = "select active_count, waitlist_count from pillarbox_joins.event_capacity where event_id = $1";
        sqlx::query_as(query).bind(event.event_id).fetch_one(self.db()).await.unwrap()
    }

    /// The sequence numbers of the promoted registrations, in the order of their promotion.
    pub(crate) async fn promoted_seqs(&self, event: &EventChanged) -> Vec<i64> {
        let query =
            "select seq from pillarbox_joins.history where event_id = $1 and action = 'promoted' order by version";
        sqlx::query_scalar(query).bind(event.event_id).fetch_all(self.db()).await.unwrap()
    }

    pub(crate) async fn wait_for_counts(&self, event: &EventChanged, wanted: (i32, i32)) {
        eventually(&format!("counts are {wanted:?}"), DEADLINE, async || match self.counts(event).await {
            counts if counts == wanted => Ok(()),
            other => Err(other),
        })
        .await;
    }

    /// The messages that the service posted about an event, in order: topic and user.
    pub(crate) async fn posted_messages(&self, event: &EventChanged) -> Vec<(String, Uuid)> {
        let query = "select topic, (payload->>'user_id')::uuid from pillarbox.log
                     where source = 'joins' and key = $1 order by id";
        sqlx::query_as(query).bind(event.event_id.to_string()).fetch_all(self.db()).await.unwrap()
    }

    pub(crate) async fn check_invariants(&self) {
        check_invariants(self.db(), &[]).await;
    }

    pub(crate) async fn stop(self) {
        join_all(self.apps.into_iter().map(TestApp::stop)).await;
    }
}

pub(crate) fn new_event(owner: Uuid, capacity: i32) -> EventChanged {
    let now = Utc::now().trunc_subsecs(6);
    EventChanged {
        event_id: Uuid::now_v7(),
        version: 2,
        status: EventStatus::Published,
        owner_id: owner,
        title: "An evening".to_owned(),
        city: "Oslo".to_owned(),
        category: "music".to_owned(),
        start_time: now + TimeDelta::hours(1),
        end_time: now + TimeDelta::hours(3),
        time_zone: "Europe/Oslo".to_owned(),
        capacity,
        reason: None,
        by: None,
        occurred_at: now,
    }
}

/// The next version of an event, with this change.
pub(crate) fn next_version(event: &EventChanged, change: impl FnOnce(&mut EventChanged)) -> EventChanged {
    let mut next = EventChanged { version: event.version + 1, ..event.clone() };
    change(&mut next);
    next
}

/// Posts an event as the events service does, with the topic that matches its status.
pub(crate) async fn post_event_update(db: &PgPool, event: &EventChanged) {
    let topic = match event.status {
        EventStatus::Draft => events::UNPUBLISHED,
        EventStatus::Published if event.version <= 2 => events::PUBLISHED,
        EventStatus::Published => events::UPDATED,
        EventStatus::Canceled => events::CANCELED,
    };
    let message = Post::new(topic, to_raw_value(event).unwrap()).with_key(event.event_id.to_string());
    let mut tx = db.begin().await.unwrap();
    post(&mut tx, &Source::new(events::SOURCE), &message).await.unwrap();
    tx.commit().await.unwrap();
}

pub(crate) async fn wait_until_known(db: &PgPool, event: &EventChanged) {
    eventually("the service knows the version", DEADLINE, async || {
        let query = "select event_version from pillarbox_joins.event_capacity where event_id = $1";
        let version: Option<i64> = sqlx::query_scalar(query).bind(event.event_id).fetch_optional(db).await.unwrap();
        if version >= Some(event.version) { Ok(()) } else { Err(version) }
    })
    .await;
}

/// Posts the action with a new idempotency key.
pub(crate) async fn post_join_action(client: &Client, event: Uuid, action: &str) -> Response {
    post_join_action_with_key(client, event, action, &Uuid::new_v4().to_string()).await
}

pub(crate) async fn post_join_action_with_key(client: &Client, event: Uuid, action: &str, key: &str) -> Response {
    let client = client.with_header("idempotency-key", key);
    client.send(hyper::Method::POST, &format!("/join/v1/events/{event}/{action}"), None).await
}

pub(crate) async fn moderate(client: &Client, event: Uuid, action: &str, body: serde_json::Value) -> Response {
    let client = client.with_header("idempotency-key", &Uuid::new_v4().to_string());
    client.post(&format!("/join/v1/events/{event}/{action}"), body).await
}

pub(crate) fn parse_time(value: &serde_json::Value) -> DateTime<Utc> {
    value.as_str().unwrap_or_else(|| panic!("not a time: {value}")).parse().unwrap()
}

/// Inserts `count` registrations past the service: active up to the capacity, the rest waitlisted.
pub(crate) async fn insert_registrations(fixture: &Fixture, event: &EventChanged, count: i32) {
    let mut tx = fixture.db().begin().await.unwrap();
    let insert = "insert into pillarbox_joins.joins (id, event_id, user_id, status, seq, created_at, updated_at)
         select gen_random_uuid(), $1, gen_random_uuid(),
                (case when $2 = 0 or n <= $2 then 'active' else 'waitlisted' end)::pillarbox_joins.join_status, n, now(), now()
         from generate_series(1, $3) as n";
    sqlx::query(insert).bind(event.event_id).bind(event.capacity).bind(count).execute(&mut *tx).await.unwrap();
    let active = if event.capacity == 0 { count } else { count.min(event.capacity) };
    let update = "update pillarbox_joins.event_capacity
         set active_count = $2, waitlist_count = $3, next_seq = $4 where event_id = $1";
    sqlx::query(update)
        .bind(event.event_id)
        .bind(active)
        .bind(count - active)
        .bind(i64::from(count) + 1)
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
}

/// The number of users whose registration was published as expired.
pub(crate) async fn expired_count(fixture: &Fixture, event: &EventChanged) -> i64 {
    let query = "select count(distinct payload->>'user_id') from pillarbox.log
                 where source = 'joins' and topic = 'join.expired' and key = $1";
    sqlx::query_scalar(query).bind(event.event_id.to_string()).fetch_one(fixture.db()).await.unwrap()
}
