//! Subscriptions to paid plans.

use contracts::identity::{SUBSCRIPTION_CANCELLED, SUBSCRIPTION_CREATED, SUBSCRIPTION_STATUS_CHANGED};
use futures_util::future::join_all;
use hyper::Method;
use serde_json::json;

use super::fixture::Fixture;
use crate::support::{collect_pages, text};

#[tokio::test]
async fn a_user_subscribes_and_cancels_and_billing_changes_the_status() {
    let fixture = Fixture::start().await;
    let (ada, eve) = (fixture.person("ada").await, fixture.person("eve").await);
    let keyed = ada.client.with_header("idempotency-key", "s1");
    let created = keyed.post("/identity/v1/subscriptions", json!({"plan": "pro"})).await;
    assert_eq!((created.status, &created.json()["status"]), (201, &json!("trialing")), "{created:?}");
    let repeated = keyed.post("/identity/v1/subscriptions", json!({"plan": "pro"})).await;
    assert_eq!((repeated.status, repeated.header("etag")), (201, created.header("etag")));
    let path = created.header("location").to_owned();
    let (id, tag) = (text(&created.json()["id"]).to_owned(), created.header("etag").to_owned());
    eve.client.get(&path).await.assert_problem(404, "subscription-not-found");
    eve.client.send(Method::POST, &format!("{path}/cancel"), None).await.assert_problem(404, "subscription-not-found");
    ada.client.post(&format!("{path}/status"), json!({"status": "active"})).await.assert_problem(403, "forbidden");
    let cached = ada.client.with_header("if-none-match", &tag).get(&path).await;
    assert_eq!(cached.status, 304);

    let billing = fixture.app.admin();
    let status = async |status: &str| billing.post(&format!("{path}/status"), json!({"status": status})).await;
    let refused = status("paused").await;
    refused.assert_problem(409, "transition-refused");
    let allowed = "it can become active, past_due, cancelled or expired";
    assert!(text(&refused.json()["detail"]).contains(allowed), "{refused:?}");
    let active = status("active").await;
    assert_eq!(active.json()["status"], "active");
    let again = status("active").await;
    assert_eq!((again.status, again.json()), (200, active.json()), "billing repeats itself, and nothing changes");
    let of_ada = format!("/identity/v1/subscriptions?user_id={}", ada.id);
    assert_eq!(billing.get(&of_ada).await.json()["items"], json!([active.json()]));
    assert_eq!(ada.client.get(&of_ada).await.json()["items"][0]["id"], id);
    eve.client.get(&of_ada).await.assert_problem(403, "forbidden");
    assert_eq!(eve.client.get("/identity/v1/subscriptions").await.json()["items"], json!([]));
    let unnamed = billing.get("/identity/v1/subscriptions").await;
    unnamed.assert_problem(403, "forbidden");
    assert!(text(&unnamed.json()["detail"]).contains("user_id"), "{unnamed:?}");
    let stale = billing.with_header("if-match", &tag);
    let stale = stale.post(&format!("{path}/status"), json!({"status": "past_due"})).await;
    stale.assert_problem(412, "stale");
    assert_eq!(status("past_due").await.json()["status"], "past_due");
    let cancelled = ada.client.send(Method::POST, &format!("{path}/cancel"), None).await;
    assert_eq!((&cancelled.json()["status"], cancelled.json()["ended_at"].is_string()), (&json!("cancelled"), true));
    ada.client.send(Method::POST, &format!("{path}/cancel"), None).await.assert_problem(409, "transition-refused");
    status("active").await.assert_problem(409, "transition-refused");

    let change = |status: &str, previous: &str| json!({"user_id": ada.id, "subscription_id": id, "plan": "pro", "status": status, "previous_status": previous});
    let new = json!({"user_id": ada.id, "subscription_id": id, "plan": "pro", "status": "trialing"});
    assert_eq!(fixture.messages(SUBSCRIPTION_CREATED).await, [new]);
    let changes = [change("active", "trialing"), change("past_due", "active")];
    assert_eq!(fixture.messages(SUBSCRIPTION_STATUS_CHANGED).await, changes);
    assert_eq!(fixture.messages(SUBSCRIPTION_CANCELLED).await, [change("cancelled", "past_due")]);
    let keys: Vec<String> =
        sqlx::query_scalar("select distinct key from pillarbox.log where topic like 'subscription.%'")
            .fetch_all(fixture.db())
            .await
            .unwrap();
    assert_eq!(keys, [ada.id.to_string()]);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_plan_has_one_live_subscription_of_a_user() {
    let fixture = Fixture::start().await;
    let ada = fixture.person("ada").await;
    let answers = join_all((0..20).map(|_| ada.post("subscriptions", json!({"plan": "pro"})))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201).count(), 1);
    let refused = answers.iter().find(|answer| answer.status != 201).unwrap();
    refused.assert_problem(409, "subscription-exists");
    assert_eq!(fixture.messages(SUBSCRIPTION_CREATED).await.len(), 1);
    for plan in ["", "Pro", "a b", &"p".repeat(64)] {
        ada.post("subscriptions", json!({"plan": plan})).await.assert_problem(422, "validation-failed");
    }
    for number in 1..20 {
        assert_eq!(ada.post("subscriptions", json!({"plan": format!("plan-{number}")})).await.status, 201);
    }
    ada.post("subscriptions", json!({"plan": "one-more"})).await.assert_problem(409, "too-many-subscriptions");
    let mine = collect_pages(&ada.client, "/identity/v1/subscriptions?limit=7").await;
    assert_eq!(mine.len(), 20);
    let first = mine.iter().find(|subscription| subscription["plan"] == "pro").unwrap();
    let cancel = format!("subscriptions/{}/cancel", text(&first["id"]));
    assert_eq!(ada.send(Method::POST, &cancel, None).await.status, 200);
    assert_eq!(ada.post("subscriptions", json!({"plan": "pro"})).await.status, 201, "the former one has ended");
    fixture.app.stop().await;
}
