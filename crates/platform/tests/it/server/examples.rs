//! "Try it out" in `/docs` works as prefilled: every operation of the OpenAPI description accepts its example.

use std::collections::BTreeSet;

use hyper::Method;
use mailbox::database::migrations;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Client, Receiver, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::hub::fixture::{post, subscribe};
use crate::hub::rows::{insert_dead_letter, insert_event};
use crate::identity::examples::prepare as prepare_identity;
use crate::identity::fixture::unlimited;
use crate::joins::fixture::{moderate, new_event, post_event_update, post_join_action, wait_until_known};
use crate::server::api::operations;
use crate::support::{DEADLINE, text, uuid_of};

/// Creates what an operation needs.
struct Preparation<'a> {
    app: &'a TestApp,
    db: &'a PgPool,
    receiver: &'a Receiver,
    user: Uuid,
}

#[tokio::test]
async fn every_operation_accepts_its_example() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, unlimited).await;
    let receiver = Receiver::start().await;
    let description = app.anonymous().get("/openapi.json").await.json();
    insert_unused_consumer(database.pool()).await;
    let mut refused = Vec::new();
    for (method, path, operation) in operations(&app.anonymous()).await {
        let preparation = Preparation { app: &app, db: database.pool(), receiver: &receiver, user: Uuid::now_v7() };
        let body = example_of(&description, &operation).map(|mut body| {
            // A test sends nothing to other machines.
            if body.get("url").is_some() {
                body["url"] = receiver.url().into();
            }
            body
        });
        let (client, filled) = preparation.prepare(&method, &path, body.as_ref()).await;
        let client = parameters(&operation, "header").iter().fold(client, |client, parameter| {
            let example = parameter["example"].as_str();
            example.map_or(client.clone(), |example| client.with_header(text(&parameter["name"]), example))
        });
        let response = client.send(method.clone(), &filled, body).await;
        if !(200..300).contains(&response.status) {
            refused.push(format!("{method} {path}: {} {}", response.status, response.text));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    app.stop().await;
}

fn parameters<'o>(operation: &'o Value, part: &str) -> Vec<&'o Value> {
    operation["parameters"].as_array().into_iter().flatten().filter(|parameter| parameter["in"] == part).collect()
}

/// The example of the request body, as `/docs` shows it. Fails if there is a body without an example.
fn example_of(description: &Value, operation: &Value) -> Option<Value> {
    let content = operation["requestBody"]["content"].get("application/json")?;
    let schema = content["schema"]["$ref"].as_str().and_then(|path| description.pointer(path.trim_start_matches('#')));
    let example = content.get("example").or_else(|| schema?.get("example"));
    Some(example.unwrap_or_else(|| panic!("no example: {}", operation["operationId"])).clone())
}

impl Preparation<'_> {
    /// Returns a caller who may call the operation, and its path with the ids of existing resources.
    async fn prepare(&self, method: &Method, path: &str, body: Option<&Value>) -> (Client, String) {
        let with = |id: &dyn std::fmt::Display| {
            let part = |part: &str| if part.starts_with('{') { id.to_string() } else { part.to_owned() };
            path.split('/').map(part).collect::<Vec<_>>().join("/")
        };
        let admin = self.app.admin();
        match path {
            "/hub/v1/messages" => {
                let subscriber = subscribe(&admin, &self.receiver.url(), json!({})).await;
                (admin, format!("{path}?subscriber_id={}", text(&subscriber["id"])))
            }
            path if path.starts_with("/identity/") || path.starts_with("/.well-known/") => {
                prepare_identity(self.app, self.db, path).await
            }
            "/event/v1/audit" | "/join/v1/audit" => (admin, path.to_owned()),
            path if path.starts_with("/event/v1/") => {
                let id = self.event(path).await;
                (self.app.user(self.user, None), with(&id))
            }
            "/join/v1/me/joins" => (self.app.user(self.user, None), path.to_owned()),
            path if path.starts_with("/join/v1/events/") => {
                let (client, id) = self.registration(path, body).await;
                (client, with(&id))
            }
            path if path.starts_with("/hub/v1/") => {
                let id = self.of_hub(path).await;
                (admin, with(&id))
            }
            path => {
                let id = self.of_operator(method, path).await;
                (admin, with(&id))
            }
        }
    }

    async fn event(&self, path: &str) -> Uuid {
        let owner = self.app.user(self.user, None);
        let times = json!({"start_time": "2035-03-01T18:00:00Z", "end_time": "2035-03-01T21:00:00Z"});
        let made = owner.post("/event/v1/events", crate::events::fixture::meetup_with(times)).await;
        let id = uuid_of(&made.json()["id"]);
        if path.ends_with("/unpublish") {
            let published = owner.send(Method::POST, &format!("/event/v1/events/{id}/publish"), None).await;
            assert_eq!(published.status, 200, "{published:?}");
        }
        id
    }

    /// A published event with the registrations that the route needs. The user is its owner and has joined it.
    async fn registration(&self, path: &str, body: Option<&Value>) -> (Client, Uuid) {
        let event = new_event(self.user, 5);
        post_event_update(self.db, &event).await;
        wait_until_known(self.db, &event).await;
        let owner = self.app.user(self.user, None);
        if !path.ends_with("/join") {
            assert_eq!(post_join_action(&owner, event.event_id, "join").await.status, 201);
        }
        if let Some(body) = body {
            let member = self.app.user(uuid_of(&body["user_id"]), None);
            assert_eq!(post_join_action(&member, event.event_id, "join").await.status, 201);
        }
        if path.ends_with("/unban") {
            let banned = moderate(&owner, event.event_id, "ban", body.unwrap().clone()).await;
            assert_eq!(banned.status, 200, "{banned:?}");
        }
        (owner, event.event_id)
    }

    async fn of_hub(&self, path: &str) -> String {
        let admin = self.app.admin();
        let subscriber = subscribe(&admin, &self.receiver.url(), json!({})).await;
        let id = text(&subscriber["id"]).to_owned();
        if path.starts_with("/hub/v1/subscribers/") {
            return id;
        }
        if path.starts_with("/hub/v1/dead-letters/") {
            let event = insert_event(self.db, "main", "order.paid", "{}").await;
            let subscriber = uuid_of(&subscriber["id"]);
            return insert_dead_letter(self.db, "main", subscriber, 1, (event, "order.paid"), "gone").await.to_string();
        }
        // A paused subscriber: its message is still pending.
        admin.send(Method::POST, &format!("/hub/v1/subscribers/{id}/pause"), None).await;
        let event = post(&admin, "order.paid", json!({}), None).await;
        if path.starts_with("/hub/v1/events") {
            return event;
        }
        let message = format!("{}.{id}", event.trim_start_matches("evt_"));
        eventually("the message exists", DEADLINE, async || {
            admin.get(&format!("/hub/v1/messages/{message}")).await.status == 200
        })
        .await;
        message
    }

    async fn of_operator(&self, method: &Method, path: &str) -> String {
        let admin = self.app.admin();
        match path {
            "/admin/v1/keys/{id}" => {
                let made = admin.post("/admin/v1/keys", json!({"name": "test", "role": "ingest"})).await;
                text(&made.json()["id"]).to_owned()
            }
            "/admin/v1/log/{event_id}" => post(&admin, "order.paid", json!({}), None).await,
            "/admin/v1/consumers/{name}" if method == Method::DELETE => "unused".to_owned(),
            path if path.starts_with("/admin/v1/consumers/") => "joins.events".to_owned(),
            path if path.starts_with("/admin/v1/parked/") => insert_failed(self.db, "parked", "").await,
            path if path.starts_with("/admin/v1/dead-letters/{id}") => {
                insert_failed(self.db, "dead_letter", ", last_error").await
            }
            "/admin/v1/mail/{id}/retry" => insert_dead_email(self.db).await,
            "/admin/v1/replays/{id}" => {
                let replay = json!({"consumer": "joins.events", "from": "2026-01-01T00:00:00Z"});
                admin.post("/admin/v1/replays", replay).await.json()["id"].to_string()
            }
            _ => String::new(),
        }
    }
}

/// A consumer that no process runs.
async fn insert_unused_consumer(db: &PgPool) {
    let insert = "insert into pillarbox.cursor (consumer, kind, included) values ('unused', 'handler', '^old '),
                  ('failing', 'handler', '^old ')";
    sqlx::query(insert).execute(db).await.unwrap();
}

/// Inserts a message that failed. Returns its number.
async fn insert_failed(db: &PgPool, table: &str, column: &str) -> String {
    let value = if column.is_empty() { "" } else { ", 'x'" };
    let insert = format!(
        "insert into pillarbox.{table} (consumer, shard, run, attempts, log_id, message_id, source, tenant, topic, headers,
                                        payload, at{column})
         select 'failing', 0, 0, 1, 1, gen_random_uuid(), 'old', 'main', 'test.old', '{{}}', '1', now(){value} returning id"
    );
    let id: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(insert)).fetch_one(db).await.unwrap();
    id.to_string()
}

/// Inserts an e-mail that was given up. Returns its id.
async fn insert_dead_email(db: &PgPool) -> String {
    let insert = "insert into pillarbox_notify.mail (message_id, source, idempotency_key, recipient, template, locale, subject,
                      text, html, status, next_attempt_at, give_up_at, created_at)
                  select id, 'identity', id, 'ada@example.org', 'verification', 'en', 's', 't', 'h', 'dead', now(), now(), now()
                  from gen_random_uuid() as new (id) returning mail.id";
    let id: i64 = sqlx::query_scalar(insert).fetch_one(db).await.unwrap();
    id.to_string()
}

#[tokio::test]
async fn the_form_of_an_operation_is_prefilled_with_what_it_needs_only() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let description = app.anonymous().get("/openapi.json").await.json();
    let mut statuses = BTreeSet::new();
    for (method, path, operation) in operations(&app.anonymous()).await {
        let what = format!("{method} {path}");
        example_of(&description, &operation);
        for parameter in parameters(&operation, "query") {
            let prefilled = [&parameter["example"], &parameter["schema"]["example"], &parameter["examples"]];
            assert!(prefilled.iter().all(|example| example.is_null()), "{what}: {parameter}");
            assert!(parameter["schema"]["$ref"].is_null(), "{what}: its schema may have an example: {parameter}");
        }
        for (status, response) in operation["responses"].as_object().unwrap() {
            let Some(problem) = response["content"].get("application/problem+json") else { continue };
            let examples = problem["examples"].as_object().unwrap_or_else(|| panic!("{what} {status}: no example"));
            for (code, example) in examples {
                assert_eq!(example["value"]["status"].to_string(), *status, "{what} {code}");
                assert_eq!(example["value"]["type"], format!("urn:pillarbox:problem:{code}"), "{what} {status}");
                statuses.insert(status.clone());
            }
        }
    }
    for status in ["400", "401", "403", "404", "408", "409", "412", "413", "415", "422", "429", "500", "503"] {
        assert!(statuses.contains(status), "{status} is not documented");
    }
    let mut required = 0;
    for (name, schema) in description["components"]["schemas"].as_object().unwrap() {
        for field in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let declared = schema["properties"][field].to_string();
            assert!(!declared.contains("\"null\""), "{name}.{field} is required and may be null: {declared}");
            required += 1;
        }
    }
    assert!(required > 100, "only {required} required fields were checked");
    app.stop().await;
}
