//! Without a mail server e-mails are captured: operators read them by HTTP, and they are bounded in number and time. In
//! shadow mode they are only recorded. A deleted account has no e-mails.

use chrono::TimeDelta;
use contracts::identity::{self, AccountDeleted};
use serde_json::Value;
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{
    SmtpServer, addresses, database_time, post_blanked, post_raw, request, request_until, send_to, statuses,
    verification, wait_for_status,
};
use crate::support::{DEADLINE, caller, collect_pages, text};

#[tokio::test]
async fn only_operators_read_captured_mails() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    for address in ["ada@example.org", "bob@example.org", "Ada@Example.org"] {
        request(database.pool(), &[verification(address)]).await;
    }
    let mut german = verification("eve@example.org");
    german.data.template = "password_reset".to_owned();
    german.data.locale = "de-AT".to_owned();
    request(database.pool(), &[german]).await;
    wait_for_status(database.pool(), "captured", 4).await;

    let admin = app.admin();
    let all = collect_pages(&admin, "/admin/v1/mail?limit=1").await;
    assert_eq!(all.len(), 4);
    let first = all.iter().find(|mail| mail["to"] == "ada@example.org").unwrap();
    assert_eq!((text(&first["status"]), text(&first["template"])), ("captured", "verification"));
    assert_eq!(text(&first["subject"]), "Confirm your e-mail address");
    assert!(text(&first["text"]).contains("Hello Ada,") && text(&first["text"]).contains("\n0123456789\n"), "{first}");
    assert!(text(&first["html"]).contains(">0123456789</p>") && first["sent_at"].is_null(), "{first}");

    let found = async |query: &str| collect_pages(&admin, &format!("/admin/v1/mail?{query}")).await;
    let recipients = |mails: &[Value]| mails.iter().map(|mail| text(&mail["to"]).to_owned()).collect::<Vec<_>>();
    assert_eq!(recipients(&found("to=ADA@example.ORG").await), ["Ada@example.org", "ada@example.org"]);
    let german = found("template=password_reset").await;
    assert_eq!((recipients(&german), text(&german[0]["locale"])), (vec!["eve@example.org".to_owned()], "de"));
    assert_eq!((found("status=dead").await.len(), found("status=captured").await.len()), (0, 4));
    admin.get("/admin/v1/mail?status=lost").await.assert_problem(400, "malformed-query");

    app.anonymous().get("/admin/v1/mail").await.assert_problem(401, "unauthorized");
    app.user(uuid::Uuid::now_v7(), None).get("/admin/v1/mail").await.assert_problem(403, "forbidden");
    for (role, tenant) in [("manage", "main"), ("admin", "acme")] {
        let stranger = caller(&app, role, tenant).await;
        stranger.get("/admin/v1/mail").await.assert_problem(403, "forbidden");
        stranger.post("/admin/v1/mail/1/retry", Value::Null).await.assert_problem(403, "forbidden");
    }
    app.stop().await;
}

#[tokio::test]
async fn captured_mails_are_bounded_in_number_and_time() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start(&database).await;
    for address in addresses(12) {
        request(db, &[verification(&address)]).await;
    }
    wait_for_status(db, "captured", 12).await;
    app.stop().await;
    let age = "update pillarbox_notify.mail set created_at = created_at - interval '25 hours'
               where id = (select max(id) from pillarbox_notify.mail) returning recipient";
    let old: String = sqlx::query_scalar(age).fetch_one(db).await.unwrap();

    // The first round of maintenance is at the start.
    let app = TestApp::start_with(&database, |settings| settings.mail.capture_max = 5).await;
    wait_for_status(db, "captured", 4).await;
    let left: Vec<String> =
        sqlx::query_scalar("select recipient from pillarbox_notify.mail").fetch_all(db).await.unwrap();
    assert!(!left.contains(&old) && !left.contains(&"user0@example.org".to_owned()), "{left:?}");
    app.stop().await;
}

#[tokio::test]
async fn shadowed_mails_are_recorded_without_their_text_and_never_sent() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let app = TestApp::start_with(&database, |settings| {
        send_to(&server)(settings);
        settings.mail.shadow = true;
    })
    .await;
    request(database.pool(), &[verification("ada@example.org"), verification("bob@example.org")]).await;
    wait_for_status(database.pool(), "shadowed", 2).await;
    let page = app.admin().get("/admin/v1/mail").await;
    let mail = &page.json()["items"][0];
    assert_eq!((text(&mail["subject"]), &mail["text"]), ("Confirm your e-mail address", &Value::Null));
    let bodies = "select count(*) from pillarbox_notify.mail where text is not null or html is not null";
    assert_eq!(sqlx::query_scalar::<_, i64>(bodies).fetch_one(database.pool()).await.unwrap(), 0);
    app.stop().await;

    // Now the same installation sends: only the e-mail that is requested from now on.
    let app = TestApp::start_with(&database, send_to(&server)).await;
    request(database.pool(), &[verification("eve@example.org")]).await;
    wait_for_status(database.pool(), "sent", 1).await;
    let recipients: Vec<String> = server.mails().into_iter().flat_map(|mail| mail.to).collect();
    assert_eq!(recipients, ["eve@example.org"]);
    app.stop().await;
}

#[tokio::test]
async fn a_deleted_account_has_no_mails_and_gets_none() {
    let (database, mut server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    server.kill();
    let db = database.pool();
    let forgotten =
        "insert into pillarbox_notify.deleted_account values (gen_random_uuid(), now() - interval '400 days')";
    sqlx::raw_sql(forgotten).execute(db).await.unwrap();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let (deleted, other) = (verification("ada@example.org"), verification("bob@example.org"));
    request(db, &[deleted.clone(), other.clone()]).await;
    wait_for_status(db, "queued", 2).await;

    let account = AccountDeleted { user_id: deleted.user_id.unwrap() };
    post_raw(db, identity::ACCOUNT_DELETED, &serde_json::to_string(&account).unwrap()).await;
    wait_for_status(db, "queued", 1).await;
    let in_log = "select count(*) from pillarbox.log where payload::text like '%ada@example.org%'";
    assert_eq!(sqlx::query_scalar::<_, i64>(in_log).fetch_one(db).await.unwrap(), 0, "the request was blanked");
    // A request that is processed after the deletion, such as a retried dead letter.
    let mut late = verification("ada@example.org");
    late.user_id = deleted.user_id;
    let mut next = verification("eve@example.org");
    next.user_id = late.user_id;
    request(db, &[late]).await;
    // One of the same key is processed after it.
    next.idempotency_key = "last".to_owned();
    request(db, &[next]).await;
    eventually("both requests are processed", DEADLINE, async || {
        let query = "select count(*) from pillarbox.inbox where consumer = 'notify.mail'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() == 4
    })
    .await;
    server.resume().await;
    wait_for_status(db, "sent", 1).await;
    assert_eq!(statuses(db).await.len(), 1);
    let recipients: Vec<String> = server.mails().into_iter().flat_map(|mail| mail.to).collect();
    assert_eq!(recipients, ["bob@example.org"]);
    let left: i64 = sqlx::query_scalar("select count(*) from pillarbox_notify.mail where recipient like 'ada%'")
        .fetch_one(db)
        .await
        .unwrap();
    assert_eq!(left, 0);
    eventually("only the recent deletion is remembered", DEADLINE, async || {
        let query = "select user_id from pillarbox_notify.deleted_account";
        let users: Vec<Uuid> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
        if users == [account.user_id] { Ok(()) } else { Err(users) }
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn expired_requests_are_recorded_and_not_sent_and_blanked_ones_are_skipped() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let app = TestApp::start_with(&database, send_to(&server)).await;
    let mut expired = verification("late@example.org");
    let now = database_time(db).await;
    expired.expires_at = Some(now - TimeDelta::seconds(1));
    let mut endless = verification("ada@example.org");
    endless.expires_at = None;
    // Maintenance blanks what has expired, and might do so before it is processed.
    request_until(db, &expired, now + TimeDelta::minutes(1)).await;
    request(db, &[endless]).await;
    post_blanked(db).await;
    wait_for_status(db, "sent", 1).await;
    wait_for_status(db, "expired", 1).await;
    eventually("all messages are processed", DEADLINE, async || {
        let query = "select count(*) from pillarbox.inbox where consumer = 'notify.mail'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() == 3
    })
    .await;
    let failed = "select (select count(*) from pillarbox.parked) + (select count(*) from pillarbox.dead_letter)";
    assert_eq!(sqlx::query_scalar::<_, i64>(failed).fetch_one(db).await.unwrap(), 0);
    assert_eq!(server.mails().len(), 1);
    app.stop().await;
}
