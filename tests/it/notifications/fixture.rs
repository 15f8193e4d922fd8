//! Support for tests of notifications: posts, recipients, and queries on the tables that share no code with the service.

use hyper::Method;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Client, Response, eventually};
use uuid::Uuid;

use crate::support::DEADLINE;

/// A business event as a producer posts it by HTTP.
pub(crate) fn reservation(restaurant: i64) -> Value {
    json!({"event_type": "RESERVATION_REQUESTED", "aggregate_type": "RESTAURANT", "aggregate_id": restaurant,
        "payload": {"guests": 4}})
}

/// The same with another value of one field.
pub(crate) fn with(event: &Value, field: &str, value: Value) -> Value {
    let mut event = event.clone();
    event[field] = value;
    event
}

pub(crate) async fn post_event(producer: &Client, event: Value) -> Response {
    producer.post("/notify/v1/events", event).await
}

/// Makes users recipients of an aggregate, past the API.
pub(crate) async fn add_recipients(db: &PgPool, aggregate_type: &str, aggregate_id: Option<i64>, users: &[Uuid]) {
    let query = "insert into pillarbox_notify.recipient select $1, $2, * from unnest($3::uuid[])";
    sqlx::query(query).bind(aggregate_type).bind(aggregate_id).bind(users).execute(db).await.unwrap();
}

pub(crate) fn users(count: usize) -> Vec<Uuid> {
    (0..count).map(|_| Uuid::now_v7()).collect()
}

pub(crate) async fn put_recipient(client: &Client, aggregate: &str, user: Uuid) -> Response {
    client.send(Method::PUT, &format!("/notify/v1/recipients/{aggregate}/{user}"), None).await
}

/// The notifications of a user: event type, channel, number in the inbox; in the order of their creation.
pub(crate) async fn notifications(db: &PgPool, user: Uuid) -> Vec<(String, String, Option<i64>)> {
    let query = "select event_type, channel, seq from pillarbox_notify.notification
                 join pillarbox_notify.business_event on business_event.id = event_id
                 where user_id = $1 order by notification.id";
    sqlx::query_as(query).bind(user).fetch_all(db).await.unwrap()
}

/// The types of the in-app notifications of a user, in the order of the inbox.
pub(crate) async fn inbox(db: &PgPool, user: Uuid) -> Vec<String> {
    let query = "select event_type from pillarbox_notify.notification
                 join pillarbox_notify.business_event on business_event.id = event_id
                 where user_id = $1 and channel = 'in_app' order by seq";
    sqlx::query_scalar(query).bind(user).fetch_all(db).await.unwrap()
}

pub(crate) async fn wait_for_inbox(db: &PgPool, user: Uuid, wanted: &[&str]) {
    eventually(&format!("the inbox has {wanted:?}"), DEADLINE, async || match inbox(db, user).await {
        types if types == wanted => Ok(()),
        other => Err(other),
    })
    .await;
}

pub(crate) async fn count(db: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

/// The number of in-app notifications.
pub(crate) async fn in_app_count(db: &PgPool) -> i64 {
    count(db, "select count(*) from pillarbox_notify.notification where channel = 'in_app'").await
}

/// Checks what holds of all inboxes at any time: the numbers have no gap, and the counts are those of the rows.
pub(crate) async fn check_inboxes(db: &PgPool) {
    let wrong = "select count(*) from pillarbox_notify.inbox full join (
                     select user_id, count(*) as rows, max(seq) as last, count(distinct seq) as numbers,
                            count(*) filter (where read_at is null and archived_at is null) as unread
                     from pillarbox_notify.notification where channel = 'in_app' group by user_id
                 ) found using (user_id)
                 where (inbox.last_seq, inbox.last_seq, inbox.last_seq, inbox.unread)
                     is distinct from (coalesce(rows, 0), coalesce(last, 0), coalesce(numbers, 0), coalesce(found.unread, 0))";
    assert_eq!(count(db, wrong).await, 0, "an inbox has a gap or a wrong count");
}

/// Waits until a consumer has processed this many messages.
pub(crate) async fn wait_until_processed(db: &PgPool, consumer: &str, messages: i64) {
    let query = "select (select count(*) from pillarbox.inbox where consumer = $1)
                      + (select count(*) from pillarbox.inbox_foreign where consumer = $1)";
    eventually(&format!("{consumer} has processed {messages}"), DEADLINE, async || {
        let processed: i64 = sqlx::query_scalar(query).bind(consumer).fetch_one(db).await.unwrap();
        if processed == messages { Ok(()) } else { Err(processed) }
    })
    .await;
}
