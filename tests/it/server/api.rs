//! Rules that hold for every HTTP route.

use std::collections::BTreeSet;
use std::time::Instant;

use http_kit::client_address::ForwardedHeader;
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestApp, TestDatabase};

/// Routes of the server itself, which know no caller.
const WITHOUT_CALLER: [&str; 5] = ["/healthz", "/readyz", "/metrics", "/openapi.json", "/console/config.json"];
/// Public routes: credentials are optional, but must be valid.
const WITH_OPTIONAL_CALLER: [&str; 14] = [
    "GET /event/v1/events",
    "GET /event/v1/events/{id}",
    "GET /event/v1/meta/cities",
    "GET /identity/v1/jwks.json",
    "GET /.well-known/openid-configuration",
    "POST /identity/v1/register",
    "POST /identity/v1/verify",
    "POST /identity/v1/verify/resend",
    "POST /identity/v1/login",
    "POST /identity/v1/refresh",
    "POST /identity/v1/password/forgot",
    "POST /identity/v1/password/reset",
    "GET /notify/v1/unsubscribe",
    "POST /notify/v1/unsubscribe",
];

/// The operations of the OpenAPI description: method, path and description.
pub(crate) async fn operations(client: &Client) -> Vec<(Method, String, Value)> {
    let description = client.get("/openapi.json").await.json();
    let mut operations = Vec::new();
    for (path, item) in description["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let method = method.to_uppercase().parse().unwrap();
            operations.push((method, path.clone(), operation.clone()));
        }
    }
    operations
}

/// The path with a valid id in place of each parameter.
pub(crate) fn filled(path: &str) -> String {
    let id = uuid::Uuid::now_v7().to_string();
    path.split('/').map(|part| if part.starts_with('{') { id.as_str() } else { part }).collect::<Vec<_>>().join("/")
}

#[tokio::test]
async fn every_route_that_is_not_public_needs_credentials() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let mut refused = 0;
    for (method, path, operation) in operations(&app.anonymous()).await {
        if method == Method::GET && WITHOUT_CALLER.contains(&path.as_str()) {
            assert!(operation["security"].is_null(), "{path}");
            continue;
        }
        if WITH_OPTIONAL_CALLER.contains(&format!("{method} {path}").as_str()) {
            assert_eq!(operation["security"], json!([{}, {"bearer": []}]), "{path}");
            let send = async |client: Client| client.send(method.clone(), &filled(&path), None).await;
            assert_ne!(send(app.anonymous()).await.status, 401, "{path}");
            let refused = send(app.anonymous().bearer("pbx_a_key_that_is_not_known")).await;
            refused.assert_problem(401, "unauthorized");
            continue;
        }
        assert_eq!(operation["security"], json!([{"bearer": []}]), "{method} {path} is neither public nor secured");
        for client in
            [app.anonymous(), app.anonymous().bearer("pbx_a_key_that_is_not_known"), app.anonymous().bearer("a.b.c")]
        {
            let answer = client.send(method.clone(), &filled(&path), None).await;
            answer.assert_problem(401, "unauthorized");
            assert!(answer.header("www-authenticate").starts_with("Bearer"));
        }
        refused += 1;
    }
    assert!(refused >= 3, "only {refused} routes need credentials");
    app.stop().await;
}

#[tokio::test]
async fn the_openapi_description_is_complete() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let description = app.anonymous().get("/openapi.json").await.json();
    assert_eq!(description["openapi"], "3.1.0");
    assert_eq!(description["components"]["securitySchemes"]["bearer"]["scheme"], "bearer");
    let groups: Vec<_> = description["tags"].as_array().into_iter().flatten().map(|group| &group["name"]).collect();
    let mut ids = BTreeSet::new();
    for (method, path, operation) in operations(&app.anonymous()).await {
        let what = format!("{method} {path}");
        let id = operation["operationId"].as_str().unwrap().to_owned();
        assert!(ids.insert(id.clone()), "{what}: {id} is not unique");
        assert!(operation["summary"].as_str().is_some_and(|text| !text.is_empty()), "{what}");
        assert!(groups.contains(&&operation["tags"][0]), "{what}: its tag is not described");
        let responses = operation["responses"].as_object().unwrap();
        for (status, response) in responses {
            let is_described = response["description"].as_str().is_some_and(|text| !text.is_empty());
            assert!(is_described, "OpenAPI requires a description: {what} {status}");
        }
        let problem = "#/components/schemas/Problem";
        let is_problem =
            |status: &str| responses[status]["content"]["application/problem+json"]["schema"]["$ref"] == problem;
        let errors: Vec<_> = responses.keys().filter(|status| status.starts_with(['4', '5'])).collect();
        assert!(errors.iter().any(|status| *status == "500"), "{what}");
        for status in errors {
            // The readiness report has a different format; it is not a problem document.
            let is_report = path == "/readyz" && status == "503";
            assert!(is_report || is_problem(status), "{what} {status}");
        }
        let has_header = |status: &str, name: &str| responses[status]["headers"][name].is_object();
        if operation["security"] == json!([{"bearer": []}]) {
            assert!(["401", "403", "429", "503"].into_iter().all(is_problem), "{what}");
            assert!(has_header("401", "WWW-Authenticate") && has_header("503", "Retry-After"), "{what}");
            assert!(has_header("429", "Retry-After") && has_header("429", "RateLimit-Limit"), "{what}");
        }
        if operation["requestBody"].is_object() {
            assert!(["400", "413", "415", "422"].into_iter().all(is_problem), "{what}");
        }
        let parameters: Vec<_> = operation["parameters"].as_array().into_iter().flatten().collect();
        let has_parameter = |name: &str| parameters.iter().any(|parameter| parameter["name"] == name);
        assert!(has_parameter("limit") || !has_parameter("cursor"), "{what}");
        assert_eq!(has_parameter("cursor"), responses.contains_key("200") && has_header("200", "Link"), "{what}");
    }
    let keys = &description["paths"]["/admin/v1/keys"]["get"]["parameters"];
    let names: Vec<_> = keys.as_array().unwrap().iter().map(|parameter| parameter["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["tenant", "limit", "cursor"]);
    assert_every_reference_resolves(&description, &description);
    app.stop().await;
}

/// Generators need specific names and no defaults in requests, and readers need an introduction.
#[tokio::test]
async fn the_openapi_description_suits_generators_and_readers() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let description = app.anonymous().get("/openapi.json").await.json();
    assert!(description["servers"].as_array().is_some_and(|servers| !servers.is_empty()), "{}", description["servers"]);
    let introduction = description["info"]["description"].as_str().unwrap();
    for word in ["Authorization: Bearer", "next_cursor", "Idempotency-Key"] {
        assert!(introduction.contains(word), "{word}: {introduction}");
    }
    // Each name becomes a class in a client, so it must be specific to one concept.
    let schemas = description["components"]["schemas"].as_object().unwrap();
    for name in ["Event", "Chosen", "Kind", "State", "Alive"] {
        assert!(!schemas.contains_key(name), "{name}");
    }
    let (mut request_bodies, mut streams) = (0, 0);
    for (method, path, operation) in operations(&app.anonymous()).await {
        let what = format!("{method} {path}");
        if operation["requestBody"].is_object() {
            request_bodies += 1;
            // openapi-python-client leaves out a property with a default that is not of its type, and openapi-typescript
            // requires a property that has one.
            let defaults = defaults_in(&description, &operation["requestBody"], &mut BTreeSet::new());
            assert_eq!(defaults, [""; 0], "{what}: the request has defaults");
        }
        for response in operation["responses"].as_object().unwrap().values() {
            let Some(stream) = response["content"].get("text/event-stream") else { continue };
            streams += 1;
            let schema = match stream["schema"]["$ref"].as_str() {
                Some(reference) => description.pointer(reference.trim_start_matches('#')).unwrap(),
                None => &stream["schema"],
            };
            assert!(
                schema.is_object() && schema["type"] != "string",
                "{what}: an event of the stream is JSON: {schema}"
            );
        }
    }
    assert!(request_bodies > 40 && streams == 2, "{request_bodies} {streams}");
    app.stop().await;
}

/// The properties with a `default` in a schema, and in those that it refers to.
fn defaults_in(root: &Value, value: &Value, seen: &mut BTreeSet<String>) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            let mut found = Vec::new();
            if let Some(reference) = fields.get("$ref").and_then(Value::as_str)
                && seen.insert(reference.to_owned())
            {
                found.extend(defaults_in(root, root.pointer(reference.trim_start_matches('#')).unwrap(), seen));
            }
            for (name, field) in fields.iter().filter(|(name, _)| *name != "example" && *name != "examples") {
                let is_schema = field.is_object() && (field.get("type").is_some() || field.get("oneOf").is_some());
                if is_schema && field.get("default").is_some() {
                    found.push(format!("{name}: {field}"));
                }
                found.extend(defaults_in(root, field, seen));
            }
            found
        }
        Value::Array(items) => items.iter().flat_map(|item| defaults_in(root, item, seen)).collect(),
        _ => Vec::new(),
    }
}

fn assert_every_reference_resolves(root: &Value, value: &Value) {
    match value {
        Value::Object(fields) => {
            if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
                assert!(root.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
            }
            fields.values().for_each(|field| assert_every_reference_resolves(root, field));
        }
        Value::Array(items) => items.iter().for_each(|item| assert_every_reference_resolves(root, item)),
        _ => {}
    }
}

#[tokio::test]
async fn the_documentation_loads_nothing_from_other_hosts() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let client = app.anonymous();
    assert_eq!(client.get("/docs").await.header("location"), "/docs/");
    let page = client.get("/docs/").await;
    assert_eq!(page.status, 200);
    assert!(page.header("content-type").starts_with("text/html"));
    assert!(page.text.contains("<title>Pillarbox</title>"));
    let mut loaded = 0;
    for part in page.text.split(['"', '\'']).filter(|part| part.ends_with(".js") || part.ends_with(".css")) {
        assert!(!part.contains("//"), "{part} is loaded from another host");
        let file = client.get(&format!("/docs/{}", part.trim_start_matches("./"))).await;
        assert_eq!(file.status, 200, "{part}");
        loaded += 1;
    }
    assert!(loaded >= 4);
    assert!(client.get("/docs/swagger-initializer.js").await.text.contains("/openapi.json"));
    client.get("/docs/nothing-here").await.assert_problem(404, "unknown-route");
    app.stop().await;
}

#[tokio::test]
async fn unknown_routes_and_wrong_methods_are_problems() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    app.anonymous().get("/nowhere").await.assert_problem(404, "unknown-route");
    let answer = app.admin().send(Method::PUT, "/admin/v1/keys", Some(json!({}))).await;
    answer.assert_problem(405, "method-not-allowed");
    assert!(answer.header("allow").contains("POST"), "{answer:?}");
    app.stop().await;
}

#[tokio::test]
async fn a_rate_limited_caller_learns_when_to_retry() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| settings.rate_limit_per_second = 5).await;
    let admin = app.admin();
    assert_eq!(admin.get("/admin/v1/keys").await.header("ratelimit-limit"), "5");
    let mut limited = None;
    for _ in 0..50 {
        let answer = admin.get("/admin/v1/keys").await;
        if answer.status == 429 {
            limited = Some(answer);
        }
    }
    let limited = limited.expect("fifty requests in a row exceed the limit");
    limited.assert_problem(429, "rate-limited");
    assert_eq!(limited.header("retry-after"), "1");
    let guesses = futures_util::future::join_all((0..20).map(async |number| {
        app.anonymous().bearer(&format!("pbx_a_guess_of_a_key_no_{number}")).get("/admin/v1/keys").await.status
    }));
    assert!(guesses.await.contains(&429), "guessing keys is limited");
    // A guess beyond the limit causes no query.
    let index_scans = "select coalesce(sum(idx_scan), 0)::bigint from pg_stat_user_indexes where indexrelname = 'api_key_digest_unique'";
    let began = Instant::now();
    for number in 0..300 {
        app.anonymous().bearer(&format!("pbx_another_guess_no_{number}")).get("/admin/v1/keys").await;
    }
    let within_the_limit = 5 * began.elapsed().as_secs() as i64;
    // A connection reports its scans when it ends at the latest, so those of all requests are counted.
    app.stop().await;
    let scans: i64 = sqlx::query_scalar(index_scans).fetch_one(database.pool()).await.unwrap();
    assert!(scans < 200 + within_the_limit, "300 guesses caused {scans} index scans");
    let app = TestApp::start_with(&database, |settings| settings.rate_limit_per_second = 5).await;
    assert_eq!(
        app.user(uuid::Uuid::now_v7(), None).get("/admin/v1/keys").await.status,
        403,
        "another caller is not limited"
    );
    app.stop().await;
}

#[tokio::test]
async fn the_rate_limit_counts_the_client_of_a_trusted_proxy() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| {
        settings.rate_limit_per_second = 5;
        settings.trusted_proxies = vec!["127.0.0.1".parse().unwrap()];
        settings.forwarded_header = ForwardedHeader::Forwarded;
    })
    .await;
    let status = async |client: &str| {
        app.anonymous().with_header("forwarded", &format!("for={client}")).get("/admin/v1/keys").await.status
    };
    let requests = (0..50).map(|_| status("203.0.113.9"));
    assert!(futures_util::future::join_all(requests).await.contains(&429));
    assert_eq!(status("\"[2001:db8::1]:4711\"").await, 401, "another client is not limited");
    app.stop().await;
}

#[tokio::test]
async fn metrics_are_labelled_by_route_and_not_by_path() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start(&database).await;
    let id = uuid::Uuid::now_v7();
    // All tests of this process share the metrics, so the test compares the counter before and after.
    let requests = async || {
        let metrics = app.anonymous().get("/metrics").await.text;
        let name = r#"pillarbox_http_requests_total{method="DELETE",route="/admin/v1/keys/{id}",status="404"} "#;
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.parse::<u64>().ok());
        (line.unwrap_or(0), metrics)
    };
    let (before, _) = requests().await;
    for _ in 0..3 {
        app.admin().delete(&format!("/admin/v1/keys/{id}")).await.assert_problem(404, "key-not-found");
    }
    let (after, metrics) = requests().await;
    assert_eq!(after - before, 3, "{metrics}");
    assert!(!metrics.contains(&id.to_string()));
    app.stop().await;
}

#[tokio::test]
async fn a_process_without_the_api_role_serves_only_health_and_metrics() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![server::settings::Role::Maintain]).await;
    assert_eq!(app.anonymous().get("/readyz").await.status, 200);
    app.admin().get("/admin/v1/keys").await.assert_problem(404, "unknown-route");
    app.stop().await;
}
