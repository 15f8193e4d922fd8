//! Reconciliation of the events and joins services: which differences it must find, and what it must not change.

use std::time::Duration;

use events::reconcile::{self, Progress, ReconcileOptions};
use pillarbox::database::Database;
use pillarbox::log::Post;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use server::migrations;
use server::settings::{Role, Settings};
use sqlx::PgPool;
use testkit::{Client, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::events::fixture::{
    DEADLINE, create_event, event_id, event_path, meetup_with, post_action, post_messages, publish_event,
};
use crate::joins::fixture::post_join_action;

const DRY_RUN: ReconcileOptions = ReconcileOptions { dry_run: true, force: false };

const FORCED: ReconcileOptions = ReconcileOptions { dry_run: false, force: true };

/// Both services in one process. It can be restarted without the role that handles messages.
struct Services {
    database: TestDatabase,
    app: TestApp,
    owner: Uuid,
}

fn with_handlers(settings: &mut Settings) {
    settings.events.reconcile_minutes = 0;
}

fn without_handlers(settings: &mut Settings) {
    with_handlers(settings);
    settings.roles = vec![Role::Api];
}

impl Services {
    async fn start() -> Services {
        let database = TestDatabase::new(&migrations()).await;
        let app = TestApp::start_with(&database, with_handlers).await;
        Services { database, app, owner: Uuid::now_v7() }
    }

    async fn restart(self, change: fn(&mut Settings)) -> Services {
        self.app.stop().await;
        let app = TestApp::start_with(&self.database, change).await;
        Services { app, ..self }
    }

    fn db(&self) -> &PgPool {
        self.database.pool()
    }

    fn owner(&self) -> Client {
        self.app.user(self.owner, None)
    }

    /// A published event that the joins service knows.
    async fn create_event(&self, capacity: i32) -> Value {
        let event = publish_event(&self.owner(), meetup_with(json!({"capacity": capacity}))).await;
        self.wait_until_known(&event, "published").await;
        event
    }

    async fn wait_until_known(&self, event: &Value, status: &str) {
        eventually(&format!("the joins service knows the event as {status}"), DEADLINE, async || {
            let query = "select status from pillarbox_joins.event_capacity where event_id = $1";
            let found: Option<String> =
                sqlx::query_scalar(query).bind(event_id(event)).fetch_optional(self.db()).await.unwrap();
            if found.as_deref() == Some(status) { Ok(()) } else { Err(found) }
        })
        .await;
    }

    async fn join_users(&self, event: &Value, users: usize) {
        for _ in 0..users {
            let joined = post_join_action(&self.app.user(Uuid::now_v7(), None), event_id(event), "join").await;
            assert_eq!(joined.status, 201, "{joined:?}");
        }
    }

    async fn wait_for_count(&self, event: &Value, count: i64) {
        eventually(&format!("{count} participants"), DEADLINE, async || {
            match self.app.anonymous().get(&event_path(event)).await.json()["active_participants"].as_i64() {
                found if found == Some(count) => Ok(()),
                other => Err(other),
            }
        })
        .await;
    }

    async fn reconcile(&self, options: ReconcileOptions) -> Progress {
        let run = reconcile::begin(&Database::new(self.db().clone()), options).await.unwrap();
        self.wait_until_finished(run).await
    }

    async fn wait_until_finished(&self, run: Uuid) -> Progress {
        eventually("the run finishes", DEADLINE, async || match reconcile::progress(self.db(), run).await.unwrap() {
            Some(progress) if progress.finished_at.is_some() => Ok(progress),
            other => Err(other),
        })
        .await
    }

    async fn wait_until_all_handled(&self) {
        eventually("every message is handled", DEADLINE, async || {
            let waiting = "select count(*) from pillarbox.log l
                 where source in ('events', 'joins') and not exists
                 (select from pillarbox.inbox i where i.consumer = case source when 'events' then 'joins.events' else 'events.counts' end
                  and i.message_id = l.message_id)";
            match sqlx::query_scalar::<_, i64>(waiting).fetch_one(self.db()).await.unwrap() {
                0 => Ok(()),
                other => Err(other),
            }
        })
        .await;
    }

    async fn execute(&self, statements: &str) {
        sqlx::raw_sql(sqlx::AssertSqlSafe(statements.to_owned())).execute(self.db()).await.unwrap();
    }
}

#[tokio::test]
async fn a_forced_run_does_not_revert_a_cancellation() {
    let services = Services::start().await;
    let mut events = Vec::new();
    for _ in 0..24 {
        events.push(services.create_event(2).await);
    }
    // The run states the events as published; then they are canceled.
    let services = services.restart(without_handlers).await;
    let run = reconcile::begin(&Database::new(services.db().clone()), FORCED).await.unwrap();
    let stated = "delete from pillarbox.log where payload->>'run' = $1 returning topic, payload::text";
    let (topic, payload): (String, String) =
        sqlx::query_as(stated).bind(run.to_string()).fetch_one(services.db()).await.unwrap();
    for event in &events {
        assert_eq!(post_action(&services.owner(), event, "cancel").await.status, 200);
    }
    // Messages of different keys have no order: the statement is posted first and handled last.
    post_messages(services.db(), "events", &[Post::new(&topic, RawValue::from_string(payload).unwrap())]).await;
    let services = services.restart(with_handlers).await;
    services.wait_until_finished(run).await;
    services.wait_until_all_handled().await;
    for event in &events {
        services.wait_until_known(event, "canceled").await;
    }
    services.app.stop().await;
}

#[tokio::test]
async fn lost_event_updates_are_found_even_without_registrations() {
    let services = Services::start().await;
    let (canceled, withdrawn) = (services.create_event(2).await, services.create_event(2).await);
    let services = services.restart(without_handlers).await;
    assert_eq!(post_action(&services.owner(), &canceled, "cancel").await.status, 200);
    assert_eq!(post_action(&services.owner(), &withdrawn, "unpublish").await.status, 200);
    let lost = publish_event(&services.owner(), meetup_with(json!({}))).await;
    let draft = create_event(&services.owner(), meetup_with(json!({}))).await;
    services
        .execute("delete from pillarbox.log where source = 'events' and id > (select max(id) - 3 from pillarbox.log)")
        .await;
    let services = services.restart(with_handlers).await;
    let early = services.reconcile(DRY_RUN).await;
    assert_eq!(early.joins_drifted, 0, "recent updates may still be in flight: {early:?}");
    services.execute("update pillarbox_events.event set updated_at = now() - interval '1 hour'").await;
    let dry_run = services.reconcile(DRY_RUN).await;
    assert_eq!((dry_run.joins_drifted, dry_run.joins_repaired), (3, 0), "{dry_run:?}");
    let found = services.reconcile(ReconcileOptions::default()).await;
    assert_eq!((found.joins_drifted, found.joins_repaired), (3, 3), "{found:?}");
    services.wait_until_known(&canceled, "canceled").await;
    services.wait_until_known(&withdrawn, "draft").await;
    services.wait_until_known(&lost, "published").await;
    let known: i64 = sqlx::query_scalar("select count(*) from pillarbox_joins.event_capacity where event_id = $1")
        .bind(event_id(&draft))
        .fetch_one(services.db())
        .await
        .unwrap();
    assert_eq!(known, 0, "drafts are not sent to the joins service");
    let again = services.reconcile(ReconcileOptions::default()).await;
    assert_eq!((again.drifted, again.joins_drifted), (0, 0), "{again:?}");
    services.app.stop().await;
}

#[tokio::test]
async fn a_restored_joins_database_is_accepted_again() {
    let services = Services::start().await;
    let event = services.create_event(0).await;
    services.join_users(&event, 5).await;
    services.wait_for_count(&event, 5).await;
    services
        .execute(
            "alter table pillarbox_joins.history disable trigger history_append_only;
         delete from pillarbox_joins.history where version > 2;
         alter table pillarbox_joins.history enable trigger history_append_only;
         delete from pillarbox_joins.joins where seq > 2;
         update pillarbox_joins.event_capacity set active_count = 2, version = 2, next_seq = 3",
        )
        .await;
    let found = services.reconcile(ReconcileOptions::default()).await;
    assert_eq!((found.drifted, found.repaired), (1, 1), "{found:?}");
    services.wait_for_count(&event, 2).await;
    services.join_users(&event, 1).await;
    services.wait_for_count(&event, 3).await;
    services.app.stop().await;
}

#[tokio::test]
async fn a_restored_events_database_is_accepted_again() {
    let services = Services::start().await;
    let event = services.create_event(2).await;
    for capacity in [3, 4, 5] {
        let changed =
            services.owner().send(hyper::Method::PATCH, &event_path(&event), Some(json!({"capacity": capacity}))).await;
        assert_eq!(changed.status, 200, "{changed:?}");
    }
    services.wait_until_all_handled().await;
    services.execute("update pillarbox_events.event set version = 3, capacity = 3").await;
    let found = services.reconcile(ReconcileOptions::default()).await;
    assert_eq!((found.joins_drifted, found.joins_repaired), (1, 1), "{found:?}");
    let capacity = async || {
        let query = "select capacity from pillarbox_joins.event_capacity";
        sqlx::query_scalar::<_, i32>(query).fetch_one(services.db()).await.unwrap()
    };
    eventually("the joins service knows the capacity", DEADLINE, async || capacity().await == 3).await;
    assert_eq!(post_action(&services.owner(), &event, "cancel").await.status, 200);
    services.wait_until_known(&event, "canceled").await;
    services.app.stop().await;
}

#[tokio::test]
async fn a_forced_run_replaces_a_version_that_was_assigned_twice() {
    let services = Services::start().await;
    let event = services.create_event(2).await;
    services.wait_until_all_handled().await;
    // After a failover of the events database, the version that the joins service knows belongs to another change.
    services.execute("update pillarbox_joins.event_capacity set capacity = 9").await;
    let capacity = async || {
        let query = "select capacity from pillarbox_joins.event_capacity where event_id = $1";
        sqlx::query_scalar::<_, i32>(query).bind(event_id(&event)).fetch_one(services.db()).await.unwrap()
    };
    services.reconcile(ReconcileOptions::default()).await;
    services.wait_until_all_handled().await;
    assert_eq!(capacity().await, 9, "an ordinary run compares versions");
    services.reconcile(FORCED).await;
    eventually("the joins service knows the capacity", DEADLINE, async || capacity().await == 2).await;
    services.app.stop().await;
}

#[tokio::test]
async fn a_comparison_needs_no_locks() {
    let services = Services::start().await;
    let event = services.create_event(2).await;
    let mut tx = services.db().begin().await.unwrap();
    let lock = "select 1 from pillarbox_joins.event_capacity where event_id = $1 for update";
    sqlx::query(lock).bind(event_id(&event)).execute(&mut *tx).await.unwrap();
    for options in [DRY_RUN, ReconcileOptions::default()] {
        let finished = tokio::time::timeout(Duration::from_secs(5), services.reconcile(options)).await;
        assert_eq!(finished.expect("the run waits for no lock").checked, 1);
    }
    tx.rollback().await.unwrap();
    services.app.stop().await;
}
