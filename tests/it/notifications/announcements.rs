//! Notifications to many people, in steps: bounded, in order, and without holding up others.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::{add_recipients, check_inboxes, count, in_app_count, inbox, users, wait_for_inbox};
use crate::hub::fixture::test_size;
use crate::support::{DEADLINE, text};

const PENDING: &str = "select count(*) from pillarbox_notify.announcement";

async fn only_in_app(db: &PgPool) {
    let types = "insert into pillarbox_notify.event_type (name, channels)
                 select unnest(array['A', 'B', 'C', 'event.updated']), '{in_app}'";
    sqlx::query(types).execute(db).await.unwrap();
}

async fn post(db: &PgPool, event_type: &str, agency: i64) {
    let query = "select pillarbox.notify($1, 'AGENCY', $2, '{}')";
    sqlx::query(query).bind(event_type).bind(agency).execute(db).await.unwrap();
}

#[tokio::test]
async fn an_event_with_very_many_recipients_is_announced_in_steps_and_before_the_next_one() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, many, few) = (database.pool(), users(test_size(1_600, 50_000)), users(2));
    only_in_app(db).await;
    add_recipients(db, "AGENCY", Some(1), &many).await;
    // One of them is behind all agencies, too.
    add_recipients(db, "AGENCY", None, &[few[0], many[7]]).await;
    for (event_type, agency) in [("A", 1), ("B", 1), ("C", 2)] {
        post(db, event_type, agency).await;
    }
    let apps = [TestApp::start(&database).await, TestApp::start(&database).await];
    let expected = 2 * (many.len() as i64 + 1) + 2;
    eventually("everyone is notified", DEADLINE * 4, async || match in_app_count(db).await {
        found if found == expected => Ok(()),
        other => Err(other),
    })
    .await;
    eventually("the announcements are done", DEADLINE, async || count(db, PENDING).await == 0).await;
    assert_eq!(inbox(db, many[9]).await, ["A", "B"]);
    let out_of_order = "select count(*) from pillarbox_notify.notification
                        join pillarbox_notify.business_event on business_event.id = event_id
                        where (event_type = 'A' and seq > 2) or (event_type = 'B' and seq = 1)";
    assert_eq!(count(db, out_of_order).await, 0);
    let largest = "select max(rows) from (select count(*) as rows from pillarbox_notify.notification group by xmin::text) written";
    assert!(count(db, largest).await <= 1_000, "rows of one transaction: {}", count(db, largest).await);
    check_inboxes(db).await;
    for app in apps {
        app.stop().await;
    }
}

/// Announces business events of these types to the participants of events.
async fn announce(db: &PgPool, types: &[(&str, Uuid)]) -> Vec<Uuid> {
    let mut announced = Vec::new();
    for (event_type, event_id) in types {
        let id = Uuid::now_v7();
        let query = "with event as (insert into pillarbox_notify.business_event (id, event_type, payload, at)
                                    values ($1, $2, '{}', now()))
                     insert into pillarbox_notify.announcement (business_event, event_id, subject, due_at)
                     values ($1, $3, $3::text, now())";
        sqlx::query(query).bind(id).bind(event_type).bind(event_id).execute(db).await.unwrap();
        announced.push(id);
    }
    announced
}

async fn join(db: &PgPool, event_id: Uuid, user: Uuid) {
    let query = "insert into pillarbox_notify.participant values ($1, $2, 'active')";
    sqlx::query(query).bind(event_id).bind(user).execute(db).await.unwrap();
}

#[tokio::test]
async fn an_announcement_waits_for_an_earlier_one_of_its_event_and_for_no_other() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user, event) = (database.pool(), users(2), users(2));
    only_in_app(db).await;
    join(db, event[0], user[0]).await;
    join(db, event[1], user[1]).await;
    let announced = announce(db, &[("A", event[0]), ("B", event[0]), ("C", event[1])]).await;
    // Another process works on the first one.
    let mut other = db.begin().await.unwrap();
    let lock = "select from pillarbox_notify.announcement where business_event = $1 for update";
    sqlx::query(lock).bind(announced[0]).execute(&mut *other).await.unwrap();
    let app = TestApp::start(&database).await;
    wait_for_inbox(db, user[1], &["C"]).await;
    // Three rounds of the worker.
    for _ in 0..3 {
        let event = Uuid::now_v7();
        join(db, event, user[1]).await;
        let before = inbox(db, user[1]).await.len();
        announce(db, &[("C", event)]).await;
        eventually("another one is notified", DEADLINE, async || inbox(db, user[1]).await.len() > before).await;
    }
    assert_eq!(inbox(db, user[0]).await, [""; 0], "the second one waits for the first");
    other.rollback().await.unwrap();
    wait_for_inbox(db, user[0], &["A", "B"]).await;
    app.stop().await;
}

#[tokio::test]
async fn an_announcement_that_fails_delays_no_other_is_given_up_at_last_and_continues_when_an_operator_retries_it() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user, event) = (database.pool(), users(2), users(2));
    only_in_app(db).await;
    join(db, event[0], user[0]).await;
    join(db, event[1], user[1]).await;
    let fail = "create function fail() returns trigger language plpgsql as $$ begin raise exception 'refused'; end $$";
    sqlx::query(fail).execute(db).await.unwrap();
    let trigger = format!(
        "create trigger fail before insert on pillarbox_notify.notification for each row
         when (new.user_id = '{}') execute function fail()",
        user[0]
    );
    sqlx::query(sqlx::AssertSqlSafe(trigger)).execute(db).await.unwrap();
    let announced = announce(db, &[("A", event[0]), ("B", event[1])]).await;
    let app = TestApp::start(&database).await;
    wait_for_inbox(db, user[1], &["B"]).await;
    let state = async || -> (i32, Option<String>, bool) {
        let query =
            "select attempts, last_error, due_at is null from pillarbox_notify.announcement where business_event = $1";
        sqlx::query_as(query).bind(announced[0]).fetch_one(db).await.unwrap()
    };
    eventually("it was tried", DEADLINE, async || state().await.0 > 0).await;
    assert!(state().await.1.is_some_and(|error| error.contains("refused")), "{:?}", state().await);
    let last = "update pillarbox_notify.announcement set attempts = 29, due_at = now()";
    sqlx::query(last).execute(db).await.unwrap();
    eventually("it is given up", DEADLINE, async || state().await.2).await;
    // Participants are notified of later ones of the same event.
    sqlx::query("drop trigger fail on pillarbox_notify.notification").execute(db).await.unwrap();
    announce(db, &[("C", event[0])]).await;
    wait_for_inbox(db, user[0], &["C"]).await;

    // An operator finds and continues it.
    let listed = app.admin().get("/admin/v1/announcements?given_up=true").await.json();
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1), "{listed}");
    let found = &listed["items"][0];
    assert_eq!((text(&found["event_id"]), &found["due_at"]), (&*format!("evt_{}", announced[0]), &Value::Null));
    assert!(text(&found["last_error"]).contains("refused") && found["attempts"] == 30, "{found}");
    let waiting = app.admin().get("/admin/v1/announcements?given_up=false").await.json();
    assert_eq!(waiting["items"], json!([]));
    let path = format!("/admin/v1/announcements/{}/retry", found["id"]);
    app.user(user[0], None).send(Method::POST, &path, None).await.assert_problem(403, "forbidden");
    assert_eq!(app.admin().send(Method::POST, &path, None).await.status, 202);
    wait_for_inbox(db, user[0], &["C", "A"]).await;
    eventually("it is complete", DEADLINE, async || count(db, PENDING).await == 0).await;
    app.admin().send(Method::POST, &path, None).await.assert_problem(404, "announcement-not-found");
    let later = "insert into pillarbox_notify.announcement (business_event, event_id, subject, due_at)
                 values (gen_random_uuid(), $1, $1::text, now() + interval '1 hour') returning id";
    let later: i64 = sqlx::query_scalar(later).bind(event[0]).fetch_one(db).await.unwrap();
    let path = format!("/admin/v1/announcements/{later}/retry");
    app.admin().send(Method::POST, &path, None).await.assert_problem(409, "announcement-not-given-up");
    let readyz = app.admin().get("/readyz").await;
    assert_eq!(readyz.status, 200, "{readyz:?}");
    app.stop().await;
}
