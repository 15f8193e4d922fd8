//! When the payload of a confidential message is blanked.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use chrono::{TimeDelta, Utc};
use pillarbox::log::BLANKED;
use pillarbox::operations::cursors;
use pillarbox::operations::dead_letters::{self, Selection};
use pillarbox::operations::replays::{self, Request};
use sqlx::PgPool;
use testkit::{TestDatabase, eventually};

use crate::confidential::support::{
    EmailHandler, blank, create_email_table, email, email_process, expire_all, occurrences, post_email,
    recorded_emails, register_stalled, state,
};
use crate::consumers::support::{TIMEOUT, count, database, fast_options, wait_for_count, wait_for_replays};

async fn email_database() -> TestDatabase {
    let database = database().await;
    create_email_table(database.pool()).await;
    database
}

async fn wait_for_emails(db: &PgPool, expected: usize) {
    eventually("the e-mails are recorded", TIMEOUT, async || match recorded_emails(db).await.len() {
        found if found == expected => Ok(()),
        found => Err(found),
    })
    .await;
}

async fn request_replay(db: &PgPool, again: bool) {
    let (from, to) = (Utc::now() - TimeDelta::hours(1), Utc::now() + TimeDelta::minutes(1));
    let request = Request { consumer: "notify.mail".to_owned(), from, to, again };
    replays::request(db, &request).await.unwrap();
}

#[tokio::test]
async fn a_payload_is_blanked_when_every_consumer_has_processed_it_and_not_before() {
    let database = email_database().await;
    let (db, handler) = (database.pool(), Arc::new(EmailHandler::default()));
    register_stalled(db, "relay.email").await;
    let process = email_process(db, &handler, fast_options());
    let id = post_email(db, &email("u1", "s3cret-token")).await;
    wait_for_emails(db, 1).await;
    assert_eq!(count(db, "confidential").await, 1);
    let is_there = async |why: &str| {
        blank(db).await;
        assert!(occurrences(&database, "s3cret-token").await > 0, "the payload must stay: {why}");
    };
    is_there("a consumer has not read it").await;
    sqlx::query("update pillarbox.cursor set lapsed_at = now() where consumer = 'relay.email'")
        .execute(db)
        .await
        .unwrap();
    is_there("a consumer has lapsed and can be reset to read it").await;
    process.stop().await;
    cursors::reset(db, "relay.email", None).await.unwrap();
    request_replay(db, false).await;
    is_there("a replay is to read it").await;

    let process = email_process(db, &handler, fast_options());
    wait_for_replays(db).await;
    blank(db).await;
    assert_eq!(occurrences(&database, "s3cret-token").await, 0);
    assert_eq!(count(db, "confidential").await, 0);
    let (payload, topic): (String, String) =
        sqlx::query_as("select payload::text, topic from pillarbox.log where message_id = $1")
            .bind(id)
            .fetch_one(db)
            .await
            .unwrap();
    assert_eq!(
        (payload.as_str(), topic.as_str()),
        (BLANKED, "email.verification.requested"),
        "the rest of the row stays"
    );
    assert_eq!(state(db, "notify.mail", id).await, ("sent".to_owned(), None));
    // A replay that is requested later gets the marker.
    request_replay(db, true).await;
    wait_for_emails(db, 2).await;
    let is_blanked = "select is_blanked from email_record order by n desc limit 1";
    assert!(sqlx::query_scalar::<_, bool>(is_blanked).fetch_one(db).await.unwrap());
    process.stop().await;
}

#[tokio::test]
async fn a_parked_or_dead_message_can_be_retried_until_it_expires() {
    let database = email_database().await;
    let (db, handler) = (database.pool(), Arc::new(EmailHandler::default()));
    handler.is_failing.store(true, Ordering::SeqCst);
    let mut options = fast_options();
    options.worker.retry.retries = Some(1);
    let process = email_process(db, &handler, options);
    let first = post_email(db, &email("u1", "s3cret-first")).await;
    wait_for_count(db, "dead_letter", 1).await;
    blank(db).await;
    assert!(occurrences(&database, "s3cret-first").await > 0, "a dead letter can be retried");
    handler.is_failing.store(false, Ordering::SeqCst);
    assert_eq!(dead_letters::retry(db, &Selection::default(), 10).await.unwrap(), 1);
    wait_for_emails(db, 1).await;
    assert_eq!(recorded_emails(db).await, [first]);
    wait_for_count(db, "parked", 0).await;
    blank(db).await;
    assert_eq!(occurrences(&database, "s3cret-first").await, 0);

    // A dead letter and a message that no consumer reads lose their payloads when they expire.
    handler.is_failing.store(true, Ordering::SeqCst);
    let dead = post_email(db, &email("u1", "s3cret-dead")).await;
    wait_for_count(db, "dead_letter", 1).await;
    process.stop().await;
    let unread = post_email(db, &email("u2", "s3cret-unread")).await;
    blank(db).await;
    assert!(occurrences(&database, "s3cret-dead").await > 0 && occurrences(&database, "s3cret-unread").await > 0);
    expire_all(db).await;
    blank(db).await;
    assert_eq!(occurrences(&database, "s3cret").await, 0, "nothing is left, not even in an error text");
    assert_eq!(state(db, "notify.mail", dead).await.0, "dead");
    let (status, error) = state(db, "notify.mail", unread).await;
    assert_eq!(status, "discarded", "its loss shows");
    assert!(error.unwrap().contains("expired"));
    // The consumer may have read the message just before, and park a copy just after.
    assert_eq!(count(db, "confidential").await, 1);
    sqlx::query(
        "insert into pillarbox.parked (consumer, shard, run, attempts, log_id, message_id, source, tenant, topic, key, headers,
             payload, at)
         select 'notify.mail', shard, 0, 1, id, message_id, source, tenant, topic, key, headers, '\"s3cret-late\"', at
         from pillarbox.log where message_id = $1",
    )
    .bind(unread)
    .execute(db)
    .await
    .unwrap();
    blank(db).await;
    assert_eq!(occurrences(&database, "s3cret-late").await, 0);
    cursors::reset(db, "notify.mail", None).await.unwrap();
    blank(db).await;
    assert_eq!(count(db, "confidential").await, 0, "no consumer can store another copy");
}

#[tokio::test]
async fn a_payload_waits_for_a_consumer_that_is_not_registered_yet() {
    let database = email_database().await;
    let (db, handler) = (database.pool(), Arc::new(EmailHandler::default()));
    let first = post_email(db, &email("u1", "s3cret-first")).await;
    blank(db).await;
    assert!(occurrences(&database, "s3cret-first").await > 0, "its consumer may be registered later");
    let process = email_process(db, &handler, fast_options());
    wait_for_emails(db, 1).await;
    assert_eq!(recorded_emails(db).await, [first]);
    // A route whose filter has changed is to read it again, as soon as no process has the former filter.
    let change = "insert into pillarbox.filter_change (consumer, read_to, included, replay_from)
                  values ('relay.email', now(), '^$', now() - interval '1 hour')";
    sqlx::query(change).execute(db).await.unwrap();
    blank(db).await;
    assert!(occurrences(&database, "s3cret-first").await > 0, "a replay will be requested");
    sqlx::query("update pillarbox.filter_change set replay_from = null").execute(db).await.unwrap();
    blank(db).await;
    assert_eq!(occurrences(&database, "s3cret-first").await, 0);
    process.stop().await;
    // No consumer ever reads the second one.
    cursors::delete(db, "notify.mail").await.unwrap();
    post_email(db, &email("u1", "s3cret-second")).await;
    expire_all(db).await;
    blank(db).await;
    assert_eq!(occurrences(&database, "s3cret-second").await, 0, "an expired payload does not wait");
}
