//! Every route of the hub for callers who must not see a tenant, and for those who may only read it. The routes are those of the
//! OpenAPI document, so that a new one cannot be forgotten.

use chrono::{TimeDelta, Utc};
use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, Receiver, Reply, TestApp, eventually};
use uuid::Uuid;

use crate::hub::fixture::{Fixture, post, subscribe, wait_for_dead_letters, wait_for_outcome};
use crate::server::api::operations;
use crate::support::{DEADLINE, caller, text};

/// In the names of everything that the tenant has.
const MARKS: [&str; 2] = ["secret_of_acme", "secret-of-acme"];
const EVENT_TYPE: &str = "order.secret_of_acme";
const STREAM: &str = "secret-of-acme";
/// The responses of these routes to the owner change with time, or show numbers only.
const WITHOUT_MARKS: [&str; 4] =
    ["/hub/v1/subscribers/{id}/health", "/hub/v1/messages/{id}/attempts", "/hub/v1/catalogue", "/hub/v1/caller"];
const CHANGES_WITH_TIME: [&str; 2] = ["/hub/v1/subscribers/{id}/health", "/hub/v1/streams/{name}"];

pub(super) async fn portal(app: &TestApp, manager: &Client, access: &str) -> Client {
    let made = manager.post("/hub/v1/portal-tokens", json!({"access": access})).await;
    assert_eq!(made.status, 201, "{made:?}");
    app.anonymous().bearer(text(&made.json()["token"]))
}

/// The resources of a tenant in the hub: the ids for the paths of the routes.
pub(super) struct Resources {
    subscriber: String,
    message: String,
    dead_letter: String,
    event: String,
    token: String,
    replay: String,
}

impl Resources {
    pub(super) async fn create(manager: &Client) -> Resources {
        let receiver = Receiver::with_reply(|_| Reply::status(400)).await;
        let create = async |path: &str, body: Value| {
            let made = manager.post(path, body).await;
            assert!((200..300).contains(&made.status), "{made:?}");
            made.json()
        };
        create("/hub/v1/event-types", json!({"name": EVENT_TYPE, "examples": [{"of": STREAM}]})).await;
        create("/hub/v1/streams", json!({"name": STREAM, "event_types": [EVENT_TYPE]})).await;
        let subscriber = subscribe(manager, &receiver.url(), json!({"name": STREAM})).await;
        let event = post(manager, EVENT_TYPE, json!({}), None).await;
        let outcome = wait_for_outcome(manager, &event, &subscriber, "dead").await;
        let dead = wait_for_dead_letters(manager, &subscriber, 1).await;
        let token = create("/hub/v1/portal-tokens", json!({"access": "read", "name": STREAM})).await;
        let (from, to) = (Utc::now() - TimeDelta::hours(2), Utc::now() - TimeDelta::hours(1));
        let (from, to, id) = (from.to_rfc3339(), to.to_rfc3339(), &subscriber["id"]);
        let replay = json!({"subscriber_id": id, "from": from, "to": to, "event_types": [EVENT_TYPE]});
        let replay = text(&create("/hub/v1/replays", replay).await["id"]).to_owned();
        eventually("the replay ends", DEADLINE, async || {
            manager.get(&format!("/hub/v1/replays/{replay}")).await.json()["state"] == "finished"
        })
        .await;
        Resources {
            subscriber: text(&subscriber["id"]).to_owned(),
            message: text(&outcome["message_id"]).to_owned(),
            dead_letter: text(&dead[0]["id"]).to_owned(),
            token: text(&token["id"]).to_owned(),
            event,
            replay,
        }
    }

    /// The path of a route with the ids of these resources. Fails for a route whose kind of id is not known here.
    pub(super) fn path(&self, path: &str) -> String {
        let id: &str = match path.split('/').nth(3) {
            _ if !path.contains('{') => "",
            Some("subscribers") => &self.subscriber,
            Some("messages") => &self.message,
            Some("dead-letters") => &self.dead_letter,
            Some("portal-tokens") => &self.token,
            Some("replays") => &self.replay,
            Some("streams") => STREAM,
            Some("event-types") => EVENT_TYPE,
            Some("events") => &self.event,
            _ => panic!("{path}: add what it shows to `Resources`"),
        };
        let part = |part: &str| if part.starts_with('{') { id.to_owned() } else { part.to_owned() };
        path.split('/').map(part).collect::<Vec<_>>().join("/")
    }

    /// Texts that a response to another caller must not contain.
    fn texts(&self) -> Vec<&str> {
        let Resources { subscriber, message, dead_letter, event, token, replay } = self;
        let ids = [subscriber, message, dead_letter, event, token, replay];
        MARKS.into_iter().chain(ids.map(String::as_str)).collect()
    }
}

/// An operation of the hub, with a request that names the resources of a tenant wherever it can.
struct Operation {
    method: Method,
    route: String,
    path: String,
    body: Option<Value>,
}

async fn hub_operations(app: &TestApp, resources: &Resources, url: &str) -> Vec<Operation> {
    let description = app.anonymous().get("/openapi.json").await.json();
    let all = operations(&app.anonymous()).await.into_iter();
    let of_hub = all.filter(|(_, path, _)| path == "/events" || path.starts_with("/hub/v1/"));
    let operation = |(method, route, operation): (Method, String, Value)| {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        let pointer = schema.as_str().map(|reference| reference.trim_start_matches('#').to_owned());
        let mut body = pointer.and_then(|pointer| description.pointer(&format!("{pointer}/example")).cloned());
        match (&method, route.as_str(), &mut body) {
            // A test sends nothing to other machines.
            (_, _, Some(body)) if body.get("url").is_some() => body["url"] = url.into(),
            (&Method::POST, "/hub/v1/replays", Some(body)) => body["subscriber_id"] = json!(resources.subscriber),
            _ => {}
        }
        let names_subscriber = |parameter: &Value| parameter["name"] == "subscriber_id";
        let mut path = resources.path(&route);
        if operation["parameters"].as_array().is_some_and(|all| all.iter().any(names_subscriber)) {
            path = format!("{path}?subscriber_id={}", resources.subscriber);
        }
        Operation { method, route, path, body }
    };
    let operations: Vec<Operation> = of_hub.map(operation).collect();
    assert!(operations.len() > 50, "{}", operations.len());
    operations
}

/// Everything that the owner reads, by route.
async fn view(manager: &Client, operations: &[Operation]) -> Vec<(String, String)> {
    let mut view = Vec::new();
    for operation in operations.iter().filter(|operation| operation.method == Method::GET) {
        let answer = manager.get(&operation.path).await;
        assert_eq!(answer.status, 200, "{}: {answer:?}", operation.route);
        if !CHANGES_WITH_TIME.contains(&operation.route.as_str()) {
            view.push((operation.route.clone(), answer.text));
        }
    }
    view
}

#[tokio::test(flavor = "multi_thread")]
async fn no_route_shows_or_changes_anything_of_another_tenant() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let (resources, receiver) = (Resources::create(&manager).await, Receiver::start().await);
    let operations = hub_operations(&app, &resources, &receiver.url()).await;
    let before = view(&manager, &operations).await;
    for (route, answer) in &before {
        let is_shown = resources.texts().iter().any(|text| answer.contains(text));
        assert!(is_shown || WITHOUT_MARKS.contains(&route.as_str()), "{route} shows nothing to the owner: {answer}");
    }
    let rival = caller(&app, "manage", "rival").await;
    let strangers = [
        ("a read token", portal(&app, &rival, "read").await),
        ("a manage token", portal(&app, &rival, "manage").await),
        ("an ingest key", caller(&app, "ingest", "rival").await),
        ("an admin key", caller(&app, "admin", "rival").await),
        ("an operator without the header", app.admin()),
        ("a user", app.user(Uuid::now_v7(), None)),
        ("an anonymous caller", app.anonymous()),
    ];
    for (who, stranger) in &strangers {
        for Operation { method, route, path, body } in &operations {
            let answer = stranger.send(method.clone(), path, body.clone()).await;
            let what = format!("{who}: {method} {route}: {} {}", answer.status, answer.text);
            assert!(answer.status < 500, "{what}");
            for text in resources.texts() {
                assert!(!answer.text.contains(text), "{what} contains {text}");
            }
            assert!(!route.contains('{') || [401, 403, 404].contains(&answer.status), "{what}");
            assert!(*who != "an anonymous caller" || answer.status == 401, "{what}");
            assert!(*who != "a user" || answer.status == 403, "{what}");
        }
    }
    let named = json!({"event_ids": [resources.event]});
    rival.post("/hub/v1/replays", named).await.assert_problem(404, "event-not-found");
    assert_eq!(view(&manager, &operations).await, before, "nothing has changed");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_token_reads_every_route_of_its_tenant_and_changes_nothing() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let (resources, receiver) = (Resources::create(&manager).await, Receiver::start().await);
    let operations = hub_operations(&app, &resources, &receiver.url()).await;
    let reader = portal(&app, &manager, "read").await;
    let before = view(&manager, &operations).await;
    for Operation { method, route, path, body } in &operations {
        let answer = reader.send(method.clone(), path, body.clone()).await;
        if *method == Method::GET && !route.contains("/portal-tokens") {
            assert_eq!(answer.status, 200, "{method} {route}: {answer:?}");
            for secret in ["whsec_", "pbx_", "pbxp_"] {
                assert!(!answer.text.contains(secret), "{method} {route}: {answer:?}");
            }
        } else {
            assert_eq!(answer.status, 403, "{method} {route}: {answer:?}");
            answer.assert_problem(403, "forbidden");
        }
    }
    assert_eq!(view(&manager, &operations).await, before, "nothing has changed");
    app.stop().await;
}
