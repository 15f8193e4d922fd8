//! The order in which e-mails are sent.

use mailbox::database::migrations;
use testkit::{TestApp, TestDatabase};

use super::fixture::{SmtpServer, send_to, wait_for_status};

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
