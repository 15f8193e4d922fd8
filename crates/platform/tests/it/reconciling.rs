//! Events and joins after something went wrong between them: what reconciliation must find, and what it must leave alone.

use std::time::Duration;

use chrono::Utc;
use events::reconcile::{self, Asked, Progress};
use mailbox::database::migrations;
use mailbox::post::Post;
use pillarbox::settings::{Role, Settings};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::{Client, TestApp, TestDatabase, drain};
use uuid::Uuid;

use crate::events_world::{PATIENCE, act, id, meetup_with, path, published, say};
use crate::joins_world;

const ONLY_LOOK: Asked = Asked { dry_run: true, force: false };
const FORCED: Asked = Asked { dry_run: false, force: true };

/// Both services in one process, which can be made deaf: nobody handles a message then.
struct Both {
    database: TestDatabase,
    app: TestApp,
    owner: Uuid,
}

fn hearing(settings: &mut Settings) {
    settings.events.reconcile_minutes = 0;
}

fn deaf(settings: &mut Settings) {
    hearing(settings);
    settings.roles = vec![Role::Api];
}

impl Both {
    async fn start() -> Both {
        let database = TestDatabase::new(&migrations()).await;
        let app = TestApp::start_with(&database, hearing).await;
        Both { database, app, owner: Uuid::now_v7() }
    }

    async fn restart(self, how: fn(&mut Settings)) -> Both {
        self.app.stop().await;
        let app = TestApp::start_with(&self.database, how).await;
        Both { app, ..self }
    }

    fn db(&self) -> &PgPool {
        self.database.pool()
    }

    fn owner(&self) -> Client {
        self.app.user(self.owner, None)
    }

    /// A published event that joins know of.
    async fn event(&self, capacity: i32) -> Value {
        let event = published(&self.owner(), meetup_with(json!({"capacity": capacity}))).await;
        self.until_known(&event, "published").await;
        event
    }

    async fn until_known(&self, event: &Value, status: &str) {
        drain(&format!("joins know it as {status}"), PATIENCE, async || {
            let query = "select status from pillarbox_joins.event_capacity where event_id = $1";
            let found: Option<String> =
                sqlx::query_scalar(query).bind(id(event)).fetch_optional(self.db()).await.unwrap();
            if found.as_deref() == Some(status) { Ok(()) } else { Err(found) }
        })
        .await;
    }

    async fn fill(&self, event: &Value, people: usize) {
        for _ in 0..people {
            let joined = joins_world::act(&self.app.user(Uuid::now_v7(), None), id(event), "join").await;
            assert_eq!(joined.status, 201, "{joined:?}");
        }
    }

    async fn until_count(&self, event: &Value, count: i64) {
        drain(&format!("{count} participants"), PATIENCE, async || {
            match self.app.anyone().get(&path(event)).await.json()["active_participants"].as_i64() {
                found if found == Some(count) => Ok(()),
                other => Err(other),
            }
        })
        .await;
    }

    async fn reconcile(&self, asked: Asked) -> Progress {
        let run = reconcile::begin(self.db(), asked, Utc::now()).await.unwrap();
        self.until_finished(run).await
    }

    async fn until_finished(&self, run: Uuid) -> Progress {
        drain("the run ends", PATIENCE, async || match reconcile::progress(self.db(), run).await.unwrap() {
            Some(progress) if progress.finished_at.is_some() => Ok(progress),
            other => Err(other),
        })
        .await
    }

    async fn until_all_is_handled(&self) {
        drain("all is handled", PATIENCE, async || {
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
async fn a_forced_run_takes_back_no_cancellation() {
    let both = Both::start().await;
    let mut events = Vec::new();
    for _ in 0..24 {
        events.push(both.event(2).await);
    }
    // Stated as published; then canceled.
    let both = both.restart(deaf).await;
    let run = reconcile::begin(both.db(), FORCED, Utc::now()).await.unwrap();
    let stated = "delete from pillarbox.log where payload->>'run' = $1 returning topic, payload::text";
    let (topic, payload): (String, String) =
        sqlx::query_as(stated).bind(run.to_string()).fetch_one(both.db()).await.unwrap();
    for event in &events {
        assert_eq!(act(&both.owner(), event, "cancel").await.status, 200);
    }
    // Messages of different keys keep no order: what was stated first is heard last.
    say(both.db(), "events", &[Post::new(&topic, RawValue::from_string(payload).unwrap())]).await;
    let both = both.restart(hearing).await;
    both.until_finished(run).await;
    both.until_all_is_handled().await;
    for event in &events {
        both.until_known(event, "canceled").await;
    }
    both.app.stop().await;
}

#[tokio::test]
async fn news_that_never_came_are_found_though_nobody_has_joined() {
    let both = Both::start().await;
    let (canceled, withdrawn) = (both.event(2).await, both.event(2).await);
    let both = both.restart(deaf).await;
    assert_eq!(act(&both.owner(), &canceled, "cancel").await.status, 200);
    assert_eq!(act(&both.owner(), &withdrawn, "unpublish").await.status, 200);
    let unheard = published(&both.owner(), meetup_with(json!({}))).await;
    let draft = crate::events_world::made(&both.owner(), meetup_with(json!({}))).await;
    both.execute("delete from pillarbox.log where source = 'events' and id > (select max(id) - 3 from pillarbox.log)")
        .await;
    let both = both.restart(hearing).await;
    let early = both.reconcile(ONLY_LOOK).await;
    assert_eq!(early.joins_drifted, 0, "they might be on their way: {early:?}");
    both.execute("update pillarbox_events.event set updated_at = now() - interval '1 hour'").await;
    let looked = both.reconcile(ONLY_LOOK).await;
    assert_eq!((looked.joins_drifted, looked.joins_repaired), (3, 0), "{looked:?}");
    let found = both.reconcile(Asked::default()).await;
    assert_eq!((found.joins_drifted, found.joins_repaired), (3, 3), "{found:?}");
    both.until_known(&canceled, "canceled").await;
    both.until_known(&withdrawn, "draft").await;
    both.until_known(&unheard, "published").await;
    let told: i64 = sqlx::query_scalar("select count(*) from pillarbox_joins.event_capacity where event_id = $1")
        .bind(id(&draft))
        .fetch_one(both.db())
        .await
        .unwrap();
    assert_eq!(told, 0, "a draft is nobody's business");
    let again = both.reconcile(Asked::default()).await;
    assert_eq!((again.drifted, again.joins_drifted), (0, 0), "{again:?}");
    both.app.stop().await;
}

#[tokio::test]
async fn joins_that_were_set_back_are_believed_again() {
    let both = Both::start().await;
    let event = both.event(0).await;
    both.fill(&event, 5).await;
    both.until_count(&event, 5).await;
    both.execute(
        "alter table pillarbox_joins.history disable trigger history_append_only;
         delete from pillarbox_joins.history where version > 2;
         alter table pillarbox_joins.history enable trigger history_append_only;
         delete from pillarbox_joins.joins where seq > 2;
         update pillarbox_joins.event_capacity set active_count = 2, version = 2, next_seq = 3",
    )
    .await;
    let found = both.reconcile(Asked::default()).await;
    assert_eq!((found.drifted, found.repaired), (1, 1), "{found:?}");
    both.until_count(&event, 2).await;
    both.fill(&event, 1).await;
    both.until_count(&event, 3).await;
    both.app.stop().await;
}

#[tokio::test]
async fn events_that_were_set_back_are_believed_again() {
    let both = Both::start().await;
    let event = both.event(2).await;
    for capacity in [3, 4, 5] {
        let changed = both.owner().send(hyper::Method::PATCH, &path(&event), Some(json!({"capacity": capacity}))).await;
        assert_eq!(changed.status, 200, "{changed:?}");
    }
    both.until_all_is_handled().await;
    both.execute("update pillarbox_events.event set version = 3, capacity = 3").await;
    let found = both.reconcile(Asked::default()).await;
    assert_eq!((found.joins_drifted, found.joins_repaired), (1, 1), "{found:?}");
    let capacity = async || {
        let query = "select capacity from pillarbox_joins.event_capacity";
        sqlx::query_scalar::<_, i32>(query).fetch_one(both.db()).await.unwrap()
    };
    drain("joins know the capacity", PATIENCE, async || capacity().await == 3).await;
    assert_eq!(act(&both.owner(), &event, "cancel").await.status, 200);
    both.until_known(&event, "canceled").await;
    both.app.stop().await;
}

#[tokio::test]
async fn comparing_waits_for_nobody_and_keeps_nobody_waiting() {
    let both = Both::start().await;
    let event = both.event(2).await;
    let mut tx = both.db().begin().await.unwrap();
    let hold = "select 1 from pillarbox_joins.event_capacity where event_id = $1 for update";
    sqlx::query(hold).bind(id(&event)).execute(&mut *tx).await.unwrap();
    for asked in [ONLY_LOOK, Asked::default()] {
        let finished = tokio::time::timeout(Duration::from_secs(5), both.reconcile(asked)).await;
        assert_eq!(finished.expect("no lock is waited for").checked, 1);
    }
    tx.rollback().await.unwrap();
    both.app.stop().await;
}
