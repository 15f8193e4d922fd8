//! What the proofs of the events service stand on: a server, people, and events that they make.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use contracts::joins::{self, Count, JoinChanged, JoinStatus};
use hyper::Method;
use kit::clock::Clock;
use mailbox::database::migrations;
use mailbox::post::{Post, Source, post};
use pillarbox::settings::Settings;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Answer, Client, TestApp, TestDatabase, drain};
use uuid::Uuid;

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct World {
    pub(crate) database: TestDatabase,
    pub(crate) app: TestApp,
    pub(crate) owner: Client,
}

impl World {
    pub(crate) async fn start() -> World {
        World::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut Settings)) -> World {
        let database = TestDatabase::new(&migrations()).await;
        let alone_and_changed = |settings: &mut Settings| {
            alone(settings);
            change(settings);
        };
        let app = TestApp::start_with(&database, alone_and_changed).await;
        let owner = someone(&app);
        World { database, app, owner }
    }

    pub(crate) fn db(&self) -> &PgPool {
        self.database.pool()
    }
}

/// The tests play the part of joins.
fn alone(settings: &mut Settings) {
    settings.services = vec!["events".to_owned()];
}

/// Another process on the same database.
pub(crate) async fn replica(database: &TestDatabase) -> TestApp {
    TestApp::start_with(database, alone).await
}

/// A user whom nobody knows.
pub(crate) fn someone(app: &TestApp) -> Client {
    app.user(Uuid::now_v7(), None)
}

/// In so many hours, to the second.
pub(crate) fn in_hours(hours: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(Utc::now().timestamp(), 0).unwrap() + TimeDelta::hours(hours)
}

/// A good body.
pub(crate) fn meetup() -> Value {
    json!({
        "title": "Rust meetup", "description": "Talks, and then pizza.", "city": "Zürich", "category": "Tech",
        "start_time": in_hours(24), "end_time": in_hours(27), "time_zone": "Europe/Zurich", "capacity": 3,
        "cover_image_ids": ["img_1"],
    })
}

/// The same with other fields.
pub(crate) fn meetup_with(fields: Value) -> Value {
    let mut body = meetup();
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

pub(crate) async fn made(owner: &Client, body: Value) -> Value {
    let answer = owner.post("/event/v1/events", body).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    answer.json()
}

pub(crate) async fn published(owner: &Client, body: Value) -> Value {
    let event = made(owner, body).await;
    let answer = act(owner, &event, "publish").await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

pub(crate) async fn act(caller: &Client, event: &Value, action: &str) -> Answer {
    caller.send(Method::POST, &format!("{}/{action}", path(event)), None).await
}

pub(crate) async fn patch(caller: &Client, event: &Value, fields: Value) -> Answer {
    caller.send(Method::PATCH, &path(event), Some(fields)).await
}

pub(crate) fn path(event: &Value) -> String {
    format!("/event/v1/events/{}", event["id"].as_str().unwrap())
}

pub(crate) fn id(event: &Value) -> Uuid {
    event["id"].as_str().unwrap().parse().unwrap()
}

/// What the log has of an event: topic and payload, in their order.
pub(crate) async fn messages_of(db: &PgPool, event: &Value) -> Vec<(String, Value)> {
    sqlx::query_as::<_, (String, sqlx::types::Json<Value>)>(
        "select topic, payload from pillarbox.log where source = 'events' and key = $1 order by id",
    )
    .bind(id(event).to_string())
    .fetch_all(db)
    .await
    .unwrap()
    .into_iter()
    .map(|(topic, payload)| (topic, payload.0))
    .collect()
}

/// As the joins service says it.
pub(crate) fn joined(event: Uuid, active: i32, version: i64) -> Post {
    let changed = JoinChanged {
        event_id: event,
        user_id: Uuid::now_v7(),
        join_id: Some(Uuid::now_v7()),
        status: Some(JoinStatus::Active),
        seq: Some(version),
        reason: None,
        by: None,
        expires_at: None,
        counts: Count { active, waitlisted: 0, version },
        occurred_at: Clock::system().now(),
        trace_id: "4bf92f3577b34da6a3ce929d0e0e4736".to_owned(),
    };
    Post::new(joins::CONFIRMED, to_raw_value(&changed).unwrap()).with_key(event.to_string())
}

pub(crate) async fn say(db: &PgPool, source: &'static str, messages: &[Post]) {
    let mut tx = db.begin().await.unwrap();
    for message in messages {
        post(&mut tx, &Source::new(source), message).await.unwrap();
    }
    tx.commit().await.unwrap();
}

/// The ids of a feed, walked to its end; `between` runs after each page.
pub(crate) async fn walk(reader: &Client, query: &str, mut between: impl AsyncFnMut()) -> Vec<Uuid> {
    let (mut seen, mut next) = (Vec::new(), None::<String>);
    for _ in 0..1_000 {
        let cursor = next.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
        let page = reader.get(&format!("/event/v1/events?{query}{cursor}")).await;
        assert_eq!(page.status, 200, "{page:?}");
        let page = page.json();
        seen.extend(page["items"].as_array().unwrap().iter().map(id));
        match page["next_cursor"].as_str() {
            Some(cursor) => next = Some(cursor.to_owned()),
            None => return seen,
        }
        between().await;
    }
    panic!("a walk without an end");
}

/// Says five counts of an event, one after the other, and how long it usually takes until it shows them: the median, since a
/// machine that runs many tests at once stands still now and then.
pub(crate) async fn time_to_show_counts(joins_db: &PgPool, reader: &Client, event: &Value) -> Duration {
    let mut times = Vec::new();
    for version in 1..=5 {
        say(joins_db, "joins", &[joined(id(event), version as i32, version)]).await;
        let said = Instant::now();
        drain("the count is shown", PATIENCE, async || {
            match reader.get(&path(event)).await.json()["active_participants"].clone() {
                found if found == version => Ok(()),
                other => Err(other),
            }
        })
        .await;
        times.push(said.elapsed());
    }
    times.sort();
    times[2]
}
