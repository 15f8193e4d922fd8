//! The retry schedule and the retry rules of a subscriber.

use serde_json::{Value, json};
use testkit::{Receiver, Reply, eventually};

use crate::hub::fixture::{
    Fixture, dead_letters, error_pointers, patch_subscriber, post, subscribe, subscriber_path, wait_for_outcome,
};
use crate::hub::rows::{start_api_only, subscriber_fields};
use crate::support::{DEADLINE, caller, text, uuid_of};

#[tokio::test]
async fn a_retry_schedule_is_given_by_its_name_or_as_a_list_and_shown_as_both() {
    let (_database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let patient = json!([5, 300, 1_800, 7_200, 18_000, 36_000, 36_000]);
    let schedule = |shown: &Value| (shown["retry_schedule"].clone(), shown["retry_backoff_seconds"].clone());
    let mut fields = subscriber_fields("a");
    let made = acme.post("/hub/v1/subscribers", fields.clone()).await.json();
    assert_eq!(schedule(&made), (json!("short"), json!([5, 30, 300])), "the default");
    let id = uuid_of(&made["id"]);
    for (change, name, seconds) in [
        (json!({"retry_schedule": "patient"}), json!("patient"), patient.clone()),
        (json!({"name": "b"}), json!("patient"), patient.clone()),
        (json!({"retry_backoff_seconds": [1]}), Value::Null, json!([1])),
        (json!({"retry_backoff_seconds": patient.clone()}), json!("patient"), patient.clone()),
        (json!({"retry_schedule": null}), json!("short"), json!([5, 30, 300])),
        (json!({"retry_backoff_seconds": [2], "retry_schedule": null}), Value::Null, json!([2])),
        (json!({"retry_backoff_seconds": null, "retry_schedule": "patient"}), json!("patient"), patient),
        (json!({"retry_backoff_seconds": null}), json!("short"), json!([5, 30, 300])),
    ] {
        let changed = patch_subscriber(&acme, id, change.clone()).await;
        assert_eq!((changed.status, schedule(&changed.json())), (200, (name, seconds)), "{change}");
    }
    (fields["retry_schedule"], fields["retry_backoff_seconds"]) = (json!("patient"), json!([1]));
    assert_eq!(error_pointers(&acme.post("/hub/v1/subscribers", fields.clone()).await), ["/retry_schedule"]);
    (fields["retry_schedule"], fields["retry_backoff_seconds"]) = (json!("hasty"), Value::Null);
    assert_eq!(error_pointers(&acme.post("/hub/v1/subscribers", fields).await), ["/retry_schedule"]);
    app.stop().await;
}

#[tokio::test]
async fn retry_rules_are_replaced_as_a_whole() {
    let (_database, app) = start_api_only().await;
    let acme = caller(&app, "manage", "acme").await;
    let made = acme.post("/hub/v1/subscribers", subscriber_fields("a")).await.json();
    assert_eq!(made["retry_rules"], json!({}));
    let id = uuid_of(&made["id"]);
    let several = json!({"404": "retry", "410": "retry", "503": "dead_letter", "4xx": "retry"});
    for (change, rules) in [
        (json!({"retry_rules": several.clone()}), several.clone()),
        (json!({"name": "b"}), several),
        (json!({"retry_rules": {"403": "disable"}}), json!({"403": "disable"})),
        (json!({"retry_rules": null}), json!({})),
    ] {
        let changed = patch_subscriber(&acme, id, change.clone()).await;
        assert_eq!((changed.status, &changed.json()["retry_rules"]), (200, &rules), "{change}");
    }
    let wrong =
        json!({"retry_rules": {"200": "retry", "4XX": "retry", "503": "disable", "4xx": "disable", "a/b": "retry"}});
    let pointers =
        ["/retry_rules/200", "/retry_rules/4XX", "/retry_rules/4xx", "/retry_rules/503", "/retry_rules/a~1b"];
    assert_eq!(error_pointers(&patch_subscriber(&acme, id, wrong).await), pointers);
    let removed = patch_subscriber(&acme, id, json!({"retry_statuses": [409]})).await;
    removed.assert_problem(422, "validation-failed");
    let unknown = patch_subscriber(&acme, id, json!({"retry_rules": {"404": "ignore"}})).await;
    assert_eq!(error_pointers(&unknown), ["/retry_rules/404"]);
    app.stop().await;
}

#[tokio::test]
async fn the_rule_of_a_subscriber_decides_what_a_status_leads_to() {
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let receiver =
        Receiver::with_reply(|received| Reply::status(received.path.rsplit('/').next().unwrap().parse().unwrap()))
            .await;
    let mut cases = Vec::new();
    for (status, rules, tries, reason) in [
        (404, json!({"404": "retry"}), 2, "exhausted"),
        (410, json!({"410": "retry"}), 2, "exhausted"),
        (503, json!({"503": "dead_letter"}), 1, "refused"),
        (429, json!({"4xx": "dead_letter"}), 1, "refused"),
        (302, json!({"3xx": "retry", "404": "dead_letter"}), 2, "exhausted"),
        (422, json!({"4xx": "retry", "422": "dead_letter"}), 1, "refused"),
        (403, json!({"403": "disable"}), 1, "gone"),
    ] {
        let url = receiver.url().replace("hook", &status.to_string());
        let event_type = format!("test.s{status}");
        let fields = json!({"event_types": [event_type], "retry_rules": rules, "retry_backoff_seconds": [1]});
        let subscriber = subscribe(manager, &url, fields).await;
        let event = post(manager, &event_type, json!({}), None).await;
        cases.push((status, subscriber, event, tries, reason));
    }
    for (status, subscriber, event, tries, reason) in cases {
        let outcome = wait_for_outcome(manager, &event, &subscriber, "dead").await;
        assert_eq!(outcome["attempts"], tries, "{status}: {outcome}");
        let dead = dead_letters(manager, &subscriber).await;
        assert_eq!(dead.first().map(|dead| text(&dead["reason"])), Some(reason), "{status}");
        let is_active = reason != "gone";
        let shown = eventually(&format!("after {status} it is active: {is_active}"), DEADLINE, async || {
            let shown = manager.get(&subscriber_path(&subscriber)).await.json();
            if shown["is_active"] == is_active { Ok(shown) } else { Err(shown) }
        })
        .await;
        if !is_active {
            assert_eq!(shown["inactive_reason"], format!("it answered {status}"));
        }
    }
    fixture.app.stop().await;
}
