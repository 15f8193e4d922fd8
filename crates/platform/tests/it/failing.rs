//! Handlers that fail: what is parked, what dies, and when a consumer stalls.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use mailbox::cursor::{Cursor, Kind, Start};
use mailbox::dead_letter::{self, Which};
use mailbox::filter::{Filter, Matching};
use mailbox::handler::{Handle, Handler, Handling};
use mailbox::log::Message;
use mailbox::post::{Post, post};
use mailbox::work::{Item, LaneError, LaneId, Work, Worked};
use sqlx::{Postgres, Transaction};
use testkit::drain;

use crate::consuming::{
    PATIENCE, Patient, Process, Recorder, SOURCE, count, database, effects, numbers, post_numbers, quick, raw,
    until_count, until_effects,
};

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
async fn a_stall_that_does_not_end_is_the_messages_fault_after_all() {
    /// Tries again at once what has stalled, and counts: the pauses between take minutes.
    struct Restless(Handle, Arc<AtomicU32>);
    impl Work for Restless {
        async fn run(&mut self, lane: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
            loop {
                match self.0.run(lane, items).await {
                    Err(LaneError::Work(_)) if self.1.fetch_add(1, Ordering::SeqCst) < 100 => {}
                    other => return other,
                }
            }
        }
    }
    let database = database().await;
    let db = database.pool();
    let handler = Recorder(|_: &Message, number| if number < 0 { Err("negative".into()) } else { Ok(()) });
    let (process, handler, stalls) = (Process::idle(db), Arc::new(handler), Arc::<AtomicU32>::default());
    let mut rhythm = quick();
    rhythm.lane.batch = 1_000; // all in one
    rhythm.lane.retry.first = Duration::from_secs(600);
    rhythm.lane.retry.longest = Duration::from_secs(600);
    let cursor = Cursor {
        consumer: "effects".to_owned(),
        kind: Kind::Handler,
        filter: Filter::matching(&Matching::topic("test.#")),
        start: Start::Beginning,
    };
    process.runtime.consume(&cursor, rhythm, || Restless(Handle::new(handler.clone()), stalls.clone()));
    for (parked, stalled) in [(30, 20), (60, 40)] {
        post_numbers(db, None, -30..0).await;
        until_count(db, "parked", parked).await;
        assert_eq!(stalls.load(Ordering::SeqCst), stalled, "each time as often, and then no more");
    }
    post_numbers(db, None, [1]).await;
    until_effects(db, 1).await;
    process.stop().await;
}

#[tokio::test]
async fn a_dead_letter_of_another_tenant_is_announced_without_its_content() {
    let database = database().await;
    let db = database.pool();
    let patient = Patient::hasty(db);
    for (tenant, secret) in [("main", "-1"), ("acme", "-41114111")] {
        let mut message = Post::new("test.posted", raw(secret));
        message.tenant = tenant.parse().unwrap();
        let mut tx = db.begin().await.unwrap();
        post(&mut tx, &SOURCE, &message).await.unwrap();
        tx.commit().await.unwrap();
    }
    until_count(db, "dead_letter", 2).await;
    patient.process.stop().await;
    let announced: Vec<(String, String, Option<String>, String)> = sqlx::query_as(
        "select dead.tenant, dead.payload::text, log.payload->>'payload', log.payload::text
         from pillarbox.log join pillarbox.dead_letter dead on log.payload->>'event_id' = 'evt_' || dead.message_id
         where log.topic = 'dead_letter.effects' and log.source = 'mailbox' and log.tenant = 'main'
         order by dead.tenant",
    )
    .fetch_all(db)
    .await
    .unwrap();
    let [(_, acmes, acmes_told, all_told), (_, mains, mains_told, _)] = announced.as_slice() else {
        panic!("both are announced: {announced:?}")
    };
    assert_eq!((acmes.as_str(), acmes_told), ("-41114111", &None), "it stays with the dead letter");
    assert!(!all_told.contains("4111"), "{all_told}");
    assert_eq!((mains.as_str(), mains_told.as_deref()), ("-1", Some("-1")));
}
