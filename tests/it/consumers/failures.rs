//! Handlers that fail: parked messages, dead letters, and consumers that stall.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pillarbox::consumers::{
    BatchResult, Consumer, ConsumerError, ConsumerKind, Delivery, Handler, HandlerFuture, HandlerProcessor, Processor,
    StartAt, WorkerContext,
};
use pillarbox::database::Database;
use pillarbox::log::{Filter, Message, MessagePattern, Post, post};
use pillarbox::operations::dead_letters::{self, Selection};
use sqlx::{Postgres, Transaction};
use testkit::eventually;

use crate::consumers::support::{
    FailingConsumer, Process, Recorder, SOURCE, TIMEOUT, count, database, effects, fast_options, numbers, post_numbers,
    raw, wait_for_count, wait_for_effects,
};

#[tokio::test]
async fn a_message_that_fails_twice_delays_only_its_key() {
    let database = database().await;
    let db = database.pool();
    let attempts = Arc::new(AtomicU32::new(0));
    let tried = attempts.clone();
    let handler = Recorder(move |message: &Message, number| match (message.key.as_deref(), number) {
        // A failure in a batch is repeated message by message as part of the same attempt: two attempts are three calls.
        (Some("bad"), 1) if tried.fetch_add(1, Ordering::SeqCst) < 3 => Err("not yet".into()),
        _ => Ok(()),
    });
    // More than one batch of messages waits behind the parked one.
    post_numbers(db, Some("bad"), 1..=100).await;
    post_numbers(db, Some("good"), 1..=5).await;
    // The first retry comes long after the other key is processed, also on a loaded machine.
    let mut options = fast_options();
    options.worker.retry.backoff.first = Duration::from_secs(2);
    options.worker.retry.backoff.max = Duration::from_secs(2);
    let process = Process::start_with(db, Arc::new(handler), StartAt::Beginning, options);
    wait_for_effects(db, 105).await;
    wait_for_count(db, "parked", 0).await;
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
async fn a_poison_message_becomes_a_dead_letter_and_can_be_retried() {
    let database = database().await;
    let db = database.pool();
    let is_fixed = Arc::new(AtomicU32::new(0));
    let handler_is_fixed = is_fixed.clone();
    let handler = Recorder(move |_: &Message, number| match number {
        2 if handler_is_fixed.load(Ordering::SeqCst) == 0 => panic!("cannot read this"),
        _ => Ok(()),
    });
    post_numbers(db, Some("k"), 1..=4).await;
    let process = Process::start(db, Arc::new(handler));
    wait_for_count(db, "dead_letter", 1).await;
    wait_for_effects(db, 3).await;
    assert_eq!(numbers(db).await, [1, 3, 4]);
    let dead = dead_letters::list(db, &Selection::default(), None, 10).await.unwrap();
    assert_eq!((dead[0].consumer.as_str(), dead[0].attempts, dead[0].message.payload.get()), ("effects", 4, "2"));
    assert!(dead[0].last_error.contains("cannot read this"), "{}", dead[0].last_error);
    let announced: String = sqlx::query_scalar(
        "select payload->>'error' from pillarbox.log where topic = 'dead_letter.effects' and source = 'pillarbox'",
    )
    .fetch_one(db)
    .await
    .unwrap();
    assert!(announced.contains("cannot read this"));

    let other = Selection { consumer: Some("missing".to_owned()), ..Selection::default() };
    assert_eq!(dead_letters::retry(db, &other, 10).await.unwrap(), 0);
    is_fixed.store(1, Ordering::SeqCst);
    let topic = Selection { topic: Some("test".to_owned()), ..Selection::default() };
    assert_eq!(dead_letters::retry(db, &topic, 10).await.unwrap(), 1);
    wait_for_effects(db, 4).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 3, 4, 2]);
    assert_eq!((count(db, "dead_letter").await, count(db, "parked").await), (0, 0));
}

#[tokio::test]
async fn a_handler_that_hides_an_aborted_transaction_fails() {
    struct Hides;
    impl Handler for Hides {
        fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
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
    wait_for_count(db, "dead_letter", 1).await;
    wait_for_effects(db, 2).await;
    // The same for a batch of one message.
    post_numbers(db, Some("alone"), [2]).await;
    wait_for_count(db, "dead_letter", 2).await;
    post_numbers(db, Some("alone"), [4]).await;
    wait_for_effects(db, 3).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 3, 4], "every other message has one effect");
}

#[tokio::test]
async fn a_consumer_stalls_if_nearly_all_messages_fail() {
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
    eventually("the health report names the stall", TIMEOUT, async || {
        process.health.report().iter().any(|state| state.error.as_ref().is_some_and(|error| error.contains("is away")))
    })
    .await;
    assert_eq!((count(db, "parked").await, count(db, "dead_letter").await), (0, 0));
    is_away.store(0, Ordering::SeqCst);
    wait_for_effects(db, 30).await;
    process.stop().await;
    assert_eq!(numbers(db).await.into_iter().collect::<HashSet<_>>().len(), 30);
    assert_eq!(effects(db).await.len(), 30, "each once");
}

#[tokio::test]
async fn a_stall_that_does_not_end_parks_the_messages() {
    /// Repeats a stalled batch at once and counts the stalls: the regular pauses between them last minutes.
    struct Restless(HandlerProcessor, Arc<AtomicU32>);
    impl Processor for Restless {
        async fn process(
            &mut self,
            context: &WorkerContext,
            items: &[&Delivery],
        ) -> Result<BatchResult, ConsumerError> {
            loop {
                match self.0.process(context, items).await {
                    Err(ConsumerError::Processing(_)) if self.1.fetch_add(1, Ordering::SeqCst) < 100 => {}
                    other => return other,
                }
            }
        }
    }
    let database = database().await;
    let db = database.pool();
    let handler = Recorder(|_: &Message, number| if number < 0 { Err("negative".into()) } else { Ok(()) });
    let (process, handler, stalls) = (Process::idle(db), Arc::new(handler), Arc::<AtomicU32>::default());
    let mut options = fast_options();
    options.worker.batch = 1_000; // all messages in one batch
    options.worker.retry.backoff.first = Duration::from_secs(600);
    options.worker.retry.backoff.max = Duration::from_secs(600);
    let cursor = Consumer {
        name: "effects".to_owned(),
        kind: ConsumerKind::Handler,
        filter: Filter::matching(&MessagePattern::topic("test.#")),
        start: StartAt::Beginning,
    };
    process.runtime.consume(&cursor, options, || Restless(HandlerProcessor::new(handler.clone()), stalls.clone()));
    for (parked, stalled) in [(30, 20), (60, 40)] {
        post_numbers(db, None, -30..0).await;
        wait_for_count(db, "parked", parked).await;
        assert_eq!(stalls.load(Ordering::SeqCst), stalled, "the number of stalls is bounded");
    }
    post_numbers(db, None, [1]).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
}

#[tokio::test]
async fn a_dead_letter_of_another_tenant_is_announced_without_content() {
    let database = database().await;
    let db = database.pool();
    let consumer = FailingConsumer::without_retries(db);
    for (tenant, secret) in [("main", "-1"), ("acme", "-41114111")] {
        let mut message = Post::new("test.posted", raw(secret));
        message.tenant = tenant.parse().unwrap();
        let mut tx = db.begin().await.unwrap();
        post(&mut tx, &SOURCE, &message).await.unwrap();
        tx.commit().await.unwrap();
    }
    wait_for_count(db, "dead_letter", 2).await;
    consumer.process.stop().await;
    let announced: Vec<(String, String, Option<String>, String)> = sqlx::query_as(
        "select dead.tenant, dead.payload::text, log.payload->>'payload', log.payload::text
         from pillarbox.log join pillarbox.dead_letter dead on log.payload->>'event_id' = 'evt_' || dead.message_id
         where log.topic = 'dead_letter.effects' and log.source = 'pillarbox' and log.tenant = 'main'
         order by dead.tenant",
    )
    .fetch_all(db)
    .await
    .unwrap();
    let [(_, acmes, acmes_told, all_told), (_, mains, mains_told, _)] = announced.as_slice() else {
        panic!("expected two announcements: {announced:?}")
    };
    assert_eq!((acmes.as_str(), acmes_told), ("-41114111", &None), "only the dead letter contains the error");
    assert!(!all_told.contains("4111"), "{all_told}");
    assert_eq!((mains.as_str(), mains_told.as_deref()), ("-1", Some("-1")));
}

#[tokio::test]
async fn a_message_that_is_too_slow_twice_is_parked_and_stops_no_other() {
    struct Hangs;
    impl Handler for Hangs {
        fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
            Box::pin(async move {
                if message.payload.get() == "1" {
                    std::future::pending::<()>().await;
                }
                let insert = "insert into effect (number) values ($1::text::bigint)";
                sqlx::query(insert).bind(message.payload.get()).execute(&mut **tx).await?;
                Ok(())
            })
        }

        fn needs_separate_transaction(&self) -> bool {
            true
        }
    }
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("slow"), 1..=2).await;
    post_numbers(db, Some("other"), 3..=4).await;
    let mut options = fast_options();
    options.worker.retry.backoff.first = Duration::from_secs(600);
    options.worker.retry.backoff.max = Duration::from_secs(600);
    // A step takes at most two seconds then.
    let hasty = Database::new(db.clone()).with_statement_timeout(Duration::ZERO);
    let process = Process::start_on(hasty, Arc::new(Hangs), StartAt::Beginning, options);
    wait_for_effects(db, 2).await;
    wait_for_count(db, "parked", 2).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [3, 4]);
    let parked = "select last_error from pillarbox.parked where last_error is not null";
    let errors: Vec<String> = sqlx::query_scalar(parked).fetch_all(db).await.unwrap();
    assert!(errors.len() == 1 && errors[0].contains("its processing takes too long"), "{errors:?}");
}

/// Posts a copy of the only message of the log under the same id, with another key and number. Nothing does that; but if it
/// happens, no message may vanish.
async fn post_with_the_same_id(db: &sqlx::PgPool, key: &str, number: i64) {
    let query = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, payload)
                 select pillarbox.shard_of(tenant, $1), message_id, source, tenant, topic, $1, to_json($2)
                 from pillarbox.log where topic = 'test.posted' limit 1";
    sqlx::query(query).bind(key).bind(number).execute(db).await.unwrap();
}

#[tokio::test]
async fn a_message_that_fails_while_another_one_with_its_id_is_parked_becomes_a_dead_letter() {
    let database = database().await;
    let db = database.pool();
    let consumer = FailingConsumer::with_slow_retries(db);
    post_numbers(db, Some("first"), [-1]).await;
    wait_for_count(db, "parked", 1).await;
    post_with_the_same_id(db, "second", -2).await;
    wait_for_count(db, "dead_letter", 1).await;
    let statuses = async || -> Vec<(String, String)> {
        let query =
            "select log.payload::text, status from pillarbox.outbox_status join pillarbox.log on log.id = log_id
                     where consumer = 'effects' order by log_id";
        sqlx::query_as(query).fetch_all(db).await.unwrap()
    };
    let expected = [("-1", "parked"), ("-2", "dead")].map(|(number, status)| (number.to_owned(), status.to_owned()));
    assert_eq!(statuses().await, expected);
    let announced = "select count(*) from pillarbox.log where topic = 'dead_letter.effects'";
    assert_eq!(sqlx::query_scalar::<_, i64>(announced).fetch_one(db).await.unwrap(), 1);
    // As long as the other one is parked, it stays where it is.
    assert_eq!(dead_letters::retry(db, &Selection::default(), 10).await.unwrap(), 0);
    let dead = dead_letters::list(db, &Selection::default(), None, 10).await.unwrap();
    assert_eq!((dead[0].message.payload.get(), dead[0].message.key.as_deref()), ("-2", Some("second")));
    assert!(dead[0].last_error.contains("same id"), "{}", dead[0].last_error);
    // A dead letter of the same message has no second one.
    consumer.process.stop().await;
    sqlx::query("delete from pillarbox.parked").execute(db).await.unwrap();
    assert_eq!(dead_letters::retry(db, &Selection::default(), 10).await.unwrap(), 1);
    assert_eq!((count(db, "parked").await, count(db, "dead_letter").await), (1, 0));
}

#[tokio::test]
async fn without_retries_two_messages_with_the_same_id_are_two_dead_letters() {
    let database = database().await;
    let db = database.pool();
    let consumer = FailingConsumer::without_retries(db);
    post_numbers(db, Some("first"), [-1]).await;
    wait_for_count(db, "dead_letter", 1).await;
    post_with_the_same_id(db, "second", -2).await;
    wait_for_count(db, "dead_letter", 2).await;
    consumer.process.stop().await;
    // A retry parks one of them, and does not delete the other.
    assert_eq!(dead_letters::retry(db, &Selection::default(), 10).await.unwrap(), 1);
    assert_eq!((count(db, "parked").await, count(db, "dead_letter").await), (1, 1));
}
