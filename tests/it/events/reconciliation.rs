//! Reconciliation in the events service; the test plays the joins service.

use contracts::joins::{COUNTED, Count, EventCounted, JoinsCounted, RestateRequest};
use pillarbox::database::Database;
use pillarbox::log::Post;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use server::settings::Settings;
use sqlx::PgPool;
use testkit::eventually;
use uuid::Uuid;

use crate::events::fixture::{
    DEADLINE, Fixture, create_event, event_id, event_messages, event_path, join_message, meetup, post_messages,
    publish_event, start_replica, stored_count, wait_for_count,
};
use crate::server::process::run;

fn without_schedule(settings: &mut Settings) {
    settings.events.reconcile_minutes = 0;
}

/// The parts that a run has posted so far.
async fn posted_parts(db: &PgPool, run: Uuid) -> Vec<Value> {
    sqlx::query_scalar::<_, sqlx::types::Json<Value>>(
        "select payload from pillarbox.log where source = 'events' and topic = 'event.versions'
         and payload->>'run' = $1 order by (payload->>'part')::integer",
    )
    .bind(run.to_string())
    .fetch_all(db)
    .await
    .unwrap()
    .into_iter()
    .map(|payload| payload.0)
    .collect()
}

/// Posts the answer of the joins service to a part, twice: the events with wrong counts, and the events to restate.
async fn post_answer(db: &PgPool, part: &Value, wrong: &[(Uuid, Count)], wanted: &[(Uuid, i64)]) {
    let counted = JoinsCounted {
        run: part["run"].as_str().unwrap().parse().unwrap(),
        part: part["part"].as_i64().unwrap() as i32,
        dry_run: part["dry_run"].as_bool().unwrap(),
        force: part["force"].as_bool().unwrap(),
        checked: part["events"].as_array().unwrap().len() as i32,
        drifted: 0,
        repaired: 0,
        events: wrong.iter().map(|(event_id, counts)| EventCounted { event_id: *event_id, counts: *counts }).collect(),
        wanted: wanted
            .iter()
            .map(|(event_id, version)| RestateRequest { event_id: *event_id, version: *version })
            .collect(),
    };
    let message = Post::new(COUNTED, to_raw_value(&counted).unwrap());
    post_messages(db, "joins", &[message.clone(), message]).await;
}

/// The restatements of an event: its version, and the count and count version that the events service has.
async fn restatements(db: &PgPool, event: &Value) -> Vec<(i64, i64, i64)> {
    let number = |payload: &Value, field: &str| payload[field].as_i64().unwrap();
    let all = event_messages(db, event).await.into_iter().filter(|(topic, _)| topic == "event.restated");
    let fields = ["version", "active_participants", "count_version"];
    all.map(|(_, payload)| fields.map(|field| number(&payload, field)).into()).collect()
}

#[tokio::test]
async fn a_reconciliation_restates_differences_unless_it_is_a_dry_run() {
    use events::reconcile::{ReconcileOptions, begin, progress};
    let fixture = Fixture::start_with(without_schedule).await;
    let db = fixture.db();
    let (wrong, restored) =
        (publish_event(&fixture.owner, meetup()).await, publish_event(&fixture.owner, meetup()).await);
    let draft = create_event(&fixture.owner, meetup()).await;
    post_messages(db, "joins", &[join_message(event_id(&wrong), 7, 5)]).await;
    wait_for_count(db, event_id(&wrong), (7, 5)).await;
    let truth = [(event_id(&wrong), Count { active: 1, waitlisted: 0, version: 5 })];
    let run_and_answer = async |options: ReconcileOptions, wanted: &[(Uuid, i64)]| {
        let run = begin(&Database::new(db.clone()), options).await.unwrap();
        let parts = posted_parts(db, run).await;
        assert_eq!(parts.len(), 1);
        let events = parts[0]["events"].as_array().unwrap();
        assert!(events.contains(&json!([wrong["id"], 2, "published", 5, 7])), "{parts:?}");
        assert!(events.len() == 2 && !events.iter().any(|event| event[0] == draft["id"]), "{parts:?}");
        assert_eq!(progress(db, run).await.unwrap().unwrap().finished_at, None, "there is no answer yet");
        post_answer(db, &parts[0], &truth, wanted).await;
        eventually("the run finishes", DEADLINE, async || {
            progress(db, run).await.unwrap().filter(|progress| progress.finished_at.is_some())
        })
        .await
    };
    let wanted = [(event_id(&wrong), 2), (event_id(&restored), 9)];
    let dry_run = run_and_answer(ReconcileOptions { dry_run: true, force: false }, &wanted).await;
    assert_eq!(
        (dry_run.checked, dry_run.drifted, dry_run.repaired),
        (2, 1, 0),
        "the answer is posted twice and counted once"
    );
    assert_eq!((dry_run.joins_drifted, dry_run.joins_repaired), (1, 0), "{dry_run:?}");
    assert_eq!((restatements(db, &wrong).await, restatements(db, &restored).await), (vec![], vec![]));

    let repaired = run_and_answer(ReconcileOptions::default(), &wanted).await;
    assert_eq!((repaired.drifted, repaired.repaired), (1, 1));
    assert_eq!((repaired.joins_drifted, repaired.joins_repaired), (1, 1));
    assert_eq!(restatements(db, &wrong).await, [(2, 7, 5)], "unchanged, once");
    assert_eq!(restatements(db, &restored).await, [(10, 0, 0)], "above the version that the joins service knows");
    assert_eq!(stored_count(db, event_id(&wrong)).await, (7, 5), "unchanged until a new count arrives");
    post_messages(db, "joins", &[join_message(event_id(&wrong), 1, 6)]).await;
    wait_for_count(db, event_id(&wrong), (1, 6)).await;
    let tag = fixture.app.anonymous().get(&event_path(&restored)).await.header("etag").to_owned();
    assert!(tag.starts_with("\"10."), "{tag}");
    let metrics = fixture.app.anonymous().get("/metrics").await.text;
    for service in ["events", "joins"] {
        let drift = format!("pillarbox_reconcile_drift_total{{service=\"{service}\"}}");
        assert!(metrics.contains(&drift), "{drift}: {metrics}");
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_forced_run_assigns_new_versions() {
    use events::reconcile::{ReconcileOptions, begin};
    let fixture = Fixture::start_with(without_schedule).await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let db = fixture.db();
    let run = begin(&Database::new(db.clone()), ReconcileOptions { dry_run: false, force: true }).await.unwrap();
    let parts = posted_parts(db, run).await;
    post_answer(db, &parts[0], &[], &[(event_id(&event), 2)]).await;
    eventually("the event is restated", DEADLINE, async || match restatements(db, &event).await.as_slice() {
        [(3, 0, 0)] => Ok(()),
        other => Err(other.to_vec()),
    })
    .await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_large_run_is_split_into_compact_parts_without_omissions() {
    let fixture = Fixture::start_with(without_schedule).await;
    sqlx::query(
        "insert into pillarbox_events.event (id, owner_id, title, description, city, city_norm, category, category_norm,
             start_time, end_time, time_zone, capacity, status, cover_image_ids, published_at, created_at, updated_at)
         select gen_random_uuid(), gen_random_uuid(), repeat('é', 200), '', 'x', 'x', 'x', 'x', now(), now() + interval '1 day',
             'UTC', 0, 'published', '{}', now(), now(), now() from generate_series(1, 1200)",
    )
    .execute(fixture.db())
    .await
    .unwrap();
    let run =
        events::reconcile::begin(&Database::new(fixture.db().clone()), events::reconcile::ReconcileOptions::default())
            .await
            .unwrap();
    let parts = posted_parts(fixture.db(), run).await;
    let sizes: Vec<usize> = parts.iter().map(|part| part["events"].as_array().unwrap().len()).collect();
    assert_eq!(sizes, [500, 500, 200]);
    let bytes: usize = parts.iter().map(|part| part.to_string().len()).sum();
    assert!(bytes < 1_200 * 70, "{bytes} bytes");
    let found = events::reconcile::progress(fixture.db(), run).await.unwrap().unwrap();
    assert_eq!(found.parts, Some(3));
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_reconcile_command_waits_for_the_answer_and_fails_without_one() {
    let fixture = Fixture::start_with(without_schedule).await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let url = fixture.database.url();
    let command = async |args: &[&str]| {
        let args: Vec<String> =
            [&["reconcile", "--database-url", &url], args].concat().iter().map(|arg| (*arg).to_owned()).collect();
        tokio::task::spawn_blocking(move || run(&args.iter().map(String::as_str).collect::<Vec<_>>(), &[]))
            .await
            .unwrap()
    };
    let (code, out, error) = command(&["--dry-run", "--wait-seconds", "1"]).await;
    assert_eq!(code, Some(1), "{out} {error}");
    assert!(error.contains("no response"), "{error}");
    let db = fixture.db();
    let joins = async {
        let run: Uuid = eventually("a run without an answer", DEADLINE, async || {
            let query = "select run from pillarbox_events.reconciliation where not dry_run and finished_at is null and parts > 0";
            sqlx::query_scalar(query).fetch_optional(db).await.unwrap()
        })
        .await;
        for part in posted_parts(db, run).await {
            post_answer(db, &part, &[(event_id(&event), Count { active: 2, waitlisted: 0, version: 6 })], &[]).await;
        }
    };
    let ((code, out, error), ()) = tokio::join!(command(&[]), joins);
    assert_eq!(code, Some(0), "{out} {error}");
    assert!(out.contains("1 drifted") && out.contains("1 repaired"), "{out}");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_scheduled_reconciliation_runs_in_one_process_only() {
    let fixture = Fixture::start().await;
    let others = [start_replica(&fixture.database).await, start_replica(&fixture.database).await];
    let runs = async || {
        sqlx::query_scalar::<_, i64>("select count(*) from pillarbox_events.reconciliation")
            .fetch_one(fixture.db())
            .await
            .unwrap()
    };
    eventually("the first run is started", DEADLINE, async || runs().await == 1).await;
    for app in others {
        app.stop().await;
    }
    assert_eq!(runs().await, 1);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_dry_run_or_an_aborted_run_does_not_replace_the_scheduled_run() {
    let fixture = Fixture::start_with(without_schedule).await;
    publish_event(&fixture.owner, meetup()).await;
    let dry_run = events::reconcile::ReconcileOptions { dry_run: true, force: false };
    events::reconcile::begin(&Database::new(fixture.db().clone()), dry_run).await.unwrap();
    sqlx::query(
        "insert into pillarbox_events.reconciliation (run, started_at, dry_run, force)
         values (gen_random_uuid(), now() - interval '10 minutes', false, false)",
    )
    .execute(fixture.db())
    .await
    .unwrap();
    let scheduled = start_replica(&fixture.database).await;
    eventually("a scheduled run is started", DEADLINE, async || {
        let query = "select count(*) from pillarbox_events.reconciliation where not dry_run and parts is not null";
        sqlx::query_scalar::<_, i64>(query).fetch_one(fixture.db()).await.unwrap() == 1
    })
    .await;
    scheduled.stop().await;
    fixture.app.stop().await;
}
