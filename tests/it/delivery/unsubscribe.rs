//! One-click unsubscribe (RFC 8058): links and headers in e-mails, a page that changes nothing, and a POST that mutes.

use hyper::Method;
use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};

use super::fixture::{emails_of, insert_due, insert_person, set_event_type, wait_for_state};
use crate::mail::fixture::{ReceivedMail, SmtpServer, send_to};
use crate::support::DEADLINE;

#[tokio::test]
async fn the_link_of_an_email_mutes_its_type_by_post_only_and_without_a_login() {
    let (database, server) = (TestDatabase::new(&migrations()).await, SmtpServer::start().await);
    let db = database.pool();
    let with_server = send_to(&server);
    let app = TestApp::start_with(&database, |settings| {
        with_server(settings);
        settings.public_url = Some("https://pillarbox.example".to_owned());
    })
    .await;
    set_event_type(&app, "alarm.raised", json!({"critical": true})).await;
    let user = insert_person(db, "ada@example.org").await;
    insert_due(db, user, "email", "order.paid", 0).await;
    insert_due(db, user, "email", "alarm.raised", 0).await;
    eventually("both arrive", DEADLINE, async || server.mails().len() == 2).await;
    let (alarms, others): (Vec<ReceivedMail>, Vec<ReceivedMail>) =
        server.mails().into_iter().partition(|received| received.header("Subject") == "Alarm raised");
    assert!(alarms[0].headers("List-Unsubscribe").is_empty() && !alarms[0].text.contains("unsubscribe"));

    let order = &others[0];
    let link = order.header("List-Unsubscribe").trim_start_matches('<').trim_end_matches('>');
    assert_eq!(order.header("List-Unsubscribe-Post"), "List-Unsubscribe=One-Click");
    assert!(order.text.contains(link) && order.html.replace("&#x2f;", "/").contains(link), "{order:?}");
    let path = link.strip_prefix("https://pillarbox.example").unwrap();
    assert!(path.starts_with("/notify/v1/unsubscribe?token=") && !path.contains("ada"), "{path}");

    let anyone = app.anonymous();
    let page = anyone.get(path).await;
    assert!(page.header("content-type").starts_with("text/html") && page.text.contains("<form method=\"post\">"));
    assert!(page.text.contains("Order paid") && page.header("referrer-policy") == "no-referrer");
    let preferences = async || app.user(user, None).get("/notify/v1/preferences").await.json()["preferences"].clone();
    assert_eq!(preferences().await, json!([]), "a program that opens the link mutes nothing");
    for forged in [path.replace("token=A", "token=B"), format!("{path}A"), "/notify/v1/unsubscribe?token=x".to_owned()]
    {
        anyone.get(&forged).await.assert_problem(404, "unsubscribe-link-invalid");
        anyone.send(Method::POST, &forged, None).await.assert_problem(404, "unsubscribe-link-invalid");
    }
    assert_eq!(preferences().await, json!([]));

    // As mailboxes do it.
    let one_click = anyone.with_header("content-type", "application/x-www-form-urlencoded");
    let muted = one_click.send_text(Method::POST, path, "List-Unsubscribe=One-Click").await;
    assert!(muted.status == 200 && muted.text.contains("no more e-mails"), "{muted:?}");
    assert_eq!(anyone.send(Method::POST, path, None).await.status, 200, "again");
    assert_eq!(preferences().await, json!([{"event_type": "order.paid", "channel": "email", "enabled": false}]));
    let skipped = insert_due(db, user, "email", "order.paid", 0).await;
    assert_eq!(wait_for_state(db, skipped, "skipped").await.as_deref(), Some("the user has muted it"));
    assert_eq!(emails_of(db, user).await.len(), 2);
    set_event_type(&app, "order.paid", json!({"critical": true})).await;
    anyone.send(Method::POST, path, None).await.assert_problem(409, "event-type-critical");
    assert_eq!(app.admin().delete("/notify/v1/event-types/order.paid").await.status, 204);

    let many = "insert into pillarbox_notify.preference (user_id, event_type, channel, enabled)
                select $1, 'type' || number, 'email', false from generate_series(1, 500) number";
    sqlx::query("delete from pillarbox_notify.preference").execute(db).await.unwrap();
    sqlx::query(many).bind(user).execute(db).await.unwrap();
    let refused = anyone.send(Method::POST, path, None).await;
    assert!((400..500).contains(&refused.status), "{refused:?}");
    // Nothing is stored about a user who is gone.
    for table in ["preference", "preference_set", "contact"] {
        let delete = format!("delete from pillarbox_notify.{table}");
        sqlx::query(sqlx::AssertSqlSafe(delete)).execute(db).await.unwrap();
    }
    assert_eq!(anyone.send(Method::POST, path, None).await.status, 200);
    let stored: i64 =
        sqlx::query_scalar("select count(*) from pillarbox_notify.preference_set").fetch_one(db).await.unwrap();
    assert_eq!(stored, 0);
    app.stop().await;
}

#[tokio::test]
async fn captured_emails_show_the_headers_that_a_mailbox_would_see() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start_with(&database, |settings| {
        settings.public_url = Some("https://pillarbox.example".to_owned());
    })
    .await;
    set_event_type(&app, "alarm.raised", json!({"critical": true})).await;
    let user = insert_person(db, "ada@example.org").await;
    for event_type in ["order.paid", "alarm.raised"] {
        let id = insert_due(db, user, "email", event_type, 0).await;
        wait_for_state(db, id, "delivered").await;
    }
    let listed = app.admin().get("/admin/v1/mail").await.json();
    let critical = json!({"Auto-Submitted": "auto-generated"});
    assert_eq!(listed["items"][0]["headers"], critical, "a critical type cannot be muted");
    let headers = &listed["items"][1]["headers"];
    let link = headers["List-Unsubscribe"].as_str().unwrap().trim_start_matches('<').trim_end_matches('>');
    assert!(link.starts_with("https://pillarbox.example/notify/v1/unsubscribe?token="), "{headers}");
    assert!(listed["items"][1]["text"].as_str().unwrap().contains(link), "{listed}");
    let all = json!({"Auto-Submitted": "auto-generated", "List-Unsubscribe": format!("<{link}>"),
        "List-Unsubscribe-Post": "List-Unsubscribe=One-Click"});
    assert_eq!(*headers, all);
    // Those of an e-mail that is on its way are for its recipient.
    let queue = "update pillarbox_notify.mail set status = 'dead'";
    sqlx::query(queue).execute(db).await.unwrap();
    assert!(app.admin().get("/admin/v1/mail").await.json()["items"][1].get("headers").is_none());
    app.stop().await;
}
