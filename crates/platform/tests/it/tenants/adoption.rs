//! An upgrade loses no tenant: those that exist only through keys, subscribers, recipients or messages are adopted.

use std::borrow::Cow;

use kit::secret::digest;
use mailbox::database::{migrate, migrations};
use serde_json::json;
use sqlx::migrate::Migrator;
use testkit::{Receiver, TestApp, TestDatabase};
use uuid::Uuid;

use crate::hub::fixture::{Fixture, post, subscribe, wait_for_webhooks};
use crate::server::process::run;
use crate::support::collect_pages;

/// The last migration of the version without tenants.
const BEFORE_TENANTS: i64 = 29;

/// A database of the previous version with a tenant of each kind. Returns the key of the tenant `of-key`.
async fn database_with_tenants() -> (TestDatabase, &'static str) {
    let before = migrations().iter().filter(|migration| migration.version <= BEFORE_TENANTS).cloned().collect();
    let database = TestDatabase::new(&Migrator { migrations: Cow::Owned(before), ..migrations() }).await;
    let (db, key) = (database.pool(), "pbx_0123456789012345678901234567890123456789");
    let insert = "insert into pillarbox_platform.api_key (id, digest, hint, name, role, tenant, created_at, revoked_at)
                  values ($1, $2, 'pbx_0123', 'x', 'manage', 'of-key', now(), null),
                         (gen_random_uuid(), sha256('x'), 'pbx_4567', 'x', 'manage', 'of-revoked-key', now(), now())";
    sqlx::query(insert).bind(Uuid::now_v7()).bind(digest(key).as_slice()).execute(db).await.unwrap();
    let rows = "insert into pillarbox_hub.subscriber (id, tenant, name, url, event_types, retry_backoff_seconds, retry_statuses,
                    on_exhausted, timeout_ms, max_in_flight, format, is_active, created_at, updated_at, shard)
                values (gen_random_uuid(), 'of-subscriber', 'x', 'https://example.com/', '{*}', '{5}', '{}', 'skip', 1000, 1,
                    'standard', true, now(), now(), 0);
                insert into pillarbox_notify.contact (user_id, name, tenant) values (gen_random_uuid(), 'Ada', 'of-recipient');
                insert into pillarbox_platform.installation (secret_key_fingerprint, created_at) values ('x', now());
                select pillarbox.post('order.paid', '{}', tenant => 'of-message')";
    sqlx::raw_sql(rows).execute(db).await.unwrap();
    (database, key)
}

async fn names(database: &TestDatabase) -> Vec<String> {
    let query = "select name from pillarbox.tenant order by name";
    sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap()
}

const ADOPTED: [&str; 5] = ["main", "of-key", "of-message", "of-recipient", "of-subscriber"];

#[tokio::test]
async fn a_start_after_an_upgrade_adopts_every_tenant() {
    let (database, key) = database_with_tenants().await;
    migrate(&database.connect_options()).await.unwrap();
    assert_eq!(names(&database).await, ["main", "of-message"], "the migration knows the log only");
    sqlx::query("delete from pillarbox_platform.installation where secret_key_fingerprint = 'x'")
        .execute(database.pool())
        .await
        .unwrap();
    sqlx::query("insert into pillarbox_platform.installation (secret_key_fingerprint, created_at) values ($1, now())")
        .bind(fingerprint(&database))
        .execute(database.pool())
        .await
        .unwrap();
    let app = TestApp::start(&database).await;
    assert_eq!(names(&database).await, ADOPTED);
    let manager = app.anonymous().bearer(key);
    subscribe(&manager, "https://example.com/hook", json!({})).await;
    post(&manager, "order.paid", json!({}), None).await;
    let listed = collect_pages(&app.admin(), "/admin/v1/tenants").await;
    assert_eq!(listed.len(), ADOPTED.len());
    app.stop().await;
    // A recipient whose tenant was deleted since then does not bring it back.
    sqlx::query("delete from pillarbox.tenant where name = 'of-recipient'").execute(database.pool()).await.unwrap();
    TestApp::start(&database).await.stop().await;
    assert!(!names(&database).await.contains(&"of-recipient".to_owned()));
}

/// The fingerprint of the key that [`TestApp`] uses for this database.
fn fingerprint(database: &TestDatabase) -> String {
    kit::secret::MasterKey::from_bytes(digest(&database.url())).fingerprint()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_migrate_adopts_every_tenant() {
    let (database, _) = database_with_tenants().await;
    let (code, _, error) = run(&["migrate", "--database-url", &database.url()], &[]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(names(&database).await, ADOPTED);
    let post = "select pillarbox.post('order.paid', '{}', tenant => 'of-key')";
    sqlx::query(post).execute(database.pool()).await.unwrap();
}

/// During an upgrade, processes of the previous version run on the new schema: they create keys and subscribers of tenants that
/// have no row, and post for them without asking for it.
#[tokio::test]
async fn what_the_previous_version_creates_during_an_upgrade_is_delivered_and_adopted_by_the_next_start() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, receiver, key) =
        (database.pool(), Receiver::start().await, "pbx_0123456789012345678901234567890123456789");
    subscribe(&manager, &receiver.url(), json!({})).await;
    sqlx::query("update pillarbox_hub.subscriber set tenant = 'late'").execute(db).await.unwrap();
    let insert = "insert into pillarbox_platform.api_key (id, digest, hint, name, role, tenant, created_at)
                  values ($1, $2, 'pbx_0123', 'x', 'manage', 'late', now())";
    sqlx::query(insert).bind(Uuid::now_v7()).bind(digest(key).as_slice()).execute(db).await.unwrap();
    let post_of_hub = "insert into pillarbox.log (shard, message_id, source, tenant, topic, headers, payload)
                       select pillarbox.shard_of('late', id::text), id, 'hub', 'late', 'order.paid', '{}', '{}'
                       from gen_random_uuid() as new (id)";
    sqlx::query(post_of_hub).execute(db).await.unwrap();
    wait_for_webhooks(&receiver, 1).await;
    // A key that exists is accepted, so that no producer is interrupted. Everything else needs the tenant.
    post(&app.anonymous().bearer(key), "order.paid", json!({}), None).await;
    wait_for_webhooks(&receiver, 2).await;
    let post_in_sql = "select pillarbox.post('order.paid', '{}', tenant => 'late')";
    sqlx::query(post_in_sql).execute(db).await.unwrap_err();
    app.stop().await;
    // The process that replaces the last one of the previous version.
    let app = TestApp::start(&database).await;
    let late = app.anonymous().bearer(key);
    assert_eq!(late.get("/hub/v1/subscribers").await.json()["items"].as_array().unwrap().len(), 1);
    post(&late, "order.paid", json!({}), None).await;
    sqlx::query(post_in_sql).execute(db).await.unwrap();
    wait_for_webhooks(&receiver, 4).await;
    app.stop().await;
}
