//! "Try it out" in `/docs` works as prefilled: every operation of the OpenAPI description accepts its example.

use std::collections::BTreeSet;

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Receiver, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::delivery::fixture::{insert_due, insert_in_app, insert_person, set_event_type, wait_for_state};
use crate::hub::fixture::{post, post_batch, subscribe};
use crate::hub::rows::{insert_dead_letter, insert_event};
use crate::identity::examples::prepare as prepare_identity;
use crate::identity::fixture::unlimited;
use crate::joins::fixture::{moderate, new_event, post_event_update, post_join_action, wait_until_known};
use crate::progress::fixture::prepare as prepare_project;
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
    let app = TestApp::start_with(&database, |settings| {
        unlimited(settings);
        settings.public_url = Some("https://pillarbox.example".to_owned());
    })
    .await;
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
        // A stream does not end; its own tests read it.
        if !operation["responses"]["200"]["content"]["text/event-stream"].is_null() {
            continue;
        }
        let (client, filled) = preparation.prepare(&method, &path, body.as_ref()).await;
        let body = match path.as_str() {
            "/hub/v1/streams/{name}/acknowledge" => Some(preparation.acknowledgement(&filled).await),
            _ => body,
        };
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
            path if path.starts_with("/progress/v1/") => {
                let user = self.app.user(self.user, None);
                let id = prepare_project(&user, self.db, path).await;
                (user, with(&id))
            }
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
            "/notify/v1/aggregate-types/{name}" => {
                let made = admin.post("/notify/v1/aggregate-types", json!({"name": "FLEET"})).await;
                assert_eq!(made.status, 201, "{made:?}");
                (admin, with(&"FLEET"))
            }
            "/notify/v1/recipients/{aggregate_type}/{aggregate}/{user_id}" => {
                (admin, format!("/notify/v1/recipients/RESTAURANT/5/{}", self.user))
            }
            "/notify/v1/events"
            | "/notify/v1/aggregate-types"
            | "/notify/v1/recipients"
            | "/notify/v1/recipients/import" => (admin, path.to_owned()),
            path if path.starts_with("/notify/v1/") => self.of_notify(path, with(&"order.paid")).await,
            path => {
                let id = self.of_operator(method, path).await;
                (admin, with(&id))
            }
        }
    }

    async fn event(&self, path: &str) -> Uuid {
        let is_offered = path.ends_with("/handover/accept");
        let owner = self.app.user(if is_offered { Uuid::now_v7() } else { self.user }, None);
        let times = json!({"start_time": "2035-03-01T18:00:00Z", "end_time": "2035-03-01T21:00:00Z"});
        let made = owner.post("/event/v1/events", crate::events::fixture::meetup_with(times)).await;
        let id = uuid_of(&made.json()["id"]);
        if path.ends_with("/unpublish") {
            let published = owner.send(Method::POST, &format!("/event/v1/events/{id}/publish"), None).await;
            assert_eq!(published.status, 200, "{published:?}");
        }
        if is_offered {
            let offered = owner.post(&format!("/event/v1/events/{id}/handover"), json!({"user_id": self.user})).await;
            assert_eq!(offered.status, 204, "{offered:?}");
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

    /// `named`: the path with the name of an event type.
    async fn of_notify(&self, path: &str, named: String) -> (Client, String) {
        let (admin, user) = (self.app.admin(), self.app.user(self.user, None));
        if path.starts_with("/notify/v1/event-types/") {
            set_event_type(self.app, "order.paid", json!({})).await;
            return (admin, named);
        }
        if path == "/notify/v1/unsubscribe" {
            return (self.app.anonymous(), unsubscribe_path(self.app, self.db).await);
        }
        let mut db = self.db.acquire().await.unwrap();
        let seq = insert_in_app(&mut db, self.user, "order.paid", json!({})).await;
        (user, path.replace("{seq}", &seq.to_string()))
    }

    /// A new tenant in the state that the route needs.
    async fn tenant(&self, method: &Method, path: &str) -> String {
        let (admin, name) = (self.app.admin(), format!("t-{}", Uuid::now_v7()));
        assert_eq!(admin.post("/admin/v1/tenants", json!({"name": name})).await.status, 201);
        if method == Method::DELETE || path.ends_with("/resume") {
            let suspended = admin.send(Method::POST, &format!("/admin/v1/tenants/{name}/suspend"), None).await;
            assert_eq!(suspended.status, 200, "{suspended:?}");
        }
        name
    }

    /// A body with a cursor that the server has returned.
    async fn acknowledgement(&self, path: &str) -> Value {
        let pulled = self.app.admin().post(&path.replace("acknowledge", "pull"), json!({"reader": "worker-1"})).await;
        json!({"reader": "worker-1", "cursor": pulled.json()["cursor"]})
    }

    async fn of_hub(&self, path: &str) -> String {
        let admin = self.app.admin();
        if path == "/hub/v1/portal-tokens/{id}" {
            let made = admin.post("/hub/v1/portal-tokens", json!({"access": "read"})).await.json();
            return text(&made["id"]).to_owned();
        }
        if path.starts_with("/hub/v1/streams/") {
            let name = format!("stream-{}", Uuid::now_v7());
            let made = admin.post("/hub/v1/streams", json!({"name": name, "event_types": ["order.*"]})).await;
            assert_eq!(made.status, 201, "{made:?}");
            return name;
        }
        let subscriber = subscribe(&admin, &self.receiver.url(), json!({})).await;
        let id = text(&subscriber["id"]).to_owned();
        if path.starts_with("/hub/v1/subscribers/") {
            return id;
        }
        if path.starts_with("/hub/v1/event-types/") {
            let name = format!("example.{}", uuid_of(&subscriber["id"]).simple());
            let made = admin.post("/hub/v1/event-types", json!({"name": name})).await;
            assert_eq!(made.status, 201, "{made:?}");
            return name;
        }
        if path.starts_with("/hub/v1/replays/") {
            // Slow enough to be active.
            let events = (0..5).map(|_| json!({"event_type": "order.paid", "payload": {}})).collect();
            post_batch(&admin, events).await;
            let from = (chrono::Utc::now() - chrono::TimeDelta::hours(1)).to_rfc3339();
            let body = json!({"subscriber_id": id, "from": from, "rate_per_second": 1});
            let made = admin.post("/hub/v1/replays", body).await;
            assert_eq!(made.status, 202, "{made:?}");
            return text(&made.json()["id"]).to_owned();
        }
        if path.starts_with("/hub/v1/dead-letters/") {
            let event = insert_event(self.db, "main", "order.paid", "{}").await;
            let subscriber = uuid_of(&subscriber["id"]);
            return insert_dead_letter(self.db, "main", subscriber, 1, (event, "order.paid"), "gone").await.to_string();
        }
        if path == "/hub/v1/events/{id}/retry" {
            return insert_rejected_event(self.db).await;
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
            path if path.starts_with("/admin/v1/tenants/{tenant}") => self.tenant(method, path).await,
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
            "/admin/v1/mail/{id}" | "/admin/v1/mail/{id}/retry" => insert_dead_email(self.db).await,
            "/admin/v1/notifications/{id}/retry" => insert_dead_notification(self.db).await,
            "/admin/v1/announcements/{id}/retry" => insert_announcement_given_up(self.db).await,
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

/// Inserts an event that was rejected. Returns its id.
async fn insert_rejected_event(db: &PgPool) -> String {
    let event = insert_event(db, "main", "order.paid", "{}").await;
    let insert = "insert into pillarbox_hub.rejected_event
                      (log_id, log_shard, log_at, tenant, message_id, event_type, errors, rejected_at)
                  select id, shard, at, tenant, message_id, topic, '[]', now() from pillarbox.log where id = $1";
    sqlx::query(insert).bind(event.log_id).execute(db).await.unwrap();
    format!("evt_{}", event.id)
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

/// Inserts a notification that was given up. Returns its id.
async fn insert_dead_notification(db: &PgPool) -> String {
    let insert = "insert into pillarbox_notify.notification (event_id, user_id, channel, status, created_at)
                  values (gen_random_uuid(), gen_random_uuid(), 'email', 'dead', now()) returning id";
    sqlx::query_scalar::<_, i64>(insert).fetch_one(db).await.unwrap().to_string()
}

/// Inserts an announcement that was given up. Returns its id.
async fn insert_announcement_given_up(db: &PgPool) -> String {
    let insert = "insert into pillarbox_notify.announcement (business_event, aggregate_type, aggregate_id, subject)
                  values (gen_random_uuid(), 'AGENCY', 1, 'AGENCY:1') returning id";
    sqlx::query_scalar::<_, i64>(insert).fetch_one(db).await.unwrap().to_string()
}

/// The link of an e-mail, which is the only way to get one.
async fn unsubscribe_path(app: &TestApp, db: &PgPool) -> String {
    let user = insert_person(db, "ada@example.org").await;
    let id = insert_due(db, user, "email", "order.paid", 0).await;
    wait_for_state(db, id, "delivered").await;
    let query = "select unsubscribe from pillarbox_notify.mail where user_id = $1";
    let link: String = sqlx::query_scalar(query).bind(user).fetch_one(db).await.unwrap();
    link.strip_prefix(app.settings.public_url.as_deref().unwrap()).unwrap().to_owned()
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
