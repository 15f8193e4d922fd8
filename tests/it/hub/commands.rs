//! `pillarbox event-types` and `pillarbox streams`.

use serde_json::{Value, json};
use testkit::TestApp;

use crate::hub::fixture::{Fixture, post, post_batch};
use crate::hub::stream_fixture::{create_stream, numbers, pull, pull_count};
use crate::server::process::{DataFolder, run};

/// Runs a command for the tenant `acme`.
fn command(app: &TestApp, args: &[&str]) -> (Option<i32>, String, String) {
    command_of(app, "acme", args)
}

fn command_of(app: &TestApp, tenant: &str, args: &[&str]) -> (Option<i32>, String, String) {
    let admin = app.admin();
    run(&[args, &["--tenant", tenant, "--server", admin.base()]].concat(), &[("PILLARBOX_API_KEY", admin.credential())])
}

/// Runs a command that succeeds. Returns what it prints.
fn output(app: &TestApp, args: &[&str]) -> String {
    let (code, output, error) = command(app, args);
    assert_eq!(code, Some(0), "{args:?}: {error}");
    output
}

/// Runs a command that fails. Returns its error.
fn error(app: &TestApp, args: &[&str]) -> String {
    let (code, _, error) = command(app, args);
    assert_eq!(code, Some(1), "{args:?}");
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn event_types_are_listed_shown_imported_and_exported_by_command() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let folder = DataFolder::new();
    let path = format!("{}/catalogue.json", folder.text());
    let import = |file: &Value, options: &[&str]| {
        std::fs::create_dir_all(folder.text()).unwrap();
        std::fs::write(&path, file.to_string()).unwrap();
        command(&app, &[&["event-types", "import", &path], options].concat())
    };
    let version = |number: u32, schema: Value| json!({"version": number, "schema": schema, "examples": [{"id": 1}]});
    let file = |versions: Value| json!({"event_types": [{"name": "order.paid", "description": "An order was paid.", "versions": versions}]});
    let first = version(1, json!({"type": "object", "properties": {"id": {"type": "integer"}}}));
    let narrower = version(2, json!({"type": "object", "properties": {"id": {"type": "integer", "minimum": 1}}}));

    let (code, planned, _) = import(&file(json!([first])), &["--dry-run"]);
    assert!(code == Some(0) && planned.contains("Created order.paid.") && planned.contains("dry run"), "{planned}");
    assert_eq!(output(&app, &["event-types", "list", "--json"]), "");
    let (code, imported, failed) = import(&file(json!([first])), &[]);
    assert!(code == Some(0) && imported.contains("Created order.paid."), "{imported}{failed}");
    let refused = json!({"event_type": "order.paid", "payload": {"id": "x"}});
    assert_eq!(manager.post("/hub/v1/events", refused).await.status, 422, "it holds when the command returns");
    let (code, _, failed) = import(&file(json!([first, narrower])), &[]);
    assert!(code == Some(1) && failed.contains("event_types/0/versions/1/schema/properties/id/minimum"), "{failed}");
    let (code, forced, _) = import(&file(json!([first, narrower])), &["--force"]);
    assert!(code == Some(0) && forced.contains("Changed order.paid.") && forced.contains("may break"), "{forced}");

    let listed = output(&app, &["event-types", "list"]);
    assert!(listed.contains("order.paid") && listed.contains("enforced") && listed.contains("was paid"), "{listed}");
    let shown: Value = serde_json::from_str(&output(&app, &["event-types", "show", "order.paid"])).unwrap();
    assert_eq!(shown["versions"].as_array().unwrap().len(), 2, "{shown}");
    assert!(error(&app, &["event-types", "show", "order.sent"]).contains("there is no such event type"));
    let exported = output(&app, &["event-types", "export"]);
    let over_http = manager.get("/hub/v1/catalogue/file").await;
    assert_eq!(exported.trim_end(), over_http.text, "the same file as over HTTP");
    let (code, again, _) = import(&serde_json::from_str(&exported).unwrap(), &[]);
    assert!(code == Some(0) && again.contains("1 event type is unchanged"), "{again}");
    let (code, removed, _) = import(&json!({"event_types": []}), &["--remove-others"]);
    assert!(code == Some(0) && removed.contains("Removed order.paid."), "{removed}");
    let (code, _, failed) = import(&json!({"event_typos": []}), &[]);
    assert!(code == Some(1) && failed.contains("event_typos"), "{failed}");
    let (_, _, failed) = command_of(&app, "acne", &["event-types", "list"]);
    assert!(failed.contains("there is no tenant `acne`"), "{failed}");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_listed_shown_moved_and_deleted_by_command() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    let numbered = |n: u32| json!({"event_type": "order.paid", "payload": {"n": n}, "ordering_key": "key"});
    let ids = post_batch(&manager, (1..=5).map(numbered).collect()).await;
    pull_count(&manager, "a", 5).await;
    let listed = output(&app, &["streams", "list"]);
    let row: Vec<&str> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    assert!(row[0] == "orders" && row[1] == "5" && row[3..] == ["16/16", "0"], "{listed}");
    let lines = output(&app, &["streams", "list", "--json"]);
    let shown: Value = serde_json::from_str(&output(&app, &["streams", "show", "orders"])).unwrap();
    assert_eq!((lines.lines().count(), &shown["readers"][0]["reader"]), (1, &json!("a")), "{shown}");

    assert!(error(&app, &["streams", "seek", "orders", "--newest"]).contains("the reader `a` has a lease"));
    let moved = output(&app, &["streams", "seek", "orders", "--event", &ids[2], "--force"]);
    assert!(moved.contains("2 messages wait"), "{moved}");
    assert_eq!(numbers(&pull(&manager, json!({"reader": "a"})).await), [4, 5]);
    output(&app, &["streams", "seek", "orders", "--time", "1h", "--force"]);
    assert_eq!(numbers(&pull(&manager, json!({"reader": "a"})).await), [1, 2, 3, 4, 5]);
    output(&app, &["streams", "seek", "orders", "--newest", "--force"]);
    post(&manager, "order.paid", json!({"n": 6}), Some("key")).await;
    assert_eq!(numbers(&pull(&manager, json!({"reader": "a", "wait_ms": 10_000})).await), [6]);
    assert_eq!(command(&app, &["streams", "seek", "orders"]).0, Some(2), "a target is required");

    assert!(output(&app, &["streams", "delete", "orders"]).contains("Deleted the stream orders."));
    assert!(error(&app, &["streams", "show", "orders"]).contains("there is no such stream"));
    assert_eq!(manager.get("/hub/v1/streams/orders").await.status, 404);
    app.stop().await;
}
