//! Notifications as a listener inserts them, contacts, and helpers that wait for outcomes.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool};
use testkit::{TestApp, eventually};
use uuid::Uuid;

use crate::support::DEADLINE;

/// A user with an address, whose texts are in English.
pub(crate) async fn insert_person(db: &PgPool, email: &str) -> Uuid {
    insert_contact(db, Some(email), None).await
}

/// A user with an address and a tenant, as far as they are given.
pub(crate) async fn insert_contact(db: &PgPool, email: Option<&str>, tenant: Option<&str>) -> Uuid {
    let user = Uuid::now_v7();
    let insert = "insert into pillarbox_notify.contact (user_id, email, name, tenant) values ($1, $2, 'Ada', $3)";
    sqlx::query(insert).bind(user).bind(email).bind(tenant).execute(db).await.unwrap();
    user
}

/// An event. Returns its id.
pub(crate) async fn insert_event(db: &mut PgConnection, event_type: &str, payload: Value) -> Uuid {
    let event = Uuid::now_v7();
    let insert =
        "insert into pillarbox_notify.business_event (id, event_type, aggregate_type, aggregate_id, payload, at)
                  values ($1, $2, 'CUSTOMER', 7, $3, clock_timestamp())";
    sqlx::query(insert).bind(event).bind(event_type).bind(payload).execute(db).await.unwrap();
    event
}

/// An event and a notification about it that is due in some seconds. Returns the id of the notification.
pub(crate) async fn insert_due(db: &PgPool, user: Uuid, channel: &str, event_type: &str, seconds: i32) -> i64 {
    let payload = json!({"title": "Rust meetup", "order": 5});
    insert_due_with(db, user, (channel, event_type, payload), seconds).await
}

/// The same with a channel, an event type and a payload.
pub(crate) async fn insert_due_with(
    db: &PgPool,
    user: Uuid,
    (channel, event_type, payload): (&str, &str, Value),
    seconds: i32,
) -> i64 {
    let mut db = db.acquire().await.unwrap();
    let event = insert_event(&mut db, event_type, payload).await;
    let insert = "insert into pillarbox_notify.notification (event_id, user_id, channel, status, due_at, created_at)
                  values ($1, $2, $3, 'waiting', clock_timestamp() + $4 * interval '1 second', clock_timestamp())
                  returning id";
    let inserted = sqlx::query_scalar(insert).bind(event).bind(user).bind(channel).bind(seconds);
    inserted.fetch_one(&mut *db).await.unwrap()
}

/// Many events with one notification by e-mail each, due now.
pub(crate) async fn insert_many(db: &PgPool, users: &[Uuid], event_type: &str) {
    let insert = "with new as (
                      select user_id, gen_random_uuid() as event_id from unnest($1::uuid[]) as users (user_id)
                  ), event as (
                      insert into pillarbox_notify.business_event (id, event_type, payload, at)
                      select event_id, $2, '{}', clock_timestamp() from new
                  )
                  insert into pillarbox_notify.notification (event_id, user_id, channel, status, due_at, created_at)
                  select event_id, user_id, 'email', 'waiting', clock_timestamp(), clock_timestamp() from new";
    sqlx::query(insert).bind(users).bind(event_type).execute(db).await.unwrap();
}

/// Inserts a notification into the inbox of a user, as a listener does: the row of the inbox is locked. Returns its number.
pub(crate) async fn insert_in_app(tx: &mut PgConnection, user: Uuid, event_type: &str, payload: Value) -> i64 {
    let event = insert_event(tx, event_type, payload).await;
    let number = "insert into pillarbox_notify.inbox as inbox (user_id, last_seq, unread) values ($1, 1, 1)
                  on conflict (user_id) do update set last_seq = inbox.last_seq + 1, unread = inbox.unread + 1
                  returning last_seq";
    let seq: i64 = sqlx::query_scalar(number).bind(user).fetch_one(&mut *tx).await.unwrap();
    let insert = "insert into pillarbox_notify.notification (event_id, user_id, channel, status, seq, created_at)
                  values ($1, $2, 'in_app', 'delivered', $3, clock_timestamp())";
    sqlx::query(insert).bind(event).bind(user).bind(seq).execute(tx).await.unwrap();
    seq
}

/// The status of a notification, its error, and its attempts.
pub(crate) async fn state_of(db: &PgPool, id: i64) -> (String, Option<String>, i32) {
    let query = "select status, last_error, attempts from pillarbox_notify.notification where id = $1";
    sqlx::query_as(query).bind(id).fetch_one(db).await.unwrap()
}

pub(crate) async fn wait_for_state(db: &PgPool, id: i64, status: &str) -> Option<String> {
    eventually(&format!("notification {id} is {status}"), DEADLINE, async || match state_of(db, id).await {
        (found, error, _) if found == status => Ok(error),
        other => Err(other),
    })
    .await
}

/// The number of notifications by status.
pub(crate) async fn statuses(db: &PgPool) -> BTreeMap<String, i64> {
    let query = "select status, count(*) from pillarbox_notify.notification group by status";
    let rows: Vec<(String, i64)> = sqlx::query_as(query).fetch_all(db).await.unwrap();
    rows.into_iter().collect()
}

/// The e-mails of a user that exist, oldest first: subject and text.
pub(crate) async fn emails_of(db: &PgPool, user: Uuid) -> Vec<(String, String)> {
    let query = "select subject, coalesce(text, '') from pillarbox_notify.mail where user_id = $1 order by id";
    sqlx::query_as(query).bind(user).fetch_all(db).await.unwrap()
}

/// Sets how an event type is delivered.
pub(crate) async fn set_event_type(app: &TestApp, name: &str, rules: Value) {
    let path = format!("/notify/v1/event-types/{name}");
    let saved = app.admin().send(hyper::Method::PUT, &path, Some(rules)).await;
    assert!([200, 201].contains(&saved.status), "{saved:?}");
}
