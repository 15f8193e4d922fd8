//! The secrets of subscribers in the HTTP API: shown once, stored encrypted, rotated, and used by test webhooks.

use hyper::Method;
use serde_json::{Value, json};
use testkit::Receiver;
use webhook_client::signature::Verifier;

use crate::hub::fixture::{error_pointers, patch_subscriber};
use crate::hub::rows::{reply_with, start_api_only, subscriber_fields};
use crate::support::{caller, collect_pages, uuid_of};

#[tokio::test]
async fn secrets_and_header_values_are_shown_once_and_stored_encrypted() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let mut fields = subscriber_fields("billing");
    fields["headers"] = json!({"Authorization": "Bearer hunter2-hunter2"});
    let made = acme.post("/hub/v1/subscribers", fields).await;
    assert_eq!(made.status, 201, "{made:?}");
    let (id, secret) = (uuid_of(&made.json()["id"]), made.json()["secret"].as_str().unwrap().to_owned());
    assert!(secret.starts_with("whsec_"), "{secret}");
    assert_eq!(made.header("location"), format!("/hub/v1/subscribers/{id}"));
    assert_eq!(made.header("etag"), acme.get(&format!("/hub/v1/subscribers/{id}")).await.header("etag"));
    assert_eq!(made.json()["headers"], json!({"authorization": "***"}));
    let texts = [
        acme.get(&format!("/hub/v1/subscribers/{id}")).await.text,
        acme.get("/hub/v1/subscribers").await.text,
        patch_subscriber(&acme, id, json!({"name": "other"})).await.text,
    ];
    let rows: Vec<String> = sqlx::query_scalar(
        "select s::text || encode(s.headers, 'escape') from pillarbox_hub.subscriber s
         union all select s::text || encode(s.sealed, 'escape') from pillarbox_hub.secret s",
    )
    .fetch_all(database.pool())
    .await
    .unwrap();
    assert_eq!(rows.len(), 2);
    for text in texts.iter().chain(&rows) {
        assert!(!text.contains(&secret[6..]) && !text.contains("hunter2"), "{text}");
    }
    let shown: Value = serde_json::from_str(&texts[0]).unwrap();
    assert_eq!(shown["headers"], json!({"authorization": "***"}));
    assert_eq!(shown["secrets"], json!([{"signature": "v1"}]));
    let shards: (i16, i16) =
        sqlx::query_as("select shard, pillarbox.shard_of('acme', id::text) from pillarbox_hub.subscriber")
            .fetch_one(database.pool())
            .await
            .unwrap();
    assert_eq!(shards.0, shards.1);
    app.stop().await;
}

#[tokio::test]
async fn a_repeated_creation_creates_nothing_and_shows_no_secret() {
    let (_database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let repeating = acme.with_header("idempotency-key", "once");
    let made = repeating.post("/hub/v1/subscribers", subscriber_fields("a")).await;
    assert_eq!(made.status, 201, "{made:?}");
    let repeated = repeating.post("/hub/v1/subscribers", subscriber_fields("a")).await;
    repeated.assert_problem(409, "already-answered");
    let id = made.json()["id"].as_str().unwrap().to_owned();
    let next_step = format!("send POST /hub/v1/subscribers/{id}/rotate-secret with a new Idempotency-Key");
    assert!(repeated.json()["detail"].as_str().unwrap().contains(&next_step), "{repeated:?}");
    assert_eq!(collect_pages(&acme, "/hub/v1/subscribers").await.len(), 1);
    app.stop().await;
}

#[tokio::test]
async fn the_response_with_a_rotated_secret_is_not_stored() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let made = acme.post("/hub/v1/subscribers", subscriber_fields("a")).await.json();
    let path = format!("/hub/v1/subscribers/{}/rotate-secret", made["id"].as_str().unwrap());
    let repeating = acme.with_header("idempotency-key", "once");
    let rotated = repeating.post(&path, json!({})).await;
    assert_eq!(rotated.status, 200, "{rotated:?}");
    let secret = rotated.json()["secret"].as_str().unwrap().to_owned();
    let repeated = repeating.post(&path, json!({})).await;
    repeated.assert_problem(409, "already-answered");
    assert!(repeated.text.contains(&path) && repeated.text.contains("a new Idempotency-Key"), "{repeated:?}");
    let shown = acme.get(path.trim_end_matches("/rotate-secret")).await.json();
    assert_eq!(shown["secrets"].as_array().unwrap().len(), 2, "the repetition has not rotated again");
    let rows: Vec<String> =
        sqlx::query_scalar("select i::text from pillarbox.idempotency i").fetch_all(database.pool()).await.unwrap();
    let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
    let [row] = rows.as_slice() else { panic!("one row: {rows:?}") };
    assert!(!row.contains(&secret) && !row.contains(&hex), "{row}");
    app.stop().await;
}

#[tokio::test]
async fn a_rotated_secret_overlaps_and_zero_overlap_ends_all_others() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let mut fields = subscriber_fields("a");
    fields["signature"] = json!("v1a");
    let made = acme.post("/hub/v1/subscribers", fields).await;
    let (first_tag, made) = (made.header("etag").to_owned(), made.json());
    assert!(made["secret"].as_str().unwrap().starts_with("whsk_"));
    assert!(made["secrets"][0]["public_key"].as_str().unwrap().starts_with("whpk_"));
    let path = format!("/hub/v1/subscribers/{}/rotate-secret", made["id"].as_str().unwrap());
    let rotated = acme.post(&path, json!({})).await;
    assert_eq!((rotated.status, &rotated.json()["version"]), (200, &json!(2)));
    assert_ne!(rotated.header("etag"), first_tag);
    let rotated = rotated.json();
    assert!(rotated["secret"].as_str().unwrap().starts_with("whsk_") && rotated["secret"] != made["secret"]);
    let secrets = rotated["secrets"].as_array().unwrap();
    assert_eq!((secrets.len(), &secrets[0]["expires_at"]), (2, &Value::Null));
    let ends =
        |secret: &Value| secret["expires_at"].as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap();
    let remaining = ends(&secrets[1]) - chrono::Utc::now();
    assert!((23..=24).contains(&remaining.num_hours()), "{remaining}");
    for _ in 0..3 {
        assert_eq!(acme.post(&path, json!({"overlap_hours": 168})).await.status, 200);
    }
    acme.post(&path, json!({"overlap_hours": 1})).await.assert_problem(409, "too-many-secrets");
    let five = acme.get(path.trim_end_matches("/rotate-secret")).await.json();
    let secrets = five["secrets"].as_array().unwrap();
    assert_eq!(secrets.len(), 5);
    assert!((ends(&secrets[4]) - chrono::Utc::now()).num_hours() < 24, "a longer overlap extends no earlier secret");
    for hours in [-1, 169] {
        assert_eq!(error_pointers(&acme.post(&path, json!({"overlap_hours": hours})).await), ["/overlap_hours"]);
    }
    let urgent = acme.post(&path, json!({"overlap_hours": 0})).await.json();
    assert_eq!(urgent["secrets"].as_array().unwrap().len(), 1);
    let stored: i64 =
        sqlx::query_scalar("select count(*) from pillarbox_hub.secret").fetch_one(database.pool()).await.unwrap();
    assert_eq!(stored, 1);
    app.stop().await;
}

#[tokio::test]
async fn a_test_webhook_is_signed_with_every_secret_and_reports_its_result() {
    let (database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let receiver = Receiver::with_reply(reply_with(202, "thank you")).await;
    let mut fields = subscriber_fields("a");
    (fields["url"], fields["format"]) = (json!(receiver.url()), json!("standard"));
    fields["headers"] = json!({"x-token": "hunter2"});
    let made = acme.post("/hub/v1/subscribers", fields).await.json();
    let path = format!("/hub/v1/subscribers/{}", made["id"].as_str().unwrap());
    patch_subscriber(&acme, uuid_of(&made["id"]), json!({"headers": {"X-Token": "***", "x-team": "blue"}})).await;
    let rotated = acme.post(&format!("{path}/rotate-secret"), json!({})).await.json();
    let tested = acme.send(Method::POST, &format!("{path}/test"), None).await;
    assert_eq!(tested.status, 200, "{tested:?}");
    let tested = tested.json();
    assert_eq!(
        (&tested["delivered"], &tested["status"], &tested["excerpt"]),
        (&json!(true), &json!(202), &json!("thank you"))
    );
    let received = receiver.received().pop().unwrap();
    assert_eq!(received.header("x-token"), "hunter2", "sending *** back leaves the stored value unchanged");
    assert_eq!(received.header("x-team"), "blue");
    assert_eq!(received.header("webhook-id"), tested["event_id"].as_str().unwrap());
    for secret in [&made["secret"], &rotated["secret"]] {
        let verifier = Verifier::parse(secret.as_str().unwrap()).unwrap();
        verifier.verify(&received.headers, &received.body, chrono::Utc::now().timestamp()).unwrap();
    }
    let sent = received.json();
    assert_eq!((&sent["type"], &sent["data"]["subscriber_id"]), (&json!("hub.test"), &made["id"]));
    let logged: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.log").fetch_one(database.pool()).await.unwrap();
    assert_eq!(logged, 0, "a test webhook does not go through the log");

    let broken = Receiver::with_reply(reply_with(500, "no")).await;
    patch_subscriber(&acme, uuid_of(&made["id"]), json!({"url": broken.url(), "headers": {}})).await;
    let tested = acme.send(Method::POST, &format!("{path}/test"), None).await.json();
    assert_eq!((&tested["delivered"], &tested["status"]), (&json!(false), &json!(500)));
    patch_subscriber(&acme, uuid_of(&made["id"]), json!({"url": "http://127.0.0.1:1/"})).await;
    let tested = acme.send(Method::POST, &format!("{path}/test"), None).await.json();
    assert_eq!((&tested["delivered"], &tested["error"]), (&json!(false), &json!("connect")));
    app.stop().await;
}
