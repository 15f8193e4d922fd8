//! The order in which e-mails are sent.

use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{SmtpServer, send_to, statuses, wait_for_status};
use crate::delivery::fixture::{insert_due, insert_many, insert_person};
use crate::support::DEADLINE;

#[tokio::test]
async fn a_password_reset_does_not_wait_behind_the_emails_of_notifications() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let insert = "insert into pillarbox_notify.mail (message_id, source, idempotency_key, recipient, template, locale,
                      subject, text, html, status, next_attempt_at, give_up_at, created_at)
                  select gen_random_uuid(), $1, number, 'user' || number || '@example.org', 't', 'en', 's', 't', 'h',
                      'queued', clock_timestamp(), clock_timestamp() + interval '1 day', clock_timestamp()
                  from generate_series(1, $2) number";
    for (source, count) in [("notify", 40), ("identity", 1)] {
        sqlx::query(insert).bind(source).bind(count).execute(db).await.unwrap();
    }
    let with_server = send_to(&server);
    let app = TestApp::start_with(&database, |settings| {
        with_server(settings);
        settings.mail.concurrency = 1;
    })
    .await;
    wait_for_status(db, "sent", 41).await;
    let earlier = "select count(*) from pillarbox_notify.mail
                   where sent_at < (select sent_at from pillarbox_notify.mail where source = 'identity')";
    let earlier: i64 = sqlx::query_scalar(earlier).fetch_one(db).await.unwrap();
    assert!(earlier <= 1, "{earlier} were sent earlier");
    app.stop().await;
}

/// How many e-mails are before that of the user, in this order.
async fn earlier(db: &sqlx::PgPool, order: &str, user: Uuid) -> i64 {
    let query = format!(
        "select count(*) from pillarbox_notify.mail
         where {order} < (select max({order}) from pillarbox_notify.mail where user_id = $1)"
    );
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(user).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn the_announcement_of_an_organizer_does_not_delay_the_confirmation_of_another_person() {
    const ANNOUNCED: usize = 450;
    let (database, mut server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let mut crowd = Vec::new();
    for number in 0..ANNOUNCED {
        crowd.push(insert_person(db, &format!("user{number}@example.org")).await);
    }
    insert_many(db, &crowd, "event.updated").await;
    let organizer = "update pillarbox_notify.notification set sender = '0198c5a0-7c5e-7b43-8f0e-3d5b8e6a1c11'";
    sqlx::query(organizer).execute(db).await.unwrap();
    // The confirmation becomes an e-mail before the announcement, although it is due later.
    let (ada, bob) = (insert_person(db, "ada@example.org").await, insert_person(db, "bob@example.org").await);
    insert_due(db, ada, "email", "join.confirmed", 0).await;
    let with_server = send_to(&server);
    server.kill();
    let app = TestApp::start_with(&database, |settings| {
        with_server(settings);
        settings.mail.concurrency = 2;
    })
    .await;
    let queued = async |count: i64| {
        eventually(&format!("{count} e-mails are queued"), DEADLINE, async || {
            let statuses = statuses(db).await;
            if statuses.get("queued") == Some(&count) { Ok(()) } else { Err(statuses) }
        })
        .await;
    };
    queued(ANNOUNCED as i64 + 1).await;
    assert!(earlier(db, "id", ada).await <= 200, "{} were rendered earlier", earlier(db, "id", ada).await);
    // A confirmation that comes after the whole announcement is sent before it.
    insert_due(db, bob, "email", "join.confirmed", 0).await;
    queued(ANNOUNCED as i64 + 2).await;
    server.resume().await;
    for person in [ada, bob] {
        eventually("the confirmation is sent", DEADLINE, async || {
            let is_sent = "select exists (select from pillarbox_notify.mail where user_id = $1 and status = 'sent')";
            sqlx::query_scalar::<_, bool>(is_sent).bind(person).fetch_one(db).await.unwrap()
        })
        .await;
        let earlier = earlier(db, "sent_at", person).await;
        assert!(earlier <= 40, "{earlier} were sent earlier");
    }
    app.stop().await;
}
