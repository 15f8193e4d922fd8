//! Following the log over HTTP.

use serde_json::json;
use sqlx::PgConnection;
use testkit::TestApp;

use crate::consumers::support::database;
use crate::support::text;

#[tokio::test]
async fn the_tail_has_every_message_once_also_one_that_commits_late() {
    let database = database().await;
    let app = TestApp::start(&database).await;
    let (db, admin) = (database.pool(), app.admin());
    let post = async |db: &mut PgConnection, topic: &str| {
        sqlx::query("select pillarbox.post($1, '{\"total\": 1.50}')").bind(topic).execute(db).await.unwrap();
    };
    let mut late = db.begin().await.unwrap();
    post(&mut late, "order.late").await;
    let mut connection = db.acquire().await.unwrap();
    for topic in ["order.paid", "user.left"] {
        post(&mut connection, topic).await;
    }
    let path = "/admin/v1/log/tail?topic=order&from=2026-01-01T00:00:00Z";
    let page = async |after: &str| {
        let page = admin.get(&format!("{path}{after}")).await;
        assert!(page.text.contains("1.50") || page.json()["items"] == json!([]), "payloads stay as they are: {page:?}");
        let page = page.json();
        let topics: Vec<String> =
            page["items"].as_array().unwrap().iter().map(|one| text(&one["topic"]).to_owned()).collect();
        (topics, page["is_at_end"] == true, format!("&after={}", text(&page["next"])))
    };
    let (topics, is_at_end, after) = page("").await;
    assert_eq!((topics, is_at_end), (vec!["order.paid".to_owned()], true));
    let (topics, is_at_end, after) = page(&after).await;
    assert_eq!((topics, is_at_end), (vec![], true));
    late.commit().await.unwrap();
    post(&mut connection, "order.sent").await;
    let (topics, is_at_end, after) = page(&after).await;
    assert_eq!((topics, is_at_end), (vec!["order.late".to_owned(), "order.sent".to_owned()], true));
    assert_eq!(page(&after).await.0, [""; 0]);
    let other = admin.get(&format!("/admin/v1/log/tail?{}", after.trim_start_matches('&'))).await;
    other.assert_problem(400, "malformed-query");
    let invalid = admin.get("/admin/v1/log/tail?topic=a%20b").await;
    invalid.assert_problem(400, "malformed-query");
    app.stop().await;
}
