//! The example of `docs/adding-a-service.md`: it runs, and the document shows exactly the code that runs.

use std::time::Duration;

use http_kit::auth::TokenSigner;
use runtime::clock::Clock;
use runtime::secret::{MasterKey, Secret};
use serde_json::json;
use server::api::api_description;
use server::app;
use server::migrations;
use server::services::{Entry, ServiceList};
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, TestDatabase, eventually};
use tokio::net::TcpListener;
use uuid::Uuid;

#[allow(unreachable_pub, reason = "the example is written like a crate of its own")]
#[path = "../example_service/lib.rs"]
mod greetings;

static SERVICES: ServiceList = &[&Entry::<greetings::Greetings> { section: |_| () }];

const PATIENCE: Duration = Duration::from_secs(20);

#[tokio::test]
async fn the_example_service_runs() {
    let database = TestDatabase::new(&migrations().with([greetings::MIGRATIONS])).await;
    let db = database.pool();
    let settings =
        Settings { database_url: Some(Secret::new(database.url())), pool_min: 0, pool_max: 5, ..Settings::default() };
    let key = MasterKey::generate();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let options = settings.database().unwrap().unwrap();
    let running = app::start(&settings, SERVICES, listener, options, std::slice::from_ref(&key)).await.unwrap();
    let token = TokenSigner::new(&key).sign(Uuid::now_v7(), None, Clock::system().now(), PATIENCE).unwrap();
    let client = Client::new(&format!("http://{}", running.address)).bearer(&token);

    // The worker deletes an old greeting; the handler answers a new one.
    let old =
        "insert into pillarbox_greetings.greeting values (gen_random_uuid(), 'old', now() - interval '2 days', true)";
    sqlx::raw_sql(old).execute(db).await.unwrap();
    let created = client.post("/greeting/v1/greetings", json!({"name": "Ada"})).await;
    assert_eq!(created.status, 201, "{created:?}");
    eventually("the greeting is answered and the old one is deleted", PATIENCE, async || {
        let names = answered(db).await;
        if names == ["Ada"] { Ok(()) } else { Err(names) }
    })
    .await;
    let description = client.get("/openapi.json").await.json();
    assert!(description["paths"]["/greeting/v1/greetings"]["post"].is_object());
    assert!(description["paths"]["/hub/v1/events"].is_null(), "only services in the list are described");
    running.stop().await;
}

async fn answered(db: &PgPool) -> Vec<String> {
    let query = "select name from pillarbox_greetings.greeting where answered order by name";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

#[test]
fn a_service_is_described_with_its_tag() {
    let described = api_description(SERVICES);
    assert!(described.tags.unwrap().iter().any(|tag| tag.name == "greetings"));
    assert_eq!(SERVICES[0].name(), "greetings");
}

/// The document quotes every file of the example in full.
#[test]
fn the_document_shows_the_code_that_runs() {
    let document = include_str!("../../docs/adding-a-service.md");
    for (file, text) in [
        ("migration.sql", include_str!("../example_service/migration.sql")),
        ("contract.rs", include_str!("../example_service/contract.rs")),
        ("store.rs", include_str!("../example_service/store.rs")),
        ("flow.rs", include_str!("../example_service/flow.rs")),
        ("http.rs", include_str!("../example_service/http.rs")),
        ("inbox.rs", include_str!("../example_service/inbox.rs")),
        ("lib.rs", include_str!("../example_service/lib.rs")),
    ] {
        assert!(
            document.contains(&format!("\n{text}```\n")),
            "docs/adding-a-service.md does not quote {file} as it is"
        );
    }
}
