//! The overview of operators: totals of all processes, and what needs attention.

use serde_json::{Value, json};
use server::migrations;
use testkit::{Receiver, Reply, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::hub::fixture::{post_batch, subscribe, wait_for_dead_letters, wait_for_webhooks};
use crate::support::{DEADLINE, caller, text};

const PATH: &str = "/admin/v1/overview";

fn titles(overview: &Value) -> Vec<&str> {
    overview["findings"].as_array().unwrap().iter().map(|finding| text(&finding["title"])).collect()
}

#[tokio::test]
async fn the_totals_count_the_attempts_of_all_processes_and_survive_a_restart() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let manager = caller(&app, "manage", "acme").await;
    let empty = app.admin().get(PATH).await.json();
    assert_eq!((&empty["delivered_total"], &empty["latency_ms"]), (&json!(0), &Value::Null), "{empty}");
    assert_eq!(empty["dead_letters"], json!({"webhooks": 0, "consumers": 0, "mail": 0, "notifications": 0}));
    let (healthy, failing) = (Receiver::start().await, Receiver::with_reply(|_| Reply::status(503)).await);
    subscribe(&manager, &healthy.url(), json!({})).await;
    let failing_one = subscribe(&manager, &failing.url(), json!({"retry_backoff_seconds": [1]})).await;
    post_batch(&manager, vec![json!({"event_type": "order.paid", "payload": {}}); 5]).await;
    wait_for_webhooks(&healthy, 5).await;
    wait_for_dead_letters(&manager, &failing_one, 5).await;
    let expected = |overview: &Value| overview["delivered_total"] == 5 && overview["failed_attempts_total"] == 10;
    let overview = eventually("all attempts are counted", DEADLINE, async || {
        let overview = app.admin().get(PATH).await.json();
        if expected(&overview) { Ok(overview) } else { Err(overview) }
    })
    .await;
    assert!(overview["posted_total"].as_i64().unwrap() >= 5, "{overview}");
    assert_eq!(overview["dead_letters"]["webhooks"], 5, "{overview}");
    let latency = &overview["latency_ms"];
    assert!(latency["p50"].as_f64().unwrap() > 0.0 && latency["p99"].as_f64() >= latency["p50"].as_f64(), "{overview}");
    // A delivery ends after its response has begun.
    assert!(overview["end_to_end_ms"]["p99"].as_f64().unwrap() > 1.0, "{overview}");
    let finding =
        overview["findings"].as_array().unwrap().iter().find(|one| one["title"] == "5 webhooks were given up");
    let link = &finding.unwrap()["links"][0];
    assert_eq!((&link["address"], &link["tenant"]), (&json!("#/dead-letters"), &json!("acme")), "{overview}");
    app.stop().await;

    // A process without dispatcher shows the same.
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![server::settings::Role::Api]).await;
    let overview = app.admin().get(PATH).await.json();
    assert!(expected(&overview), "{overview}");
    app.stop().await;
}

#[tokio::test]
async fn findings_name_what_is_wrong_and_what_to_do() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![server::settings::Role::Api]).await;
    let manager = caller(&app, "manage", "acme").await;
    let (failing, disabled, paused) = (
        subscribe(&manager, "https://example.com/a", json!({"name": "failing"})).await,
        subscribe(&manager, "https://example.com/b", json!({"name": "disabled"})).await,
        subscribe(&manager, "https://example.com/c", json!({"name": "paused"})).await,
    );
    let execute = async |query: &'static str, id: &Value| {
        let id: Uuid = text(&id["id"]).parse().unwrap();
        sqlx::query(query).bind(id).execute(db).await.unwrap();
    };
    for one in [&failing, &paused] {
        let query =
            "insert into pillarbox_hub.subscriber_state values ($1, now() - interval '10 minutes', true, now())";
        execute(query, one).await;
    }
    execute("update pillarbox_hub.subscriber set paused_at = now() where id = $1", &paused).await;
    let query =
        "update pillarbox_hub.subscriber set is_active = false, inactive_reason = 'it answered 410 Gone' where id = $1";
    execute(query, &disabled).await;
    // A consumer that no process runs, with a message that waits for ten minutes.
    sqlx::query("insert into pillarbox.cursor (consumer, kind, included) values ('test.idle', 'handler', '.*')")
        .execute(db)
        .await
        .unwrap();
    sqlx::query(
        "insert into pillarbox.log (shard, message_id, source, tenant, topic, headers, payload, at)
         values (0, gen_random_uuid(), 'sql', 'main', 'test.topic', '{}', '{}', now() - interval '10 minutes')",
    )
    .execute(db)
    .await
    .unwrap();

    let overview = eventually("all findings are shown", DEADLINE, async || {
        let overview = app.admin().get(PATH).await.json();
        if titles(&overview).len() == 3 { Ok(overview) } else { Err(overview) }
    })
    .await;
    let found: Vec<(&str, &str)> = overview["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| (text(&finding["severity"]), text(&finding["title"])))
        .collect();
    let expected = [
        ("critical", "No process runs test.idle"),
        ("warning", "The subscriber failing does not accept webhooks"),
        ("warning", "The subscriber disabled was disabled"),
    ];
    assert_eq!(found, expected, "{overview}");
    let what_to_do = text(&overview["findings"][0]["what_to_do"]);
    assert!(what_to_do.contains("pillarbox cursors drop test.idle"), "{overview}");
    assert!(text(&overview["findings"][2]["detail"]).contains("disabled of acme: it answered 410 Gone"), "{overview}");
    app.stop().await;
}

#[tokio::test]
async fn only_operators_see_the_overview() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    app.anonymous().get(PATH).await.assert_problem(401, "unauthorized");
    let strangers =
        [caller(&app, "admin", "acme").await, caller(&app, "manage", "main").await, app.user(Uuid::now_v7(), None)];
    for stranger in strangers {
        stranger.get(PATH).await.assert_problem(403, "forbidden");
    }
    assert_eq!(app.admin().get(PATH).await.status, 200);
    app.stop().await;
}
