//! How large the catalogue of a tenant may be: types, versions of a type, and bytes of all versions. And that checking a large one
//! delays no other tenant.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Response};

use crate::hub::fixture::{Fixture, error_pointers};
use crate::support::caller;

const TYPES_MAX: usize = 1_000;
const VERSIONS_MAX: usize = 100;

async fn import(manager: &Client, event_types: Vec<Value>) -> Response {
    let file = json!({"event_types": event_types}).to_string();
    manager.send_text(Method::PUT, "/hub/v1/catalogue/file", &file).await
}

fn event_type(name: &str, schemas: Vec<Value>) -> Value {
    let version = |(at, schema)| json!({"version": at + 1, "schema": schema, "examples": []});
    let versions: Vec<Value> = schemas.into_iter().enumerate().map(version).collect();
    json!({"name": name, "description": "", "versions": versions})
}

#[tokio::test]
async fn a_catalogue_has_at_most_a_thousand_types_and_a_type_a_hundred_versions() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let types = |count: usize| (0..count).map(|n| event_type(&format!("order.n{n}"), Vec::new())).collect::<Vec<_>>();
    import(&manager, types(TYPES_MAX + 1)).await.assert_problem(409, "too-many-event-types");
    assert_eq!(import(&manager, types(TYPES_MAX)).await.status, 200);
    manager.post("/hub/v1/event-types", json!({"name": "one.more"})).await.assert_problem(409, "too-many-event-types");

    let versions = |count: usize| vec![event_type("order.n0", vec![json!({"type": "object"}); count])];
    let refused = import(&manager, versions(VERSIONS_MAX + 1)).await;
    assert_eq!((refused.status, error_pointers(&refused)), (422, vec!["/event_types/0/versions".to_owned()]));
    let imported = import(&manager, versions(VERSIONS_MAX)).await;
    assert_eq!(imported.status, 200, "{imported:?}");
    let added = manager.post("/hub/v1/event-types/order.n0/versions", json!({"schema": {"type": "object"}})).await;
    added.assert_problem(409, "too-many-versions");
    app.stop().await;
}

#[tokio::test]
async fn the_versions_of_a_tenant_have_at_most_sixteen_mebibytes_together() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let large = json!({"description": "x".repeat(60_000)});
    let (mut imported, mut refused) = (0, None);
    for n in 0..40 {
        let answer = import(&manager, vec![event_type(&format!("order.n{n}"), vec![large.clone(); 10])]).await;
        if answer.status != 200 {
            refused = Some(answer);
            break;
        }
        imported += 600_000;
    }
    refused.expect("the limit is reached").assert_problem(409, "catalogue-too-large");
    assert!((15_000_000..=16 * 1024 * 1024).contains(&imported), "{imported} bytes were accepted");
    app.stop().await;
}

#[tokio::test]
async fn the_versions_of_a_type_have_at_most_a_mebibyte_together_and_can_be_read() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let made = manager.post("/hub/v1/event-types", json!({"name": "order.paid"})).await;
    assert_eq!(made.status, 201, "{made:?}");
    let large = json!({"schema": {"description": "x".repeat(60_000)}, "examples": ["x".repeat(60_000)]});
    let (mut added, mut refused) = (0, None);
    for _ in 0..20 {
        let answer = manager.post("/hub/v1/event-types/order.paid/versions", large.clone()).await;
        if answer.status != 201 {
            refused = Some(answer);
            break;
        }
        added += 1;
    }
    let refused = refused.expect("the limit is reached");
    refused.assert_problem(409, "catalogue-too-large");
    assert!(refused.text.contains("order.paid") && refused.text.contains("1048576"), "{refused:?}");
    assert_eq!(added, 8);
    let path = "/hub/v1/event-types/order.paid";
    assert_eq!(manager.get(path).await.json()["versions"].as_array().unwrap().len(), 8);
    assert_eq!(manager.send(Method::PATCH, path, Some(json!({"deprecated": true}))).await.status, 200);
    let others = vec![event_type("order.sent", vec![json!({"description": "x".repeat(60_000)}); 15])];
    assert_eq!(import(&manager, others).await.status, 200);
    app.stop().await;
}

#[tokio::test]
async fn the_documents_about_a_catalogue_of_the_largest_size_can_be_read() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let large = |n: usize| {
        let version =
            json!({"version": 1, "schema": {"description": "x".repeat(60_000)}, "examples": ["x".repeat(60_000)]});
        json!({"name": format!("order.n{n:03}"), "versions": [version]})
    };
    for part in 0..16 {
        let imported = import(&manager, (part * 8..part * 8 + 8).map(large).collect()).await;
        assert_eq!(imported.status, 200, "{imported:?}");
    }
    let page = manager.get("/hub/v1/catalogue/page").await;
    assert!(page.status == 200 && page.text.len() > 15_000_000, "{} {}", page.status, page.text.len());
    assert!(page.text.ends_with("</body></html>\n") && page.text.matches("<h2 ").count() == 128);
    let schemas = manager.get("/hub/v1/catalogue/schemas").await;
    assert_eq!((schemas.status, schemas.header("content-type")), (200, "application/json"));
    assert_eq!(schemas.json()["$defs"].as_object().unwrap().len(), 128);
    app.stop().await;
}

/// Types whose check takes some time: it compiles many patterns.
fn slow_types() -> Vec<Value> {
    let patterns: Vec<Value> = (0..20).map(|n| json!({"pattern": format!(r"^{n}\W{{40}}")})).collect();
    (0..10).map(|n| event_type(&format!("slow.n{n}"), vec![json!({"anyOf": &patterns}); 5])).collect()
}

/// Finds out what an import would do, which checks the same versions each time.
async fn try_import(manager: &Client, event_types: &[Value]) -> Response {
    let file = json!({"event_types": event_types}).to_string();
    manager.send_text(Method::PUT, "/hub/v1/catalogue/file?dry_run=true", &file).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_has_no_connection_while_it_is_checked() {
    // One caller gets one of two connections: another request of the tenant would wait for an import that holds it.
    let Fixture { database: _database, app, manager } = Fixture::start_with(|settings| settings.pool_max = 2).await;
    let (types, is_over) = (slow_types(), AtomicBool::new(false));
    let importing = async {
        for _ in 0..3 {
            let answer = try_import(&manager, &types).await;
            assert_eq!(answer.status, 200, "{answer:?}");
        }
        is_over.store(true, Ordering::Relaxed);
    };
    let reading = async {
        let mut answers = 0;
        while !is_over.load(Ordering::Relaxed) {
            assert_eq!(manager.get("/hub/v1/subscribers").await.status, 200);
            answers += 1;
        }
        answers
    };
    let ((), answers) = tokio::join!(importing, reading);
    assert!(answers > 30, "{answers} answers during three imports of {} types", types.len());
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_checks_two_imports_at_a_time_and_a_third_is_refused_when_it_has_waited() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let other = caller(&app, "manage", "other").await;
    let types = slow_types();
    let attack = join_all((0..24).map(|_| try_import(&manager, &types)));
    let (answers, of_other) = tokio::join!(attack, try_import(&other, &types[..1]));
    assert_eq!(of_other.status, 200, "another tenant has places of its own: {of_other:?}");
    let refused: Vec<&Response> = answers.iter().filter(|answer| answer.status != 200).collect();
    assert!((1..24).contains(&refused.len()), "{} of 24 imports are refused", refused.len());
    refused.iter().for_each(|answer| answer.assert_problem(503, "overloaded"));
    let has_waited = |answer: &&Response| answer.text.contains("too many requests of this user, tenant or address");
    assert!(refused.iter().any(has_waited), "{refused:?}");
    app.stop().await;
}
