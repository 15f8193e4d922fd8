//! Consumers with handlers, on the library itself: the services' subscriptions run in the same lanes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use chrono::Utc;
use mailbox::cursor::{self, Cursor, Dropped, Kind, Start};
use mailbox::dead_letter::{self, Which};
use mailbox::filter::{Filter, Matching};
use mailbox::handler::{Handler, Handling};
use mailbox::home::{self, Recover};
use mailbox::log::Message;
use mailbox::maintain::{self, Keep};
use mailbox::replay;
use mailbox::status;
use mailbox::work::{Item, LaneError, LaneId, Outcome, Work, Worked};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{FaultProxy, TestDatabase, drain};

use crate::consuming::{
    PATIENCE, Process, Recorder, copy_database, count, database, effects, numbers, post_numbers, quick, recorder,
    until_count, until_effects, until_replays_are_done,
};

#[tokio::test]
async fn every_message_takes_effect_once_and_in_the_order_of_its_key() {
    let database = database().await;
    let db = database.pool();
    let processes: Vec<Process> = (0..3).map(|_| Process::start(db, recorder())).collect();
    for round in 0..20 {
        for key in 0..10 {
            post_numbers(db, Some(&format!("key{key}")), round * 5..(round + 1) * 5).await;
        }
    }
    until_effects(db, 1_000).await;
    for process in processes {
        process.stop().await;
    }
    let mut by_key: HashMap<String, Vec<i64>> = HashMap::new();
    for (key, number) in effects(db).await {
        by_key.entry(key.unwrap()).or_default().push(number);
    }
    assert_eq!(by_key.len(), 10);
    assert!(by_key.values().all(|numbers| *numbers == (0..100).collect::<Vec<_>>()), "{by_key:?}");
    assert_eq!(count(db, "inbox").await, 1_000);
    assert_eq!(count(db, "lane").await, 0, "who stops gives up its leases");
}

#[tokio::test]
async fn a_consumer_sees_only_what_it_trusts_and_begins_where_it_says() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, None, [1]).await;
    let process = Process::start_with(db, recorder(), Start::Now, quick());
    until_count(db, "lane", 1).await;
    sqlx::query("select pillarbox.post('test.posted', '2')").execute(db).await.unwrap();
    post_numbers(db, None, [3]).await;
    until_effects(db, 1).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [3], "not what was there before, and not what another source posted");
    // It keeps its place: what is posted while nobody works is not lost to a start at `now`.
    post_numbers(db, None, [4]).await;
    let process = Process::start_with(db, recorder(), Start::Now, quick());
    until_effects(db, 2).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [3, 4]);
}

#[tokio::test]
async fn a_handler_that_fails_twice_and_then_works_takes_effect_once_and_holds_up_only_its_key() {
    let database = database().await;
    let db = database.pool();
    let attempts = Arc::new(AtomicU32::new(0));
    let tried = attempts.clone();
    let handler = Recorder(move |message: &Message, number| match (message.key.as_deref(), number) {
        // In a batch and again one by one is one attempt, so of the calls the first two attempts are three.
        (Some("bad"), 1) if tried.fetch_add(1, Ordering::SeqCst) < 3 => Err("not yet".into()),
        _ => Ok(()),
    });
    // More than a batch: what waits is run in several.
    post_numbers(db, Some("bad"), 1..=100).await;
    post_numbers(db, Some("good"), 1..=5).await;
    let process = Process::start(db, Arc::new(handler));
    until_effects(db, 105).await;
    until_count(db, "parked", 0).await;
    process.stop().await;
    let of = |all: &[(Option<String>, i64)], key: &str| -> Vec<i64> {
        all.iter().filter(|(of, _)| of.as_deref() == Some(key)).map(|(_, number)| *number).collect()
    };
    let all = effects(db).await;
    assert_eq!(of(&all, "bad"), (1..=100).collect::<Vec<_>>(), "in order, each once");
    assert_eq!(of(&all, "good"), [1, 2, 3, 4, 5]);
    let first_bad = all.iter().position(|(key, _)| key.as_deref() == Some("bad")).unwrap();
    assert_eq!(first_bad, 5, "the other key did not wait: {all:?}");
    assert_eq!(count(db, "dead_letter").await, 0);
}

#[tokio::test]
async fn a_poison_message_dies_after_three_retries_frees_its_key_and_can_be_tried_again() {
    let database = database().await;
    let db = database.pool();
    let cured = Arc::new(AtomicU32::new(0));
    let is_cured = cured.clone();
    let handler = Recorder(move |_: &Message, number| match number {
        2 if is_cured.load(Ordering::SeqCst) == 0 => panic!("cannot read this"),
        _ => Ok(()),
    });
    post_numbers(db, Some("k"), 1..=4).await;
    let process = Process::start(db, Arc::new(handler));
    until_count(db, "dead_letter", 1).await;
    until_effects(db, 3).await;
    assert_eq!(numbers(db).await, [1, 3, 4]);
    let dead = dead_letter::list(db, &Which::default(), None, 10).await.unwrap();
    assert_eq!((dead[0].consumer.as_str(), dead[0].attempts, dead[0].message.payload.get()), ("effects", 4, "2"));
    assert!(dead[0].last_error.contains("cannot read this"), "{}", dead[0].last_error);
    let announced: String = sqlx::query_scalar(
        "select payload->>'error' from pillarbox.log where topic = 'dead_letter.effects' and source = 'mailbox'",
    )
    .fetch_one(db)
    .await
    .unwrap();
    assert!(announced.contains("cannot read this"));

    let other = Which { consumer: Some("nobody".to_owned()), ..Which::default() };
    assert_eq!(dead_letter::retry(db, &other, 10).await.unwrap(), 0);
    cured.store(1, Ordering::SeqCst);
    let topic = Which { topic: Some("test".to_owned()), ..Which::default() };
    assert_eq!(dead_letter::retry(db, &topic, 10).await.unwrap(), 1);
    until_effects(db, 4).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 3, 4, 2]);
    assert_eq!((count(db, "dead_letter").await, count(db, "parked").await), (0, 0));
}

#[tokio::test]
async fn a_handler_that_breaks_its_transaction_and_hides_it_is_found() {
    struct Hides;
    impl Handler for Hides {
        fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
            Box::pin(async move {
                if message.payload.get() == "2" {
                    let _ = sqlx::query("select 1 / 0").execute(&mut **tx).await;
                    return Ok(());
                }
                let insert = "insert into effect (number) values ($1::text::bigint)";
                sqlx::query(insert).bind(message.payload.get()).execute(&mut **tx).await?;
                Ok(())
            })
        }
    }
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, Arc::new(Hides));
    until_count(db, "dead_letter", 1).await;
    until_effects(db, 2).await;
    // Alone in its batch, too.
    post_numbers(db, Some("alone"), [2]).await;
    until_count(db, "dead_letter", 2).await;
    post_numbers(db, Some("alone"), [4]).await;
    until_effects(db, 3).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 3, 4], "the others took effect, once");
}

#[tokio::test]
async fn a_message_that_is_in_the_log_twice_takes_effect_once() {
    let database = database().await;
    let db = database.pool();
    let id = uuid::Uuid::now_v7();
    let payload = serde_json::value::RawValue::from_string("7".to_owned()).unwrap();
    let mut message = mailbox::post::Post::new("test.posted", payload);
    message.id = Some(id);
    let mut tx = db.begin().await.unwrap();
    let source = mailbox::post::Source::new("test");
    mailbox::post::post_all(&mut tx, &source, &[message.clone(), message]).await.unwrap();
    tx.commit().await.unwrap();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [8]).await;
    drain("both are read", PATIENCE, async || numbers(db).await.contains(&8) && numbers(db).await.contains(&7)).await;
    process.stop().await;
    assert_eq!(effects(db).await.len(), 2);
}

#[tokio::test]
async fn when_nearly_all_fail_the_consumer_stalls_and_parks_nothing() {
    let database = database().await;
    let db = database.pool();
    let is_away = Arc::new(AtomicU32::new(1));
    let away = is_away.clone();
    let handler = Recorder(move |_: &Message, _| match away.load(Ordering::SeqCst) {
        1 => Err("the other service is away".into()),
        _ => Ok(()),
    });
    for number in 0..30 {
        post_numbers(db, Some(&format!("key{number}")), [number]).await;
    }
    let process = Process::start(db, Arc::new(handler));
    drain("health says so", PATIENCE, async || {
        process.health.report().iter().any(|state| state.error.as_ref().is_some_and(|error| error.contains("is away")))
    })
    .await;
    assert_eq!((count(db, "parked").await, count(db, "dead_letter").await), (0, 0));
    is_away.store(0, Ordering::SeqCst);
    until_effects(db, 30).await;
    process.stop().await;
    assert_eq!(numbers(db).await.into_iter().collect::<HashSet<_>>().len(), 30);
    assert_eq!(effects(db).await.len(), 30, "each once");
}

#[tokio::test]
async fn a_replay_repairs_and_again_repeats() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, recorder());
    until_effects(db, 3).await;
    // A fault ate an effect, and the operator removed what says that it happened.
    sqlx::query("delete from effect where number = 2").execute(db).await.unwrap();
    sqlx::query("delete from pillarbox.inbox where message_id = (select message_id from pillarbox.log where payload::text = '2')")
        .execute(db)
        .await
        .unwrap();
    let (from, to) = (Utc::now() - chrono::Duration::hours(1), Utc::now() + chrono::Duration::hours(1));
    let mut request = replay::Request { consumer: "effects".to_owned(), from, to, again: false };
    assert!(replay::request(db, &request).await.unwrap().is_some());
    until_effects(db, 3).await;
    until_replays_are_done(db).await;
    assert_eq!(numbers(db).await, [1, 3, 2], "only what was missing");

    request.again = true;
    replay::request(db, &request).await.unwrap();
    until_effects(db, 6).await;
    until_replays_are_done(db).await;
    assert_eq!(numbers(db).await[3..], [1, 2, 3], "all of it, in order");
    request.from = to;
    request.to = to + chrono::Duration::hours(1);
    replay::request(db, &request).await.unwrap();
    until_replays_are_done(db).await;
    process.stop().await;
    assert_eq!(effects(db).await.len(), 6, "nothing outside the range");
    request.consumer = "nobody".to_owned();
    assert!(replay::request(db, &request).await.unwrap().is_none());
}

#[tokio::test]
async fn a_replay_covers_what_was_read_of_a_window_that_is_still_open() {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), 1..=3).await;
    let process = Process::start(db, recorder());
    until_effects(db, 3).await;
    process.stop().await;
    // Where a chunk leaves a reader that brought just as much as it was asked for.
    sqlx::query(
        "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
         select 'effects', array_agg(shard::smallint), array_fill((select max(id) from pillarbox.log), array[16]),
                '3:3:', 0, now(), pg_current_snapshot(), 0, now()
         from generate_series(0, 15) as shard",
    )
    .execute(db)
    .await
    .unwrap();
    let from = Utc::now() - chrono::Duration::hours(1);
    let request = replay::Request { consumer: "effects".to_owned(), from, to: Utc::now(), again: true };
    replay::request(db, &request).await.unwrap();
    let process = Process::start(db, recorder());
    until_replays_are_done(db).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 2, 3, 1, 2, 3]);
}

/// Remembers what it was given; can be held up between the doing and the keeping, as a process is that stands still.
struct Sink {
    seen: Arc<std::sync::Mutex<Vec<i64>>>,
    gate: Arc<tokio::sync::RwLock<()>>,
}

impl Work for Sink {
    async fn run(&mut self, _: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
        let numbers = items.iter().map(|item| item.message.payload.get().parse::<i64>().unwrap());
        self.seen.lock().unwrap().extend(numbers);
        drop(self.gate.read().await);
        Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: None })
    }
}

#[tokio::test]
async fn work_that_panics_loses_nothing() {
    struct Clumsy(Arc<std::sync::Mutex<Vec<i64>>>, bool);
    impl Work for Clumsy {
        async fn run(&mut self, _: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
            assert!(std::mem::replace(&mut self.1, true), "the first time");
            self.0.lock().unwrap().extend(items.iter().map(|item| item.message.payload.get().parse::<i64>().unwrap()));
            Ok(Worked { outcomes: vec![Outcome::Done; items.len()], tx: None })
        }
    }
    let database = database().await;
    let db = database.pool();
    let (process, seen) = (Process::idle(db), Arc::<std::sync::Mutex<Vec<i64>>>::default());
    let cursor = Cursor {
        consumer: "clumsy".to_owned(),
        kind: Kind::Relay,
        filter: Filter::matching(&Matching::topic("test.#")),
        start: Start::Beginning,
    };
    process.runtime.consume(&cursor, quick(), || Clumsy(seen.clone(), false));
    post_numbers(db, Some("k"), 1..=3).await;
    drain("all of them", PATIENCE, async || *seen.lock().unwrap() == [1, 2, 3]).await;
    process.stop().await;
}

#[tokio::test]
async fn a_paused_owner_that_wakes_late_keeps_nothing() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let slow = PgPoolOptions::new().connect(&proxy.url(&database.url())).await.unwrap();
    let cursor = Cursor {
        consumer: "sink".to_owned(),
        kind: Kind::Relay,
        filter: Filter::matching(&Matching::topic("test.#")),
        start: Start::Beginning,
    };
    let begin = |db: &PgPool, gate: &Arc<tokio::sync::RwLock<()>>| {
        let (process, seen) = (Process::idle(db), Arc::default());
        process.runtime.consume(&cursor, quick(), || Sink { seen: Arc::clone(&seen), gate: gate.clone() });
        (process, seen)
    };
    let gate = Arc::<tokio::sync::RwLock<()>>::default();
    let held = gate.write().await;
    let (paused, paused_saw) = begin(&slow, &gate);
    post_numbers(db, Some("k"), 1..=3).await;
    drain("the first has begun", PATIENCE, async || !paused_saw.lock().unwrap().is_empty()).await;
    proxy.stall(); // neither its heartbeat nor anything else comes through
    let begun = paused_saw.lock().unwrap().clone();
    let open = Arc::default();
    let (second, second_saw) = begin(db, &open);
    drain("the second has taken over", PATIENCE, async || second_saw.lock().unwrap().len() == 3).await;
    post_numbers(db, Some("k"), [4]).await;
    drain("the second goes on", PATIENCE, async || second_saw.lock().unwrap().len() == 4).await;
    second.stop().await;
    // It wakes with everything done, and a place to keep that is long passed.
    drop(held);
    proxy.pass();
    drain("the late one is in again", PATIENCE, async || {
        let lanes = "select count(*) from pillarbox.lease where owner in (select owner from pillarbox.lane)";
        sqlx::query_scalar::<_, i64>(lanes).fetch_one(db).await.unwrap() == 16
    })
    .await;
    paused.stop().await;
    assert_eq!(*paused_saw.lock().unwrap(), begun, "nothing again, because its old place was not kept");
    let (third, third_saw) = begin(db, &open);
    post_numbers(db, Some("k"), [5]).await;
    drain("a third goes on", PATIENCE, async || !third_saw.lock().unwrap().is_empty()).await;
    third.stop().await;
    assert_eq!(*third_saw.lock().unwrap(), [5]);
}

#[tokio::test]
async fn shards_are_shared_out_evenly_and_what_a_silent_process_held_goes_on() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let slow = PgPoolOptions::new().connect(&proxy.url(&database.url())).await.unwrap();
    let processes = [Process::start(&slow, recorder()), Process::start(db, recorder()), Process::start(db, recorder())];
    let shares = async |db: &PgPool| -> Vec<i64> {
        let query = "select count(lease.shard) from pillarbox.lane left join pillarbox.lease using (owner) group by owner order by 1";
        sqlx::query_scalar(query).fetch_all(db).await.unwrap()
    };
    drain("an even share", PATIENCE, async || match shares(db).await {
        found if found == [4, 6, 6] => Ok(()),
        other => Err(other),
    })
    .await;
    // Nobody takes from who is alive.
    let changes = async |db: &PgPool| -> i64 {
        sqlx::query_scalar("select sum(epoch)::bigint from pillarbox.lease").fetch_one(db).await.unwrap()
    };
    let settled = changes(db).await;
    for number in 0..60 {
        post_numbers(db, None, [number]).await;
        tokio::time::sleep(Duration::from_millis(50)).await; // three rounds of sharing out
    }
    assert_eq!(changes(db).await, settled);
    proxy.stall();
    drain("the others have it all", PATIENCE, async || match shares(db).await {
        found if found == [8, 8] => Ok(()),
        other => Err(other),
    })
    .await;
    post_numbers(db, None, 60..110).await;
    until_effects(db, 110).await;
    proxy.pass();
    for process in processes {
        process.stop().await;
    }
    assert_eq!(effects(db).await.len(), 110);
}

#[tokio::test]
async fn a_restored_database_stays_silent_until_it_is_told_how_to_go_on() {
    for (way, expected) in
        [(Recover::Skip, vec![4]), (Recover::From(Utc::now() - chrono::Duration::hours(1)), vec![3, 4])]
    {
        let original = database().await;
        home::settle(original.pool()).await.unwrap();
        post_numbers(original.pool(), Some("k"), 1..=2).await;
        let process = Process::start(original.pool(), recorder());
        until_effects(original.pool(), 2).await;
        process.stop().await;
        post_numbers(original.pool(), Some("k"), [3]).await;

        let copy = TestDatabase::empty().await;
        copy_database(&original, &copy);
        let db = copy.pool();
        sqlx::query("truncate effect").execute(db).await.unwrap();
        home::settle(db).await.unwrap();
        let process = Process::start(db, recorder());
        post_numbers(db, Some("k"), [4]).await;
        drain("readiness says so", PATIENCE, async || {
            let down = |state: &kit::health::State| {
                state.required && state.error.as_ref().is_some_and(|error| error.contains("database-restored"))
            };
            process.health.report().iter().any(down)
        })
        .await;
        assert!(effects(db).await.is_empty());
        assert!(home::recover(db, way).await.unwrap());
        drain("it goes on", PATIENCE, async || match numbers(db).await {
            found if found.iter().copied().collect::<HashSet<_>>() == expected.iter().copied().collect() => Ok(()),
            other => Err(other),
        })
        .await;
        process.stop().await;
        assert_eq!(effects(db).await.len(), expected.len(), "each once: {way:?}");
        assert!(!home::recover(db, way).await.unwrap(), "told once");
    }
}

/// A day of the log that is long over.
async fn make_old_day(db: &PgPool, days_ago: i32, number: i64) -> String {
    let name: String = sqlx::query_scalar("select 'log_' || to_char(current_date - $1, 'YYYYMMDD')")
        .bind(days_ago)
        .fetch_one(db)
        .await
        .unwrap();
    let statements = format!(
        "create table pillarbox.{name} partition of pillarbox.log
             for values from (current_date - {days_ago}) to (current_date - {days_ago} + 1);
         insert into pillarbox.log (shard, message_id, source, tenant, topic, key, payload, at)
         values (3, pillarbox.uuid_v7(), 'test', 'main', 'test.posted', 'old', '{number}', current_date - {days_ago} + interval '1 hour')"
    );
    let statements = format!("set timezone = 'UTC'; {statements}; reset timezone");
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(db).await.unwrap();
    name
}

async fn exists(db: &PgPool, table: &str) -> bool {
    sqlx::query_scalar("select to_regclass('pillarbox.' || $1) is not null").bind(table).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn an_old_day_goes_when_every_consumer_has_passed_it_and_no_post_waits_for_that() {
    let database = database().await;
    let db = database.pool();
    let (old, recent) = (make_old_day(db, 10, 1).await, make_old_day(db, 3, 2).await);
    let process = Process::start(db, recorder());
    let behind = Cursor {
        consumer: "behind".to_owned(),
        kind: Kind::Handler,
        filter: Filter::everything(),
        start: Start::Beginning,
    };
    behind.register(db).await.unwrap();
    until_effects(db, 2).await;
    process.stop().await;
    maintain::round(db, Keep::default(), Utc::now()).await.unwrap();
    assert!(exists(db, &old).await, "one consumer has not read it");
    sqlx::query("delete from pillarbox.cursor where consumer = 'behind'").execute(db).await.unwrap();

    // The hour's margin, and a reader of another kind that keeps the table open.
    sqlx::query("update pillarbox.position set old_at = old_at + interval '2 hours'").execute(db).await.unwrap();
    let mut reader = db.begin().await.unwrap();
    sqlx::query("select count(*) from pillarbox.log").execute(&mut *reader).await.unwrap();
    let posting = async {
        let mut slowest = Duration::ZERO;
        for number in 0..100 {
            let began = std::time::Instant::now();
            post_numbers(db, None, [number]).await;
            slowest = slowest.max(began.elapsed());
        }
        slowest
    };
    let maintaining = async {
        for _ in 0..3 {
            maintain::round(db, Keep::default(), Utc::now()).await.unwrap();
        }
    };
    let (slowest, ()) = tokio::join!(posting, maintaining);
    assert!(slowest < Duration::from_secs(1), "a post took {slowest:?}");
    assert!(exists(db, &old).await, "a long reader has it");
    reader.rollback().await.unwrap();
    maintain::round(db, Keep::default(), Utc::now()).await.unwrap();
    assert!(!exists(db, &old).await);
    assert!(exists(db, &recent).await, "it is not old enough");
}

#[tokio::test]
async fn an_old_day_stays_while_a_replay_needs_it_or_nobody_has_said_how_a_restored_log_goes_on() {
    let database = database().await;
    let db = database.pool();
    home::settle(db).await.unwrap();
    let old = make_old_day(db, 10, 1).await;
    let keep = Keep::default();
    let mark = "update pillarbox.home set restored_at = ";
    sqlx::query(sqlx::AssertSqlSafe(format!("{mark} now()"))).execute(db).await.unwrap();
    maintain::round(db, keep, Utc::now()).await.unwrap();
    assert!(exists(db, &old).await, "its operator may still want it");
    sqlx::query(sqlx::AssertSqlSafe(format!("{mark} null"))).execute(db).await.unwrap();

    let idle =
        Cursor { consumer: "idle".to_owned(), kind: Kind::Handler, filter: Filter::everything(), start: Start::Now };
    idle.register(db).await.unwrap();
    sqlx::query("update pillarbox.position set old_at = old_at + interval '2 hours'").execute(db).await.unwrap();
    let from = Utc::now() - chrono::Duration::days(11);
    let request = replay::Request { consumer: "idle".to_owned(), from, to: Utc::now(), again: false };
    replay::request(db, &request).await.unwrap();
    maintain::round(db, keep, Utc::now()).await.unwrap();
    assert!(exists(db, &old).await, "a replay is to read it");
    sqlx::query("update pillarbox.replay_shard set done = true").execute(db).await.unwrap();
    maintain::round(db, keep, Utc::now()).await.unwrap();
    assert!(!exists(db, &old).await);
}

#[tokio::test]
async fn who_was_switched_off_for_long_and_has_nothing_to_read_does_not_lapse() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    until_effects(db, 1).await;
    process.stop().await;
    sqlx::raw_sql(
        "update pillarbox.cursor set since = since - interval '15 days';
         update pillarbox.position set old_at = old_at - interval '15 days'",
    )
    .execute(db)
    .await
    .unwrap();
    maintain::round(db, Keep::default(), Utc::now()).await.unwrap();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [2]).await;
    until_effects(db, 2).await;
    process.stop().await;
}

#[tokio::test]
async fn a_consumer_that_is_behind_for_too_long_lapses_and_is_reset_by_an_operator() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    post_numbers(db, None, [1]).await;
    until_effects(db, 1).await;
    process.stop().await;
    post_numbers(db, None, [2]).await;
    // As if the last it did was long ago.
    sqlx::raw_sql(
        "update pillarbox.cursor set since = since - interval '15 days';
         update pillarbox.position set old_at = old_at - interval '15 days'",
    )
    .execute(db)
    .await
    .unwrap();
    maintain::round(db, Keep::default(), Utc::now()).await.unwrap();
    let process = Process::start(db, recorder());
    drain("it says so", PATIENCE, async || {
        process
            .health
            .report()
            .iter()
            .any(|state| state.error.as_ref().is_some_and(|error| error.contains("cursors reset effects")))
    })
    .await;
    assert_eq!(numbers(db).await, [1]);
    assert!(cursor::reset(db, "effects", Some(Utc::now() - chrono::Duration::hours(1))).await.unwrap());
    post_numbers(db, None, [3]).await;
    until_effects(db, 3).await;
    assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::InUse);
    process.stop().await;
    let mut all = numbers(db).await;
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3], "what it had missed, and nothing twice");
    assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::Yes);
    assert_eq!(cursor::forget(db, "effects").await.unwrap(), Dropped::Unknown);
    assert!(!cursor::reset(db, "effects", None).await.unwrap());
}

#[tokio::test]
async fn what_each_consumer_made_of_each_message_can_be_looked_up() {
    let database = database().await;
    let db = database.pool();
    let handler = Recorder(|_: &Message, number| if number < 0 { Err("negative".into()) } else { Ok(()) });
    let mut rhythm = quick();
    rhythm.lane.retry.first = Duration::from_secs(600);
    rhythm.lane.retry.longest = Duration::from_secs(600);
    let process = Process::start_with(db, Arc::new(handler), Start::Beginning, rhythm);
    post_numbers(db, Some("a"), [1]).await;
    post_numbers(db, Some("b"), [-1, 2]).await;
    until_count(db, "parked", 2).await;
    // What comes later waits behind them.
    post_numbers(db, Some("b"), [5]).await;
    until_count(db, "parked", 3).await;
    process.stop().await;
    post_numbers(db, Some("c"), [3]).await;
    sqlx::query("select pillarbox.post('test.posted', '4')").execute(db).await.unwrap();
    let rows: Vec<(i64, String, bool, i32, Option<String>)> = sqlx::query_as(
        "select log.payload::text::bigint, status, sent_at >= created_at is true, attempts, last_error
         from pillarbox.outbox_status join pillarbox.log using (message_id) where consumer = 'effects' order by log.id",
    )
    .fetch_all(db)
    .await
    .unwrap();
    let row = |number: i64, status: &str, sent: bool, attempts, error: Option<&str>| {
        (number, status.to_owned(), sent, attempts, error.map(str::to_owned))
    };
    assert_eq!(
        rows,
        [
            row(1, "sent", true, 1, None),
            row(-1, "parked", false, 1, Some("negative")),
            row(2, "parked", false, 0, None),
            row(5, "parked", false, 0, None),
            row(3, "pending", false, 0, None)
        ]
    );
    let status = &status::consumers(db).await.unwrap()[0];
    assert_eq!((status.consumer.as_str(), status.parked, status.dead), ("effects", 3, 0));
    assert!(status.lag_messages >= 1 && status.lag_seconds > 0.0, "{status:?}");
}
