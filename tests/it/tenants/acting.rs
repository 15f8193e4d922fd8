//! Acting for a tenant with the header `Pillarbox-Tenant`, and the audit trail of it.

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::hub::fixture::{Fixture, post, subscribe};
use crate::hub::process::Replica;
use crate::server::api::{filled, operations};
use crate::support::{DEADLINE, caller, collect_pages};

fn acting_for(client: &Client, tenant: &str) -> Client {
    client.with_header("pillarbox-tenant", tenant)
}

#[tokio::test]
async fn a_key_of_main_acts_for_a_tenant_on_the_hubs_routes_only() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let operator = caller(&app, "manage", "main").await;
    let own = subscribe(&operator, "https://example.com/main", json!({})).await;
    for client in [&operator, &app.admin()] {
        let acting = acting_for(client, "acme");
        let made = subscribe(&acting, "https://example.com/hook", json!({})).await;
        let path = format!("/hub/v1/subscribers/{}", made["id"].as_str().unwrap());
        assert_eq!(manager.get(&path).await.status, 200, "it belongs to the tenant");
        client.get(&path).await.assert_problem(404, "subscriber-not-found");
        let of_main = format!("/hub/v1/subscribers/{}", own["id"].as_str().unwrap());
        acting.get(&of_main).await.assert_problem(404, "subscriber-not-found");
        assert_eq!(acting.delete(&path).await.status, 204);
    }
    let event = json!({"event_type": "order.paid", "payload": {}});
    let posted = acting_for(&operator, "acme").post("/events", event).await.json();
    let path = format!("/hub/v1/events/{}", posted["event_id"].as_str().unwrap());
    assert_eq!(manager.get(&path).await.status, 200);
    acting_for(&operator, "acne").get("/hub/v1/events").await.assert_problem(404, "tenant-not-found");

    let producer = caller(&app, "ingest", "main").await;
    let users = [app.user(Uuid::now_v7(), None), app.user(Uuid::now_v7(), Some(http_kit::auth::Role::Admin))];
    for stranger in [&producer, &manager, &caller(&app, "admin", "rival").await, &users[0], &users[1]] {
        acting_for(stranger, "acme").get("/hub/v1/subscribers").await.assert_problem(403, "forbidden");
        // Not even whether a tenant exists.
        acting_for(stranger, "acne").get("/hub/v1/subscribers").await.assert_problem(403, "forbidden");
    }
    // An operator who acts for a tenant has no rights of an operator, and other routes do not ignore the header.
    let mut refused = 0;
    for (method, path, operation) in operations(&app.anonymous()).await {
        let is_of_hub = path == "/events" || path.starts_with("/hub/v1/");
        if is_of_hub || operation["security"].is_null() {
            continue;
        }
        refused += 1;
        let answer = acting_for(&app.admin(), "acme").send(method.clone(), &filled(&path), None).await;
        answer.assert_problem(400, "malformed-header");
        assert!(answer.text.contains("pillarbox-tenant"), "{method} {path}: {answer:?}");
    }
    assert!(refused > 50, "{refused}");
    app.stop().await;
}

#[tokio::test]
async fn an_idempotency_key_counts_within_the_tenant_that_is_acted_for() {
    let Fixture { database: _database, app, .. } = Fixture::start().await;
    let keyed = app.admin().with_header("idempotency-key", "one");
    let event = json!({"event_type": "order.paid", "payload": {}});
    let mut ids = Vec::new();
    for tenant in ["acme", "rival", "acme"] {
        let posted = acting_for(&keyed, tenant).post("/hub/v1/events", event.clone()).await;
        assert_eq!(posted.status, 202, "{posted:?}");
        ids.push(posted.json()["event_id"].clone());
    }
    assert!(ids[0] == ids[2] && ids[0] != ids[1], "{ids:?}");
    app.stop().await;
}

#[tokio::test]
async fn every_call_for_a_tenant_is_in_the_audit_trail() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let (admin, operator) = (app.admin(), caller(&app, "manage", "main").await);
    let acting = acting_for(&operator, "acme");
    let subscriber = subscribe(&acting, "https://example.com/hook", json!({})).await;
    let path = format!("/hub/v1/subscribers/{}", subscriber["id"].as_str().unwrap());
    assert_eq!(acting.get(&path).await.status, 200);
    assert_eq!(acting.send(Method::POST, &format!("{path}/pause"), None).await.status, 200);
    acting.delete(&format!("/hub/v1/subscribers/{}", Uuid::now_v7())).await.assert_problem(404, "subscriber-not-found");
    assert_eq!(acting_for(&admin, "rival").get("/hub/v1/events").await.status, 200);
    // Calls without the header, and those that are refused, act for no tenant.
    manager.get("/hub/v1/subscribers").await;
    acting_for(&manager, "rival").get("/hub/v1/subscribers").await.assert_problem(403, "forbidden");

    let expected: Vec<Value> = [
        ("DELETE", "/hub/v1/subscribers/{id}", 404),
        ("POST", "/hub/v1/subscribers/{id}/pause", 200),
        ("GET", "/hub/v1/subscribers/{id}", 200),
        ("POST", "/hub/v1/subscribers", 201),
    ]
    .map(|(method, route, status)| json!([method, route, status, "acme"]))
    .to_vec();
    let of_acme = eventually("the lines with their statuses", DEADLINE, async || {
        let lines = collect_pages(&admin, "/admin/v1/audit?tenant=acme&limit=3").await;
        let found: Vec<Value> =
            lines.iter().map(|line| json!([line["method"], line["route"], line["status"], line["tenant"]])).collect();
        if found == expected { Ok(lines) } else { Err(found) }
    })
    .await;
    assert!(of_acme.iter().all(|line| line["trace_id"].as_str().is_some_and(|id| id.len() == 32)), "{of_acme:?}");
    let key = of_acme[0]["key_id"].as_str().unwrap();
    let count = async |query: String| collect_pages(&admin, &format!("/admin/v1/audit?{query}")).await.len();
    eventually("the line of the other tenant", DEADLINE, async || count(String::new()).await == 5).await;
    assert_eq!(count(format!("key_id={key}")).await, 4);
    assert_eq!(count(format!("key_id={}", Uuid::nil())).await, 1, "the admin key of the settings");
    let at = of_acme[1]["at"].as_str().unwrap();
    assert_eq!((count(format!("from={at}&tenant=acme")).await, count(format!("to={at}&tenant=acme")).await), (2, 2));
    operator.get("/admin/v1/audit").await.assert_problem(403, "forbidden");
    app.stop().await;
}

/// A process is killed while it changes something for a tenant: every change that is there has a line.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_without_an_audit_line_does_not_exist_after_a_crash() {
    let database = TestDatabase::new(&migrations()).await;
    let mut replica = Replica::start(&database.url());
    let acting = acting_for(&replica.admin().await, "acme");
    let posting = tokio::spawn(async move {
        let event = json!({"event_type": "order.paid", "payload": {}});
        while acting.try_send(Method::POST, "/hub/v1/events", Some(event.clone())).await.is_ok() {}
    });
    let db = database.pool();
    let count = async |query: &'static str| sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap();
    let events = "select count(*) from pillarbox.log where source = 'hub'";
    eventually("some events are posted", DEADLINE, async || count(events).await > 50).await;
    replica.process.kill9();
    posting.await.unwrap();
    let lines =
        count("select count(*) from pillarbox_admin.audit where method = 'POST' and route = '/hub/v1/events'").await;
    let events = count(events).await;
    assert!(lines >= events && lines <= events + 1, "{lines} lines, {events} events");
}

#[tokio::test]
async fn a_change_is_refused_while_the_audit_trail_cannot_be_written() {
    let Fixture { database, app, .. } = Fixture::start().await;
    let acting = acting_for(&app.admin(), "acme");
    let break_trail = "alter table pillarbox_admin.audit add constraint refused check (method <> 'POST') not valid";
    sqlx::query(break_trail).execute(database.pool()).await.unwrap();
    let event = json!({"event_type": "order.paid", "payload": {}});
    acting.post("/hub/v1/events", event.clone()).await.assert_problem(503, "unavailable");
    let posted = "select count(*) from pillarbox.log where source = 'hub'";
    assert_eq!(sqlx::query_scalar::<_, i64>(posted).fetch_one(database.pool()).await.unwrap(), 0);
    let repair = "alter table pillarbox_admin.audit drop constraint refused";
    sqlx::query(repair).execute(database.pool()).await.unwrap();
    eventually("changes are accepted again", DEADLINE, async || {
        acting.post("/hub/v1/events", event.clone()).await.status == 202
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn old_audit_lines_are_deleted() {
    let database = TestDatabase::new(&migrations()).await;
    let insert = "insert into pillarbox_admin.audit (id, at, key_id, tenant, method, route, trace_id)
                  select gen_random_uuid(), now() - make_interval(days => days), gen_random_uuid(), 'acme', 'GET', '/x', ''
                  from unnest(array[1, 9, 11, 400]) as days";
    sqlx::query(insert).execute(database.pool()).await.unwrap();
    let app = TestApp::start_with(&database, |settings| settings.audit_days = 10).await;
    eventually("two lines remain", DEADLINE, async || {
        match collect_pages(&app.admin(), "/admin/v1/audit").await.len() {
            2 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    post(&app.admin(), "order.paid", json!({}), None).await;
    app.stop().await;
}
