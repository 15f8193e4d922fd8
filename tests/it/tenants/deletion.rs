//! Deleting a tenant: which rows are deleted with it, and when its name can be reused.

use hyper::Method;
use serde_json::json;
use sqlx::PgPool;
use testkit::{Receiver, TestApp, eventually};

use super::routes::{Resources, portal};
use crate::delivery::fixture::insert_contact;
use crate::hub::fixture::{Fixture, post, post_in_sql, subscribe, wait_for_fan_out};
use crate::hub::stream_fixture::create_stream;
use crate::progress::fixture::{create_with, mark_numbers};
use crate::support::{DEADLINE, caller};

/// The tables with rows of a tenant that are empty when its deletion is answered.
const EMPTY_AT_ONCE: [&str; 9] = [
    "pillarbox_hub.catalogue",
    "pillarbox_hub.event_type",
    "pillarbox_hub.event_type_version",
    "pillarbox_hub.replay",
    "pillarbox_hub.stream",
    "pillarbox_hub.subscriber",
    "pillarbox_hub.tenant_backlog",
    "pillarbox_admin.api_key",
    "pillarbox_admin.portal_token",
];
/// Those that the maintenance empties.
const EMPTY_LATER: [&str; 6] = [
    "pillarbox.dead_letter",
    "pillarbox_hub.dead_letter",
    "pillarbox_hub.deferred_event",
    "pillarbox_hub.rejected_event",
    "pillarbox_notify.contact",
    "pillarbox_progress.project",
];
/// Those whose rows stay: messages until their retention ends, and the audit trail.
const RETAINED: [&str; 5] =
    ["pillarbox.chosen_id", "pillarbox.confidential", "pillarbox.log", "pillarbox.parked", "pillarbox_admin.audit"];

async fn count(db: &PgPool, table: &str) -> i64 {
    let query = format!("select count(*) from {table} where tenant = 'acme'");
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(db).await.unwrap()
}

/// A new table with a tenant has to be in one of the lists above, so that its author decides about its rows.
#[tokio::test]
async fn every_table_with_a_tenant_is_emptied_or_retained_for_a_reason() {
    let Fixture { database, app, .. } = Fixture::start().await;
    let query = "select format('%s.%s', nspname, relname)
                 from pg_attribute join pg_class on pg_class.oid = attrelid join pg_namespace on pg_namespace.oid = relnamespace
                 where attname = 'tenant' and relkind in ('r', 'p') and not relispartition order by 1";
    let tables: Vec<String> = sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap();
    let mut known = [&EMPTY_AT_ONCE[..], &EMPTY_LATER, &RETAINED].concat();
    known.sort_unstable();
    assert_eq!(tables, known);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_tenant_is_inaccessible_at_once_and_its_name_is_free_after_its_messages() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, admin, receiver) = (database.pool(), app.admin(), Receiver::start().await);
    Resources::create(&manager).await;
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    let other = caller(&app, "manage", "other").await;
    subscribe(&other, &receiver.url(), json!({})).await;
    create_stream(&other, json!({})).await;
    let event_type = json!({"name": "order.checked", "schema": {"type": "object", "required": ["id"]}});
    assert_eq!(other.post("/hub/v1/event-types", event_type).await.status, 201);
    let token = portal(&app, &manager, "read").await;
    let project = create_with(&manager, 3).await;
    assert_eq!(mark_numbers(&manager, &project, 2).await.status, 200);
    let user = insert_contact(db, None, Some("acme")).await;
    admin.delete("/admin/v1/tenants/acme").await.assert_problem(409, "tenant-active");
    assert_eq!(admin.send(Method::POST, "/admin/v1/tenants/acme/suspend", None).await.status, 200);
    sqlx::query("select pillarbox.post('order.paid', '{}', tenant => 'acme')").execute(db).await.unwrap();
    let dead = "insert into pillarbox_hub.dead_letter (id, tenant, subscriber, n, log_shard, log_id, log_at,
                    subscriber_snapshot, reason, detail, attempts, moved_to_dlq_at)
                select gen_random_uuid(), 'acme', $1::uuid, n, 0, 1, now(), '{}', 'gone', 'x', 1, now()
                from generate_series(1, 6000) as n";
    sqlx::query(dead).bind(subscriber["id"].as_str().unwrap()).execute(db).await.unwrap();
    let dead =
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, log_id, message_id, source, tenant, topic,
                    headers, payload, at, last_error)
                values ('test', 0, 0, 1, 1, gen_random_uuid(), 'sql', 'acme', 'test.old', '{}', '1', now(), 'x')";
    sqlx::query(dead).execute(db).await.unwrap();
    for table in EMPTY_AT_ONCE.iter().filter(|table| !table.ends_with("_backlog")) {
        assert!(count(db, table).await > 0, "the test has nothing in {table}");
    }
    assert_eq!(admin.delete("/admin/v1/tenants/acme").await.status, 204);

    for client in [&manager, &token] {
        client.get("/hub/v1/subscribers").await.assert_problem(401, "unauthorized");
    }
    for table in EMPTY_AT_ONCE {
        assert_eq!(count(db, table).await, 0, "{table}");
    }
    let orphans =
        "select (select count(*) from pillarbox_hub.stream_part), (select count(*) from pillarbox_hub.stream_reader),
                          (select count(*) from pillarbox_hub.subscriber_state)";
    let orphans: (i64, i64, i64) = sqlx::query_as(orphans).fetch_one(db).await.unwrap();
    assert_eq!(orphans, (16, 0, 0), "the parts of the other tenant's stream remain");
    let checked = post_in_sql(db, "other", "order.checked", &json!({})).await;
    assert_eq!(wait_for_fan_out(&other, &checked).await["outcome"], "rejected", "the other tenant's catalogue remains");
    admin.get("/admin/v1/tenants/acme").await.assert_problem(404, "tenant-not-found");
    let acting = admin.with_header("pillarbox-tenant", "acme");
    acting.get("/hub/v1/dead-letters").await.assert_problem(404, "tenant-not-found");
    sqlx::query("select pillarbox.post('order.paid', '{}', tenant => 'acme')").execute(db).await.unwrap_err();
    admin.post("/admin/v1/tenants", json!({"name": "acme"})).await.assert_problem(409, "tenant-name-in-use");
    post(&other, "order.paid", json!({}), None).await;
    eventually("the other tenant is not affected", DEADLINE, async || receiver.count() == 1).await;

    // The maintenance of the next process deletes the rest, and the name after the log.
    app.stop().await;
    let app = TestApp::start(&database).await;
    for table in EMPTY_LATER {
        eventually(&format!("{table} is emptied"), DEADLINE, async || count(db, table).await == 0).await;
    }
    let tables = "select (select count(*) from pillarbox_progress.item), (select count(*) from pillarbox_notify.contact
                  where user_id = $1)";
    let left: (i64, i64) = sqlx::query_as(tables).bind(user).fetch_one(db).await.unwrap();
    assert_eq!(left, (0, 1), "items are deleted, and a user loses the tenant only");
    app.admin().post("/admin/v1/tenants", json!({"name": "acme"})).await.assert_problem(409, "tenant-name-in-use");
    app.stop().await;
    // A request that was in progress during the deletion has added a row.
    let late = "insert into pillarbox_hub.stream (id, tenant, name, event_types, created_at, updated_at)
                values (gen_random_uuid(), 'acme', 'late', '{*}', now(), now())";
    sqlx::query(late).execute(db).await.unwrap();
    sqlx::query("delete from pillarbox.log").execute(db).await.unwrap();
    let app = TestApp::start(&database).await;
    eventually("the name is free", DEADLINE, async || {
        match app.admin().post("/admin/v1/tenants", json!({"name": "acme"})).await {
            answer if answer.status == 201 => Ok(()),
            answer => Err(answer),
        }
    })
    .await;
    for table in [&EMPTY_AT_ONCE[..], &EMPTY_LATER].concat() {
        assert_eq!(count(db, table).await, 0, "{table}: the new tenant has nothing of the former one");
    }
    app.stop().await;
}
