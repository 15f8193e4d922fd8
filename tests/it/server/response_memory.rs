//! The memory of responses that clients do not read is bounded for all of them together, on every route.

use std::time::Duration;

use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Pillarbox, TestApp, TestDatabase, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use uuid::Uuid;

use crate::delivery::fixture::insert_in_app;
use crate::hub::fixture::post;
use crate::hub::stream_fixture::{self, create_stream};
use crate::server::process::{ADMIN_KEY, DataFolder, run, serve};
use crate::support::caller;

const MIB: u64 = 1024 * 1024;
/// The limit of these tests. Half of it is the share of one caller.
const RESPONSE_BYTES_TOTAL_MAX: u64 = 8 * MIB;
/// How much more memory a process may allocate than before: the budget, the buffers of connections, and the memory
/// that the database and the handlers need to create the responses.
const GROWTH_MAX: u64 = 60 * MIB;
const SLOW_READERS: usize = 150;
const DEADLINE: Duration = Duration::from_secs(20);

fn start(folder: &DataFolder, database: &TestDatabase) -> Pillarbox {
    let limit = RESPONSE_BYTES_TOTAL_MAX.to_string();
    let env = [
        ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
        ("PILLARBOX_RESPONSE_BYTES_TOTAL_MAX", limit.as_str()),
        ("PILLARBOX_WRITE_TIMEOUT_MS", "600000"),
    ];
    serve(folder, database, &env)
}

/// A user with this many notifications of 200,000 bytes. Returns the user's token.
async fn user_with_inbox(process: &Pillarbox, folder: &DataFolder, db: &PgPool, count: usize) -> Client {
    let user = Uuid::now_v7();
    let mut connection = db.acquire().await.unwrap();
    for _ in 0..count {
        insert_in_app(&mut connection, user, "join.promoted", json!({"title": "x".repeat(200_000)})).await;
    }
    // The first start makes the secret key that signs the token.
    let base_url = process.base_url().await;
    let (code, token, error) = run(&["token", "--user", &user.to_string(), "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(0), "{error}");
    Client::new(&base_url).bearer(token.trim())
}

/// Sends a request over a connection with small buffers. Returns it when the first byte of the response has arrived, with the status.
async fn slow_reader(client: &Client, path: &str) -> (TcpStream, u16) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let address = client.base().trim_start_matches("http://").parse().unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let credential = client.credential();
    let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {credential}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).await.unwrap();
    let status = std::str::from_utf8(&begin[9..]).unwrap().parse().unwrap();
    (stream, status)
}

async fn slow_readers(client: &Client, path: &str, count: usize) -> Vec<(TcpStream, u16)> {
    futures_util::future::join_all((0..count).map(|_| slow_reader(client, path))).await
}

/// The memory of the process when all streams have filled their buffers: it grows no more.
async fn stable_bytes(process: &Pillarbox) -> u64 {
    let mut before = 0;
    eventually("the memory grows no more", DEADLINE, async || {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = process.allocated_bytes();
        let is_stable = now.abs_diff(std::mem::replace(&mut before, now)) < MIB / 4;
        if is_stable { Ok(now) } else { Err(now) }
    })
    .await
}

#[tokio::test]
async fn readers_that_do_not_read_large_pages_use_bounded_memory_and_other_users_go_on() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let process = start(&folder, &database);
    let (slow, other) = (
        user_with_inbox(&process, &folder, database.pool(), 20).await,
        user_with_inbox(&process, &folder, database.pool(), 20).await,
    );
    let page = async |client: &Client| client.get("/notify/v1/inbox?limit=100").await;
    let first = page(&slow).await.json();
    let is_page_of_one_mib = (5..=7).contains(&first["items"].as_array().unwrap().len());
    assert!(is_page_of_one_mib && first["next_cursor"].is_string(), "a page ends at its size");
    assert_eq!(page(&other).await.status, 200);

    let before = process.allocated_bytes();
    let open = slow_readers(&slow, "/notify/v1/inbox?limit=100", SLOW_READERS).await;
    let grown = stable_bytes(&process).await.saturating_sub(before);
    assert!(open.iter().all(|(_, status)| [200, 503].contains(status)), "{open:?}");
    assert!(grown < GROWTH_MAX, "{SLOW_READERS} slow readers occupy {} MiB", grown / MIB);
    for _ in 0..10 {
        assert_eq!(page(&other).await.status, 200, "another user is not affected");
    }
    drop(open);
    eventually("the memory of ended responses is free again", DEADLINE, async || match page(&slow).await.status {
        200 => Ok(()),
        status => Err(status),
    })
    .await;
}

#[tokio::test]
async fn streams_that_no_client_reads_use_bounded_memory() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let process = start(&folder, &database);
    let (mut users, mut open) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        users.push(user_with_inbox(&process, &folder, database.pool(), 30).await);
    }
    let before = process.allocated_bytes();
    for user in &users {
        open.extend(slow_readers(user, "/notify/v1/inbox/events?after=0", 20).await);
    }
    assert!(open.iter().all(|(_, status)| *status == 200), "the streams of five users are accepted");
    let grown = stable_bytes(&process).await.saturating_sub(before);
    assert!(grown < GROWTH_MAX, "{} streams occupy {} MiB", open.len(), grown / MIB);
}

#[tokio::test]
async fn an_export_is_made_as_it_is_read_so_slow_readers_use_bounded_memory() {
    const TYPES: usize = 5;
    const VERSIONS: usize = 20;
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let process = start(&folder, &database);
    let admin = Client::new(&process.base_url().await).bearer(ADMIN_KEY);
    // Past the API, which checks each version: only the size matters.
    let insert = "with catalogue as (
                      insert into pillarbox_hub.event_type (tenant, name, description, is_deprecated, is_enforced, newest,
                          created_at, updated_at)
                      select 'main', 'type_' || n, '', false, true, $2, now(), now() from generate_series(1, $1) n
                      returning tenant, name
                  )
                  insert into pillarbox_hub.event_type_version
                      (tenant, name, version, schema, examples, created_at, compiled_bytes)
                  select tenant, name, version, json_build_object('description', repeat('x', 60000)), '[]', now(), 0
                  from catalogue, generate_series(1, $2) version";
    sqlx::query(insert).bind(TYPES as i32).bind(VERSIONS as i32).execute(database.pool()).await.unwrap();
    let export = admin.get("/hub/v1/catalogue/file").await;
    assert_eq!(export.status, 200);
    let types = export.json()["event_types"].as_array().unwrap().clone();
    let versions = |event_type: &Value| event_type["versions"].as_array().unwrap().len();
    assert_eq!(types.iter().map(versions).collect::<Vec<_>>(), [VERSIONS; TYPES]);

    let before = process.allocated_bytes();
    let open = slow_readers(&admin, "/hub/v1/catalogue/file", 40).await;
    let grown = stable_bytes(&process).await.saturating_sub(before);
    assert!(grown < GROWTH_MAX, "{} exports occupy {} MiB", open.len(), grown / MIB);
}

#[tokio::test]
async fn no_route_sends_a_large_response_that_the_budget_does_not_have() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| settings.response_bytes_total_max = 1).await;
    let (code, description, _) = run(&["openapi"], &[]);
    assert_eq!(code, Some(0));
    let description: Value = serde_json::from_str(&description).unwrap();
    let routes = description["paths"].as_object().unwrap().iter();
    let routes = routes.filter(|(path, methods)| methods.get("get").is_some() && !path.contains('{'));
    let mut refused = Vec::new();
    // The last ones are not described.
    for path in routes.map(|(path, _)| path.as_str()).chain(["/docs", "/docs/swagger-ui-bundle.js", "/console/"]) {
        if path.ends_with("/events") && path.starts_with("/notify/v1/inbox") {
            continue; // A stream.
        }
        // All requests share these bytes.
        let is_shared = path == "/openapi.json" || path.starts_with("/docs");
        for client in [app.admin(), app.user(Uuid::now_v7(), None), app.anonymous()] {
            // A stream without a known size breaks off instead.
            let Ok(answer) = client.try_send(hyper::Method::GET, path, None).await else {
                refused.push(path.to_owned());
                continue;
            };
            assert!(is_shared || answer.text.len() <= 8_192, "{path}: {} bytes", answer.text.len());
            if answer.status == 503 {
                answer.assert_problem(503, "overloaded");
                refused.push(path.to_owned());
            }
        }
    }
    assert!(refused.iter().any(|refused| refused == "/metrics"), "{refused:?}");

    // A route with a parameter, and one that is not read with GET.
    let manager = caller(&app, "manage", "acme").await;
    create_stream(&manager, json!({})).await;
    let large = json!("x".repeat(20_000));
    let event_type = json!({"name": "order.paid", "description": large.as_str().map(|text| &text[..9_000])});
    manager.post("/hub/v1/event-types", event_type).await.assert_problem(503, "overloaded");
    manager.get("/hub/v1/event-types/order.paid").await.assert_problem(503, "overloaded");
    post(&manager, "order.paid", large, None).await;
    let pull = json!({"reader": "one"});
    let pulled = eventually("the stream has the event", DEADLINE, async || {
        match stream_fixture::send(&manager, "pull", pull.clone()).await {
            empty if empty.status == 200 && empty.text.len() <= 8_192 => Err(empty),
            pulled => Ok(pulled),
        }
    })
    .await;
    pulled.assert_problem(503, "overloaded");
    app.stop().await;
}
