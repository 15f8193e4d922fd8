//! Digests that are large, many, postponed, or that contain what failed before.

use chrono::{DateTime, NaiveTime, TimeDelta, Utc};
use serde_json::{Value, json};
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{
    emails_of, insert_due, insert_due_with, insert_many, insert_person, state_of, statuses, wait_for_state,
};
use crate::server::process::DataFolder;
use crate::support::DEADLINE;

const DIGEST_TYPES: &str = "insert into pillarbox_notify.event_type (name, digest_minutes)
                            values ('order.paid', 60), ('order.large', 60)";

async fn subjects_of(db: &sqlx::PgPool, user: Uuid) -> Vec<String> {
    emails_of(db, user).await.into_iter().map(|(subject, _)| subject).collect()
}

#[tokio::test]
async fn a_large_digest_shows_what_fits_and_one_that_cannot_be_rendered_becomes_single_emails() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, folder) = (database.pool(), DataFolder::new());
    std::fs::create_dir(folder.path()).unwrap();
    let template = "{% if count == 7 %}{{ items.absent.name }}{% endif %}{{ items | length }} shown, {{ more }} more";
    std::fs::write(folder.path().join("notification_digest.en.txt"), template).unwrap();
    sqlx::query(DIGEST_TYPES).execute(db).await.unwrap();
    let (large, failing) = (insert_person(db, "ada@example.org").await, insert_person(db, "bob@example.org").await);
    // The default template shows 50 fields of 500 characters: 25 KB, and six times as much in HTML.
    let payload: Value = (0..50).map(|number| (format!("field{number}"), json!("<".repeat(500)))).collect();
    for _ in 0..3 {
        insert_due_with(db, large, ("email", "order.large", json!({"order": 1})), 3600).await;
    }
    for _ in 0..20 {
        insert_due_with(db, large, ("email", "order.large", payload.clone()), 0).await;
    }
    insert_many(db, &[failing; 7], "order.paid").await;
    let app =
        TestApp::start_with(&database, |settings| settings.mail.templates_dir = Some(folder.path().to_owned())).await;
    eventually("all are delivered", DEADLINE, async || match statuses(db).await {
        found if found.get("delivered") == Some(&30) => Ok(()),
        other => Err(other),
    })
    .await;
    let failed = "select count(*) from pillarbox_notify.notification where attempts > 0";
    let failed: i64 = sqlx::query_scalar(failed).fetch_one(db).await.unwrap();
    assert_eq!(failed, 0, "none has failed on the way");
    let emails = emails_of(db, large).await;
    assert_eq!(emails, [("Order large (23)".to_owned(), "3 shown, 20 more".to_owned())]);
    assert_eq!(subjects_of(db, failing).await, ["Order paid"; 7]);
    app.stop().await;
}

#[tokio::test]
async fn digests_of_many_notifications_are_not_split_nor_delayed_by_one_in_quiet_hours() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    sqlx::query(DIGEST_TYPES).execute(db).await.unwrap();
    let mut people = Vec::new();
    for name in ["asleep", "ada", "bob"] {
        people.push(insert_person(db, &format!("{name}@example.org")).await);
    }
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await.unwrap();
    let time = |hours: i64| -> NaiveTime { (now + TimeDelta::hours(hours)).time() };
    let quiet = "insert into pillarbox_notify.quiet_hours (user_id, time_zone, quiet_from, quiet_until)
                 values ($1, 'UTC', $2, $3)";
    sqlx::query(quiet).bind(people[0]).bind(time(-1)).bind(time(1)).execute(db).await.unwrap();
    insert_many(db, &vec![people[0]; 1_100], "order.paid").await;
    insert_many(db, &people[1..].repeat(600), "order.paid").await;
    let app = TestApp::start(&database).await;
    let postponed = "select count(*) from pillarbox_notify.notification where due_at > clock_timestamp()";
    eventually("the others are delivered, and those of the night postponed", DEADLINE, async || {
        let postponed: i64 = sqlx::query_scalar(postponed).fetch_one(db).await.unwrap();
        match (statuses(db).await, postponed) {
            (found, 1_100) if found.get("delivered") == Some(&1_200) => Ok(()),
            other => Err(other),
        }
    })
    .await;
    assert_eq!(subjects_of(db, people[0]).await, Vec::<String>::new());
    for user in &people[1..] {
        assert_eq!(subjects_of(db, *user).await, ["Order paid (600)"]);
    }
    // The night ends.
    sqlx::query("delete from pillarbox_notify.quiet_hours").execute(db).await.unwrap();
    let wake = "update pillarbox_notify.notification set due_at = clock_timestamp() where status = 'waiting'";
    sqlx::query(wake).execute(db).await.unwrap();
    eventually("all are delivered", DEADLINE, async || statuses(db).await.get("delivered") == Some(&2_300)).await;
    assert_eq!(subjects_of(db, people[0]).await, ["Order paid (1000)", "Order paid (100)"], "a digest has a limit");
    app.stop().await;
}

#[tokio::test]
async fn what_failed_or_was_retried_or_has_no_event_is_delivered_alone_and_ends_no_collection() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let user = insert_person(db, "ada@example.org").await;
    let collected = insert_due(db, user, "email", "order.paid", 1_800).await;
    let failed = insert_due(db, user, "email", "order.paid", 0).await;
    let retried = insert_due(db, user, "email", "order.paid", 0).await;
    let orphan = insert_due(db, user, "email", "order.gone", 0).await;
    for change in [
        format!("update pillarbox_notify.notification set attempts = 1, last_error = 'x' where id = {failed}"),
        format!("update pillarbox_notify.notification set last_error = 'x' where id = {retried}"),
        "delete from pillarbox_notify.business_event where event_type = 'order.gone'".to_owned(),
    ] {
        sqlx::query(sqlx::AssertSqlSafe(change)).execute(db).await.unwrap();
    }
    let app = TestApp::start_with(&database, |settings| settings.notify.digest_minutes = 60).await;
    for id in [failed, retried] {
        let error = wait_for_state(db, id, "delivered").await;
        assert_eq!(error, None, "the error of a former attempt is cleared");
    }
    assert_eq!(wait_for_state(db, orphan, "skipped").await.as_deref(), Some("the event was deleted"));
    assert_eq!(state_of(db, collected).await.0, "waiting");
    assert_eq!(subjects_of(db, user).await, ["Order paid"; 2]);
    app.stop().await;
}

#[tokio::test]
async fn a_digest_loads_little_of_large_payloads_however_well_they_are_compressed() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, folder) = (database.pool(), DataFolder::new());
    std::fs::create_dir(folder.path()).unwrap();
    let template = "{{ items | length }} shown, {{ more }} more";
    std::fs::write(folder.path().join("notification_digest.en.txt"), template).unwrap();
    sqlx::query(DIGEST_TYPES).execute(db).await.unwrap();
    let user = insert_person(db, "ada@example.org").await;
    let payload = json!({"note": "x".repeat(249_000)});
    for _ in 0..20 {
        insert_due_with(db, user, ("email", "order.large", payload.clone()), 0).await;
    }
    let stored = "select max(pg_column_size(payload)) from pillarbox_notify.business_event";
    let stored: i32 = sqlx::query_scalar(stored).fetch_one(db).await.unwrap();
    assert!(stored < 10_000, "PostgreSQL compresses them to {stored} bytes");
    // Each of these is an e-mail of its own: all together are too much for one transaction.
    let other = insert_person(db, "bob@example.org").await;
    for _ in 0..40 {
        insert_due_with(db, other, ("email", "order.single", payload.clone()), 0).await;
    }
    let app =
        TestApp::start_with(&database, |settings| settings.mail.templates_dir = Some(folder.path().to_owned())).await;
    eventually("all are delivered", DEADLINE, async || match statuses(db).await {
        found if found.get("delivered") == Some(&60) => Ok(()),
        other => Err(other),
    })
    .await;
    let emails = emails_of(db, user).await;
    assert_eq!(emails, [("Order large (20)".to_owned(), "2 shown, 18 more".to_owned())]);
    // The e-mails of one transaction have one time.
    let largest = "select max(count) from (select count(*) from pillarbox_notify.mail where user_id = $1 group by created_at) one";
    let largest: i64 = sqlx::query_scalar(largest).bind(other).fetch_one(db).await.unwrap();
    assert_eq!(largest, 16, "the payloads of a transaction have at most 4 MB");
    app.stop().await;
}
