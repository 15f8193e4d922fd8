//! Every part of every request, malformed in turn: the problem names the part and what it accepts, in words of the API and
//! not of a parser. The parts are those of the OpenAPI description, so a new route is tested without a change here.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, Response, TestApp, TestDatabase};
use uuid::Uuid;

use crate::events::fixture::{create_event, meetup};
use crate::identity::fixture::{person, unlimited};
use crate::joins::fixture::{new_event, post_event_update, wait_until_known};
use crate::server::api::operations;
use crate::support::text;

/// What parsers say.
const PARSER_WORDS: [&str; 22] = [
    "premature end of input",
    "trailing input",
    "trailing characters",
    "input contains",
    "UUID parsing",
    "expected a sequence",
    "expected struct",
    "expected value",
    ", expected ",
    "EOF while parsing",
    "invalid type",
    "invalid value",
    "invalid length",
    "invalid digit",
    "missing field",
    "unknown field",
    "unknown variant",
    "did not match any variant",
    "target type",
    "relative URL",
    "recursion limit",
    "Cannot parse",
];

/// Bodies that are no JSON objects.
const MALFORMED_BODIES: [&str; 12] = [
    "",
    "  ",
    "{",
    "{\"name\":",
    "{\"name\" 1}",
    "{\"name\":king}",
    "{\"name\":tru}",
    "{name:1}",
    "{} {}",
    "{\"name\":1,}",
    "[]",
    "{\"name\":\"\\u00",
];

/// An operation and a caller who may call it.
struct Target<'a> {
    description: &'a Value,
    client: Client,
    method: Method,
    path: String,
    operation: Value,
}

#[tokio::test]
async fn a_malformed_part_is_named_with_what_it_accepts() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, unlimited).await;
    let description = app.anonymous().get("/openapi.json").await.json();
    let owner = Uuid::now_v7();
    let event = new_event(owner, 5);
    post_event_update(database.pool(), &event).await;
    wait_until_known(database.pool(), &event).await;
    let made = create_event(&app.user(owner, None), meetup()).await;
    // Not the account of the examples, some of which delete it.
    let member = person(&app, database.pool(), "member").await;
    let project = app.admin().post("/progress/v1/projects", json!({"id": "known"})).await;
    assert_eq!(project.status, 201, "{project:?}");
    let mut refused = 0;
    for (method, path, operation) in operations(&app.anonymous()).await {
        // A stream does not end.
        if !operation["responses"]["200"]["content"]["text/event-stream"].is_null() {
            continue;
        }
        let of_users = ["/event/", "/join/", "/notify/v1/inbox", "/notify/v1/preferences"];
        let is_for_users = of_users.iter().any(|prefix| path.starts_with(prefix)) && !path.ends_with("/audit");
        let is_for_operators = path.starts_with("/identity/v1/users") || path.ends_with("/status");
        let client = match path.starts_with("/identity/") && !is_for_operators {
            true => member.client.clone(),
            false if is_for_users => app.user(owner, None),
            false => app.admin(),
        };
        let client = client.with_header("x-forwarded-for", "test");
        let path = path.replace("/join/v1/events/{id}", &format!("/join/v1/events/{}", event.event_id));
        let path = path.replace("{aggregate_type}/{aggregate}/", "RESTAURANT/5/");
        // A project is looked for first.
        let path = path.replace("/projects/{id}", "/projects/known");
        // These routes read their body only for a caller who may act on the event.
        let path = match path.as_str() {
            "/event/v1/events/{id}/cancel" | "/event/v1/events/{id}/unpublish" | "/event/v1/events/{id}/handover" => {
                path.replace("{id}", text(&made["id"]))
            }
            _ => path,
        };
        let target = Target { description: &description, client, method, path, operation };
        refused += target.malform_path().await;
        refused += target.malform_query().await;
        refused += target.malform_headers().await;
        refused += target.malform_body().await;
    }
    assert!(refused > 600, "only {refused} malformed requests were refused");
    app.stop().await;
}

impl Target<'_> {
    fn parameters(&self, part: &str) -> Vec<&Value> {
        let all = self.operation["parameters"].as_array().into_iter().flatten();
        all.filter(|parameter| parameter["in"] == part).collect()
    }

    /// The path with this text in place of each parameter.
    fn path_with(&self, text: &str) -> String {
        let part = |part: &str| if part.starts_with('{') { text.to_owned() } else { part.to_owned() };
        self.path.split('/').map(part).collect::<Vec<_>>().join("/")
    }

    /// The path with an id that does not exist.
    fn valid_path(&self) -> String {
        let name = self.path.split('{').nth(1).and_then(|rest| rest.split('}').next()).unwrap_or_default();
        let parameter = self.parameters("path").into_iter().find(|parameter| parameter["name"] == name);
        let schema = parameter.map_or(&Value::Null, |parameter| &parameter["schema"]);
        let id = Uuid::now_v7();
        match (schema["type"].as_str(), schema["pattern"].as_str()) {
            (Some("integer"), _) => self.path_with("1000000"),
            (_, Some(pattern)) if pattern.starts_with("^[A-Z]") => self.path_with("FLEET"),
            _ if name == "name" => self.path_with("order.paid"),
            (_, Some(pattern)) if pattern.contains(r"\.") => self.path_with(&format!("{id}.{id}")),
            _ => self.path_with(&id.to_string()),
        }
    }

    async fn malform_path(&self) -> usize {
        let Some((_, rest)) = self.path.split_once('{') else { return 0 };
        let name = rest.split('}').next().unwrap();
        let parameter = self.parameters("path").into_iter().find(|parameter| parameter["name"] == name).unwrap();
        let schema = &parameter["schema"];
        let mut values = vec!["%00", "%ff"];
        if schema["format"].is_string() || schema["pattern"].is_string() {
            values.push("%F0%9F%A6%80");
            // These are the names of event types.
            if name != "name" {
                values.extend(["x", "0190a000"]);
            }
        }
        for value in &values {
            let response = self.client.send(self.method.clone(), &self.path_with(value), None).await;
            self.assert_names(&response, "path", &format!("/{name}"), value);
        }
        values.len()
    }

    async fn malform_query(&self) -> usize {
        let parameters = self.parameters("query");
        let mut required = String::new();
        for parameter in parameters.iter().filter(|parameter| parameter["required"] == true) {
            required.push_str(&format!("{}={}&", parameter["name"].as_str().unwrap(), Uuid::now_v7()));
        }
        let mut count = 0;
        for parameter in &parameters {
            let name = parameter["name"].as_str().unwrap();
            for value in malformed_values(&parameter["schema"]) {
                let query = match parameter["required"] == true {
                    true => format!("{name}={value}"),
                    false => format!("{required}{name}={value}"),
                };
                let response = self.send_query(&query).await;
                self.assert_names(&response, "query", &format!("/{name}"), &query);
                count += 1;
            }
        }
        if parameters.is_empty() {
            return count;
        }
        let refused = self.send_query(&format!("{required}colour=red")).await;
        self.assert_names(&refused, "query", "/colour", "an unknown parameter");
        for parameter in &parameters {
            let name = parameter["name"].as_str().unwrap();
            assert!(refused.json()["detail"].as_str().unwrap().contains(name), "{name} is not listed: {refused:?}");
        }
        count + 1
    }

    async fn send_query(&self, query: &str) -> Response {
        self.client.send(self.method.clone(), &format!("{}?{query}", self.valid_path()), None).await
    }

    async fn malform_headers(&self) -> usize {
        let mut count = 0;
        for parameter in self.parameters("header") {
            let name = parameter["name"].as_str().unwrap();
            let long = "k".repeat(300);
            let values = match name {
                name if name.contains("idempotency") => ["", "\"", "\"a", long.as_str()],
                "pillarbox-tenant" => ["", "Acme", "-a", "a b"],
                _ => ["", "x", "\"a", "\"a\"b"],
            };
            for value in values {
                let client = self.client.with_header(name, value);
                let body = self.operation["requestBody"].is_object().then(|| json!({}));
                let response = client.send(self.method.clone(), &self.valid_path(), body).await;
                let pointer = format!("/{}", name.trim_start_matches("x-"));
                self.assert_names(&response, "header", &pointer, value);
                count += 1;
            }
        }
        count
    }

    async fn malform_body(&self) -> usize {
        let Some(schema) = self.operation["requestBody"]["content"].get("application/json") else { return 0 };
        let schema = self.resolved(&schema["schema"]);
        let object = schema["allOf"].get(0).unwrap_or(&schema);
        let mut count = 0;
        // An optional body may be absent.
        let is_required = self.operation["requestBody"]["required"] == true;
        for body in MALFORMED_BODIES.iter().filter(|body| is_required || !body.is_empty()) {
            let response = self.client.send_text(self.method.clone(), &self.valid_path(), body).await;
            self.assert_names(&response, "body", "", body);
            count += 1;
        }
        // A body that has several forms has no fields of its own.
        let Some(properties) = object["properties"].as_object() else { return count };
        let names: Vec<&str> = properties.keys().map(String::as_str).collect();
        let refused = self.send_with(&schema["example"], "colour", Some(json!("red"))).await;
        self.assert_names(&refused, "body", "/colour", "an unknown field");
        for name in &names {
            let detail = refused.json()["detail"].to_string();
            assert!(detail.contains(name), "{name} is not listed: {refused:?}");
        }
        for name in names {
            for value in
                [json!(5), json!(1.5), json!("x"), json!("2026-01-31"), json!(true), json!([5]), json!({"x": 5})]
            {
                count += self.refusals_of(&schema["example"], name, Some(value)).await;
            }
            if object["required"].as_array().is_some_and(|required| required.contains(&json!(name))) {
                count += self.refusals_of(&schema["example"], name, None).await;
            }
        }
        count
    }

    /// Sends the example with another value of the field; None removes it. Returns 1 if it was refused.
    async fn refusals_of(&self, example: &Value, name: &str, value: Option<Value>) -> usize {
        let what = format!("{name}: {value:?}");
        let response = self.send_with(example, name, value).await;
        if !matches!(response.status, 400 | 422) {
            return 0;
        }
        self.assert_names(&response, "body", &format!("/{name}"), &what);
        1
    }

    async fn send_with(&self, example: &Value, name: &str, value: Option<Value>) -> Response {
        let mut body = example.clone();
        let fields = body.as_object_mut().unwrap();
        match value {
            Some(value) => drop(fields.insert(name.to_owned(), value)),
            None => drop(fields.remove(name)),
        }
        let client = self.client.with_header("idempotency-key", &Uuid::new_v4().to_string());
        client.send(self.method.clone(), &self.valid_path(), Some(body)).await
    }

    fn resolved(&self, schema: &Value) -> Value {
        let path = schema["$ref"].as_str().map(|path| path.trim_start_matches('#'));
        path.and_then(|path| self.description.pointer(path)).unwrap_or(schema).clone()
    }

    /// Fails unless the problem is about this part: an item of `errors` points to it or into it.
    fn assert_names(&self, response: &Response, part: &str, pointer: &str, sent: &str) {
        let what = format!("{} {}, {sent:?}", self.method, self.path);
        assert!(matches!(response.status, 400 | 422), "{what}: {response:?}");
        let problem = response.json();
        let errors = problem["errors"].as_array().cloned().unwrap_or_default();
        let is_about = |error: &Value| {
            let found = error["pointer"].as_str().unwrap();
            error["in"] == part && (found == pointer || found.starts_with(&format!("{pointer}/")))
        };
        assert!(errors.iter().any(is_about), "{what}: {part} {pointer} is not named: {response:?}");
        let details = errors.iter().map(|error| &error["detail"]).chain([&problem["detail"]]);
        for detail in details.filter_map(Value::as_str) {
            let found: Vec<_> = PARSER_WORDS.iter().filter(|words| detail.contains(**words)).collect();
            assert!(found.is_empty(), "{what}: {found:?} in {detail:?}");
        }
    }
}

/// Values that a query parameter with this schema refuses.
fn malformed_values(schema: &Value) -> Vec<&'static str> {
    let mut values = vec!["%00"];
    values.extend_from_slice(match (schema["type"].as_str(), schema["format"].as_str()) {
        // Only the limit of a list cannot be negative, or given twice.
        (Some("integer"), _) if schema["minimum"].is_number() => {
            &["x", "", "1.5", "-1", "99999999999999999999", "1&limit=1"]
        }
        (Some("integer"), _) => &["x", "", "1.5", "99999999999999999999"],
        (Some("boolean"), _) => &["king", "", "1"],
        (_, Some("date-time")) => &["yesterday", "", "2026-01-31", "2026-01-31T08:00", "2026-13-01T00:00:00Z"],
        (_, Some("uuid")) => &["x", "", "0190a000"],
        _ if schema["enum"].is_array() => &["king", ""],
        (_, Some(_)) => &[],
        _ if schema["pattern"].as_str().is_some_and(|pattern| pattern != r"\S") => &["!", ""],
        _ => &[],
    });
    values
}
