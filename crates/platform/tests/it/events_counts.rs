//! How many there are, as the joins service says it.

use std::time::Duration;

use contracts::joins::{COUNTED, Count, EventCounted, JoinsCounted, Wanted};
use mailbox::post::Post;
use pillarbox::settings::Settings;
use rand::seq::SliceRandom;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use sqlx::PgPool;
use testkit::drain;
use uuid::Uuid;

use crate::events_world::{
    PATIENCE, World, id, joined, meetup, messages_of, path, published, replica, say, time_to_show_counts,
};
use crate::instance::run;

async fn count_of(db: &PgPool, event: Uuid) -> (i32, i64) {
    sqlx::query_as("select active_participants, count_version from pillarbox_events.event where id = $1")
        .bind(event)
        .fetch_one(db)
        .await
        .unwrap()
}

async fn until_counted(db: &PgPool, event: Uuid, wanted: (i32, i64)) {
    drain("the count", PATIENCE, async || match count_of(db, event).await {
        found if found == wanted => Ok(()),
        other => Err(other),
    })
    .await;
}

#[tokio::test]
async fn a_count_is_shown_within_a_second_and_is_no_change_of_the_event() {
    let world = World::start().await;
    let event = published(&world.owner, meetup()).await;
    let reader = world.app.anyone();
    let before = reader.get(&path(&event)).await;
    let took = time_to_show_counts(world.db(), &reader, &event).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    let after = reader.get(&path(&event)).await;
    assert_eq!((&after.json()["version"], after.header("etag")), (&json!(2), "\"2.5\""));
    let copy = reader.with_header("if-none-match", before.header("etag"));
    assert_eq!(copy.get(&path(&event)).await.status, 200, "the copy of before says another count");
    let owner = world.owner.with_header("if-match", before.header("etag"));
    let changed = crate::events_world::patch(&owner, &event, json!({"title": "Still mine"})).await;
    assert_eq!(
        (changed.status, &changed.json()["active_participants"]),
        (200, &json!(5)),
        "who joined is in nobody's way"
    );
    world.app.stop().await;
}

#[tokio::test]
async fn doubled_shuffled_and_replayed_messages_leave_the_counts_right() {
    let world = World::start().await;
    let mut events = Vec::new();
    for _ in 0..5 {
        events.push(published(&world.owner, meetup()).await);
    }
    let mut messages: Vec<Post> = Vec::new();
    for event in &events {
        for version in 1..=40 {
            let message = joined(id(event), (version % 7) as i32, version);
            // Without a key nothing keeps their order; each is said twice.
            messages.extend([Post { key: None, ..message.clone() }, Post { key: None, ..message }]);
        }
    }
    messages.shuffle(&mut rand::rng());
    for some in messages.chunks(25) {
        say(world.db(), "joins", some).await;
    }
    for event in &events {
        until_counted(world.db(), id(event), (40 % 7, 40)).await;
    }
    let other = replica(&world.database).await;
    let replayed = world.app.admin().post("/admin/v1/replays", json!({"consumer": "events.counts", "from": chrono::Utc::now() - chrono::TimeDelta::hours(1), "again": true})).await;
    assert!(replayed.status < 300, "{replayed:?}");
    drain("the replay", PATIENCE, async || {
        let open: i64 =
            sqlx::query_scalar("select count(*) from pillarbox.inbox where consumer = 'events.counts' and run > 0")
                .fetch_one(world.db())
                .await
                .unwrap();
        match open {
            400 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    for event in &events {
        assert_eq!(count_of(world.db(), id(event)).await, (40 % 7, 40));
    }
    // After a restart the next one counts as before.
    other.stop().await;
    world.app.stop().await;
    say(world.database.pool(), "joins", &[joined(id(&events[0]), 1, 41)]).await;
    let app = replica(&world.database).await;
    until_counted(world.database.pool(), id(&events[0]), (1, 41)).await;
    app.stop().await;
}

#[tokio::test]
async fn many_counts_of_an_event_are_few_changes_of_it() {
    let world = World::start().await;
    let (busy, quiet) = (published(&world.owner, meetup()).await, published(&world.owner, meetup()).await);
    world.app.stop().await;
    let db = world.database.pool();
    let mut messages: Vec<Post> = (1..=400).map(|version| joined(id(&busy), version as i32, version)).collect();
    messages.insert(200, joined(id(&quiet), 7, 1));
    say(db, "joins", &messages).await;
    let app = replica(&world.database).await;
    until_counted(db, id(&busy), (400, 400)).await;
    until_counted(db, id(&quiet), (7, 1)).await;
    app.stop().await;
    // A backend tells its counts when it ends.
    let changes = drain("the counts are told", PATIENCE, async || {
        let query =
            "select n_tup_upd from pg_stat_user_tables where schemaname = 'pillarbox_events' and relname = 'event'";
        let changes: i64 = sqlx::query_scalar(query).fetch_one(db).await.unwrap();
        (changes >= 4).then_some(changes)
    })
    .await;
    assert!(changes < 100, "401 messages changed events {changes} times");
}

#[tokio::test]
async fn a_strangers_word_changes_no_count_and_a_bad_one_dies_alone() {
    let world = World::start().await;
    let (event, other) = (published(&world.owner, meetup()).await, published(&world.owner, meetup()).await);
    for source in ["hub", "sql", "amqp:elsewhere"] {
        say(world.db(), source, &[joined(id(&event), 99, 99)]).await;
    }
    say(world.db(), "joins", &[joined(id(&other), -4, 1)]).await;
    say(world.db(), "joins", &[joined(Uuid::now_v7(), 5, 5), joined(id(&event), 1, 1)]).await;
    until_counted(world.db(), id(&event), (1, 1)).await;
    drain("the bad one is parked or dead", PATIENCE, async || {
        let query = "select (select count(*) from pillarbox.parked where consumer = 'events.counts')
                          + (select count(*) from pillarbox.dead_letter where consumer = 'events.counts')";
        sqlx::query_scalar::<_, i64>(query).fetch_one(world.db()).await.unwrap() == 1
    })
    .await;
    assert_eq!(count_of(world.db(), id(&other)).await, (0, 0));
    world.app.stop().await;
}

// ---- reconciliation: here the test is the joins service

fn never_by_time(settings: &mut Settings) {
    settings.events.reconcile_minutes = 0;
}

/// What was stated in a run so far.
async fn stated(db: &PgPool, run: Uuid) -> Vec<Value> {
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

/// Answers a part, twice: these were stated wrongly, and these are to be said again.
async fn answer(db: &PgPool, part: &Value, wrong: &[(Uuid, Count)], wanted: &[(Uuid, i64)]) {
    let counted = JoinsCounted {
        run: part["run"].as_str().unwrap().parse().unwrap(),
        part: part["part"].as_i64().unwrap() as i32,
        dry_run: part["dry_run"].as_bool().unwrap(),
        force: part["force"].as_bool().unwrap(),
        checked: part["events"].as_array().unwrap().len() as i32,
        drifted: 0,
        repaired: 0,
        events: wrong.iter().map(|(event_id, counts)| EventCounted { event_id: *event_id, counts: *counts }).collect(),
        wanted: wanted.iter().map(|(event_id, version)| Wanted { event_id: *event_id, version: *version }).collect(),
    };
    let message = Post::new(COUNTED, to_raw_value(&counted).unwrap());
    say(db, "joins", &[message.clone(), message]).await;
}

/// What was said again of an event: its version, and the count that it believed.
async fn restated(db: &PgPool, event: &Value) -> Vec<(i64, i64, i64)> {
    let number = |payload: &Value, field: &str| payload[field].as_i64().unwrap();
    let all = messages_of(db, event).await.into_iter().filter(|(topic, _)| topic == "event.restated");
    let fields = ["version", "active_participants", "count_version"];
    all.map(|(_, payload)| fields.map(|field| number(&payload, field)).into()).collect()
}

#[tokio::test]
async fn a_reconciliation_says_again_what_differs_unless_it_only_looks() {
    use events::reconcile::{Asked, begin, progress};
    let world = World::start_with(never_by_time).await;
    let db = world.db();
    let (wrong, set_back) = (published(&world.owner, meetup()).await, published(&world.owner, meetup()).await);
    let draft = crate::events_world::made(&world.owner, meetup()).await;
    say(db, "joins", &[joined(id(&wrong), 7, 5)]).await;
    until_counted(db, id(&wrong), (7, 5)).await;
    let truth = [(id(&wrong), Count { active: 1, waitlisted: 0, version: 5 })];
    let done = async |asked: Asked, wanted: &[(Uuid, i64)]| {
        let run = begin(db, asked, chrono::Utc::now()).await.unwrap();
        let parts = stated(db, run).await;
        assert_eq!(parts.len(), 1);
        let events = parts[0]["events"].as_array().unwrap();
        assert!(events.contains(&json!([wrong["id"], 2, "published", 5, 7])), "{parts:?}");
        assert!(events.len() == 2 && !events.iter().any(|event| event[0] == draft["id"]), "{parts:?}");
        assert_eq!(progress(db, run).await.unwrap().unwrap().finished_at, None, "nobody has answered");
        answer(db, &parts[0], &truth, wanted).await;
        drain("the run ends", PATIENCE, async || {
            progress(db, run).await.unwrap().filter(|progress| progress.finished_at.is_some())
        })
        .await
    };
    let wanted = [(id(&wrong), 2), (id(&set_back), 9)];
    let looked = done(Asked { dry_run: true, force: false }, &wanted).await;
    assert_eq!((looked.checked, looked.drifted, looked.repaired), (2, 1, 0), "answered twice, counted once");
    assert_eq!((looked.joins_drifted, looked.joins_repaired), (1, 0), "{looked:?}");
    assert_eq!((restated(db, &wrong).await, restated(db, &set_back).await), (vec![], vec![]));

    let repaired = done(Asked::default(), &wanted).await;
    assert_eq!((repaired.drifted, repaired.repaired), (1, 1));
    assert_eq!((repaired.joins_drifted, repaired.joins_repaired), (1, 1));
    assert_eq!(restated(db, &wrong).await, [(2, 7, 5)], "as it is, once");
    assert_eq!(restated(db, &set_back).await, [(10, 0, 0)], "above what is known of it");
    assert_eq!(count_of(db, id(&wrong)).await, (7, 5), "until it is counted anew");
    say(db, "joins", &[joined(id(&wrong), 1, 6)]).await;
    until_counted(db, id(&wrong), (1, 6)).await;
    let tag = world.app.anyone().get(&path(&set_back)).await.header("etag").to_owned();
    assert_eq!(tag, "\"10.0\"");
    let metrics = world.app.anyone().get("/metrics").await.text;
    for service in ["events", "joins"] {
        let drift = format!("pillarbox_reconcile_drift_total{{service=\"{service}\"}}");
        assert!(metrics.contains(&drift), "{drift}: {metrics}");
    }
    world.app.stop().await;
}

#[tokio::test]
async fn a_forced_run_gives_new_versions() {
    use events::reconcile::{Asked, begin};
    let world = World::start_with(never_by_time).await;
    let event = published(&world.owner, meetup()).await;
    let db = world.db();
    let run = begin(db, Asked { dry_run: false, force: true }, chrono::Utc::now()).await.unwrap();
    let parts = stated(db, run).await;
    answer(db, &parts[0], &[], &[(id(&event), 2)]).await;
    drain("it is said again", PATIENCE, async || match restated(db, &event).await.as_slice() {
        [(3, 0, 0)] => Ok(()),
        other => Err(other.to_vec()),
    })
    .await;
    world.app.stop().await;
}

#[tokio::test]
async fn a_large_run_is_stated_in_few_words_and_none_is_left_out() {
    let world = World::start_with(never_by_time).await;
    sqlx::query(
        "insert into pillarbox_events.event (id, owner_id, title, description, city, city_norm, category, category_norm,
             start_time, end_time, time_zone, capacity, status, cover_image_ids, published_at, created_at, updated_at)
         select gen_random_uuid(), gen_random_uuid(), repeat('é', 200), '', 'x', 'x', 'x', 'x', now(), now() + interval '1 day',
             'UTC', 0, 'published', '{}', now(), now(), now() from generate_series(1, 1200)",
    )
    .execute(world.db())
    .await
    .unwrap();
    let run =
        events::reconcile::begin(world.db(), events::reconcile::Asked::default(), chrono::Utc::now()).await.unwrap();
    let parts = stated(world.db(), run).await;
    let sizes: Vec<usize> = parts.iter().map(|part| part["events"].as_array().unwrap().len()).collect();
    assert_eq!(sizes, [500, 500, 200]);
    let bytes: usize = parts.iter().map(|part| part.to_string().len()).sum();
    assert!(bytes < 1_200 * 70, "{bytes} bytes");
    let found = events::reconcile::progress(world.db(), run).await.unwrap().unwrap();
    assert_eq!(found.parts, Some(3));
    world.app.stop().await;
}

#[tokio::test]
async fn the_command_waits_for_the_answer_and_fails_without_one() {
    let world = World::start_with(never_by_time).await;
    let event = published(&world.owner, meetup()).await;
    let url = world.database.url();
    let command = async |args: &[&str]| {
        let args: Vec<String> =
            [&["reconcile", "--database-url", &url], args].concat().iter().map(|arg| (*arg).to_owned()).collect();
        tokio::task::spawn_blocking(move || run(&args.iter().map(String::as_str).collect::<Vec<_>>(), &[]))
            .await
            .unwrap()
    };
    let (code, out, error) = command(&["--dry-run", "--wait-seconds", "1"]).await;
    assert_eq!(code, Some(1), "{out} {error}");
    assert!(error.contains("no answer"), "{error}");
    let db = world.db();
    let joins = async {
        let run: Uuid = drain("a run that nobody answered", PATIENCE, async || {
            let query = "select run from pillarbox_events.reconciliation where not dry_run and finished_at is null and parts > 0";
            sqlx::query_scalar(query).fetch_optional(db).await.unwrap()
        })
        .await;
        for part in stated(db, run).await {
            answer(db, &part, &[(id(&event), Count { active: 2, waitlisted: 0, version: 6 })], &[]).await;
        }
    };
    let ((code, out, error), ()) = tokio::join!(command(&[]), joins);
    assert_eq!(code, Some(0), "{out} {error}");
    assert!(out.contains("1 drifted") && out.contains("1 repaired"), "{out}");
    world.app.stop().await;
}

#[tokio::test]
async fn by_time_one_process_reconciles_for_all() {
    let world = World::start().await;
    let others = [replica(&world.database).await, replica(&world.database).await];
    let runs = async || {
        sqlx::query_scalar::<_, i64>("select count(*) from pillarbox_events.reconciliation")
            .fetch_one(world.db())
            .await
            .unwrap()
    };
    drain("a first run", PATIENCE, async || runs().await == 1).await;
    for app in others {
        app.stop().await;
    }
    assert_eq!(runs().await, 1);
    world.app.stop().await;
}

#[tokio::test]
async fn a_look_or_a_run_that_broke_off_does_not_stand_for_the_repair() {
    let world = World::start_with(never_by_time).await;
    published(&world.owner, meetup()).await;
    let looked = events::reconcile::Asked { dry_run: true, force: false };
    events::reconcile::begin(world.db(), looked, chrono::Utc::now()).await.unwrap();
    sqlx::query(
        "insert into pillarbox_events.reconciliation (run, started_at, dry_run, force)
         values (gen_random_uuid(), now() - interval '10 minutes', false, false)",
    )
    .execute(world.db())
    .await
    .unwrap();
    let by_time = replica(&world.database).await;
    drain("a run by time", PATIENCE, async || {
        let query = "select count(*) from pillarbox_events.reconciliation where not dry_run and parts is not null";
        sqlx::query_scalar::<_, i64>(query).fetch_one(world.db()).await.unwrap() == 1
    })
    .await;
    by_time.stop().await;
    world.app.stop().await;
}
