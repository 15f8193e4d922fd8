//! The fixture of the events service's tests: a server, users, events, and messages of the joins service.

use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use contracts::joins::{self, Count, JoinChanged, JoinStatus};
use hyper::Method;
use pillarbox::log::{Post, Source, post};
use runtime::clock::Clock;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, Response, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::support::collect_pages_with;

/// Longer than elsewhere: scoring tens of thousands of events is slow on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) struct Fixture {
    pub(crate) database: TestDatabase,
    pub(crate) app: TestApp,
    pub(crate) owner: Client,
}

impl Fixture {
    pub(crate) async fn start() -> Fixture {
        Fixture::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut Settings)) -> Fixture {
        let database = TestDatabase::new(&migrations()).await;
        let with_change = |settings: &mut Settings| {
            events_only(settings);
            change(settings);
        };
        let app = TestApp::start_with(&database, with_change).await;
        let owner = new_user(&app);
        Fixture { database, app, owner }
    }

    pub(crate) fn db(&self) -> &PgPool {
        self.database.pool()
    }
}

/// Runs the events service alone: the test posts the messages of the joins service.
fn events_only(settings: &mut Settings) {
    settings.services = vec!["events".to_owned()];
}

/// Starts another server on the same database.
pub(crate) async fn start_replica(database: &TestDatabase) -> TestApp {
    TestApp::start_with(database, events_only).await
}

/// A client of a new user.
pub(crate) fn new_user(app: &TestApp) -> Client {
    app.user(Uuid::now_v7(), None)
}

/// The time in `hours` hours, in whole seconds.
pub(crate) fn in_hours(hours: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(Utc::now().timestamp(), 0).unwrap() + TimeDelta::hours(hours)
}

/// A valid body of an event.
pub(crate) fn meetup() -> Value {
    json!({
        "title": "Rust meetup", "description": "Talks, and then pizza.", "city": "Zürich", "category": "Tech",
        "start_time": in_hours(24), "end_time": in_hours(27), "time_zone": "Europe/Zurich", "capacity": 3,
        "cover_image_ids": ["img_1"],
    })
}

/// The body of [`meetup`] with these fields added or replaced.
pub(crate) fn meetup_with(fields: Value) -> Value {
    let mut body = meetup();
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

pub(crate) async fn create_event(owner: &Client, body: Value) -> Value {
    let answer = owner.post("/event/v1/events", body).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    answer.json()
}

pub(crate) async fn publish_event(owner: &Client, body: Value) -> Value {
    let event = create_event(owner, body).await;
    let answer = post_action(owner, &event, "publish").await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

pub(crate) async fn post_action(caller: &Client, event: &Value, action: &str) -> Response {
    caller.send(Method::POST, &format!("{}/{action}", event_path(event)), None).await
}

pub(crate) async fn patch_event(caller: &Client, event: &Value, fields: Value) -> Response {
    caller.send(Method::PATCH, &event_path(event), Some(fields)).await
}

pub(crate) fn event_path(event: &Value) -> String {
    format!("/event/v1/events/{}", event["id"].as_str().unwrap())
}

pub(crate) fn event_id(event: &Value) -> Uuid {
    event["id"].as_str().unwrap().parse().unwrap()
}

/// The messages about an event in the log, in order: topic and payload.
pub(crate) async fn event_messages(db: &PgPool, event: &Value) -> Vec<(String, Value)> {
    sqlx::query_as::<_, (String, sqlx::types::Json<Value>)>(
        "select topic, payload from pillarbox.log where source = 'events' and key = $1 order by id",
    )
    .bind(event_id(event).to_string())
    .fetch_all(db)
    .await
    .unwrap()
    .into_iter()
    .map(|(topic, payload)| (topic, payload.0))
    .collect()
}

/// A message of the joins service with this number of active participants and this count version.
pub(crate) fn join_message(event: Uuid, active: i32, version: i64) -> Post {
    let changed = JoinChanged {
        event_id: event,
        user_id: Uuid::now_v7(),
        join_id: Some(Uuid::now_v7()),
        status: Some(JoinStatus::Active),
        previous_status: None,
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

/// Posts the messages in one transaction.
pub(crate) async fn post_messages(db: &PgPool, source: &'static str, messages: &[Post]) {
    let mut tx = db.begin().await.unwrap();
    for message in messages {
        post(&mut tx, &Source::new(source), message).await.unwrap();
    }
    tx.commit().await.unwrap();
}

/// The ids of all events in a feed; `between` runs after each page but the last.
pub(crate) async fn walk_feed(reader: &Client, query: &str, mut between: impl AsyncFnMut()) -> Vec<Uuid> {
    let items = collect_pages_with(reader, &format!("/event/v1/events?{query}"), async |_| between().await).await;
    items.iter().map(event_id).collect()
}

/// Posts five counts of an event, one after the other, and returns the median time until the event shows them. The median
/// is robust against single stalls of a machine that runs many tests at once.
pub(crate) async fn median_count_latency(joins_db: &PgPool, reader: &Client, event: &Value) -> Duration {
    let mut times = Vec::new();
    for version in 1..=5 {
        post_messages(joins_db, "joins", &[join_message(event_id(event), version as i32, version)]).await;
        let posted_at = Instant::now();
        eventually("the count is shown", DEADLINE, async || {
            match reader.get(&event_path(event)).await.json()["active_participants"].clone() {
                found if found == version => Ok(()),
                other => Err(other),
            }
        })
        .await;
        times.push(posted_at.elapsed());
    }
    times.sort();
    times[2]
}

/// A second on a machine without other work. On a busy one it is longer: the time of fifty reads, of which one takes a few
/// milliseconds otherwise.
pub(crate) async fn second_of_this_machine(reader: &Client, event: &Value) -> Duration {
    let mut times = Vec::new();
    for _ in 0..11 {
        let began = Instant::now();
        assert_eq!(reader.get(&event_path(event)).await.status, 200);
        times.push(began.elapsed());
    }
    times.sort();
    Duration::from_secs(1).max(50 * times[5])
}

/// Inserts `count` published events past the API: one every minute, with alternating cities and categories.
pub(crate) async fn insert_events(db: &PgPool, count: i32) {
    sqlx::query(
        "insert into pillarbox_events.event (id, owner_id, title, description, city, city_norm, category, category_norm,
             start_time, end_time, time_zone, capacity, status, cover_image_ids, published_at, created_at, updated_at)
         select gen_random_uuid(), gen_random_uuid(), 'Event ' || n, 'No ' || n, cities.name, lower(cities.name),
             categories.name, categories.name, now() + n * interval '1 minute', now() + n * interval '1 minute' + interval '2 hours',
             'UTC', 10, 'published', '{}', now(), now(), now()
         from generate_series(1, $1) as n,
             lateral (select (array['Zurich', 'Bern', 'Basel', 'Genf', 'Chur'])[1 + n % 5] as name) cities,
             lateral (select (array['tech', 'music', 'sport'])[1 + n % 3] as name) categories",
    )
    .bind(count)
    .execute(db)
    .await
    .unwrap();
    sqlx::query("analyze pillarbox_events.event").execute(db).await.unwrap();
}

/// The titles on the first page of a feed.
pub(crate) async fn feed_titles(reader: &Client, query: &str) -> Vec<String> {
    let answer = reader.get(&format!("/event/v1/events?{query}")).await;
    assert_eq!(answer.status, 200, "{query}: {answer:?}");
    answer.json()["items"].as_array().unwrap().iter().map(|e| e["title"].as_str().unwrap().to_owned()).collect()
}

/// The stored count of an event, and its version.
pub(crate) async fn stored_count(db: &PgPool, event: Uuid) -> (i32, i64) {
    sqlx::query_as("select active_participants, count_version from pillarbox_events.event where id = $1")
        .bind(event)
        .fetch_one(db)
        .await
        .unwrap()
}

/// Waits until an event has this count and version.
pub(crate) async fn wait_for_count(db: &PgPool, event: Uuid, wanted: (i32, i64)) {
    eventually("the event has the count", DEADLINE, async || match stored_count(db, event).await {
        found if found == wanted => Ok(()),
        other => Err(other),
    })
    .await;
}

/// Scores the current events for the trending order. For tests with a long `trending_seconds`: the scores stay until the
/// next call.
pub(crate) async fn score_events(fixture: &Fixture) {
    let newest = async || {
        let query = "select coalesce(max(epoch), 0) from pillarbox_events.trending_epoch";
        sqlx::query_scalar::<_, i64>(query).fetch_one(fixture.db()).await.unwrap()
    };
    // The fixture's own process scores once at its start, perhaps before the events existed.
    eventually("the first scores", DEADLINE, async || newest().await > 0).await;
    let before = newest().await;
    let age = "update pillarbox_events.trending_epoch set scored_at = scored_at - interval '1 day'";
    sqlx::query(age).execute(fixture.db()).await.unwrap();
    // A new process scores at its start if the newest scores are too old.
    let other = start_replica(&fixture.database).await;
    eventually("new scores", DEADLINE, async || newest().await > before).await;
    other.stop().await;
}
