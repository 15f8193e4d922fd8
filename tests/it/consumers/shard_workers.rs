//! Shard workers: the distribution of shards, fencing, panics, and the size of batches.

use std::sync::Arc;
use std::time::Duration;

use pillarbox::consumers::{
    BatchResult, Consumer, ConsumerError, ConsumerKind, Delivery, Outcome, Processor, StartAt, WorkerContext,
};
use pillarbox::log::{Filter, MessagePattern};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool};
use testkit::{FaultProxy, TestDatabase, eventually};

use crate::consumers::support::{
    Process, TIMEOUT, count, database, effects, fast_options, post_numbers, recorder, wait_for_count, wait_for_effects,
};

/// Records the numbers it processes. The gate pauses it between processing and commit, like a suspended process.
pub(crate) struct Sink {
    pub(crate) seen: Arc<std::sync::Mutex<Vec<i64>>>,
    pub(crate) gate: Arc<tokio::sync::RwLock<()>>,
}

impl Processor for Sink {
    async fn process(&mut self, _: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        let numbers = items.iter().map(|item| item.message.payload.get().parse::<i64>().unwrap());
        self.seen.lock().unwrap().extend(numbers);
        drop(self.gate.read().await);
        Ok(BatchResult { outcomes: vec![Outcome::Done; items.len()], tx: None })
    }
}

#[tokio::test]
async fn a_panic_loses_no_message() {
    struct Clumsy(Arc<std::sync::Mutex<Vec<i64>>>, bool);
    impl Processor for Clumsy {
        async fn process(&mut self, _: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
            assert!(std::mem::replace(&mut self.1, true), "a panic at the first batch");
            self.0.lock().unwrap().extend(items.iter().map(|item| item.message.payload.get().parse::<i64>().unwrap()));
            Ok(BatchResult { outcomes: vec![Outcome::Done; items.len()], tx: None })
        }
    }
    let database = database().await;
    let db = database.pool();
    let (process, seen) = (Process::idle(db), Arc::<std::sync::Mutex<Vec<i64>>>::default());
    let cursor = Consumer {
        name: "clumsy".to_owned(),
        kind: ConsumerKind::Relay,
        filter: Filter::matching(&MessagePattern::topic("test.#")),
        start: StartAt::Beginning,
    };
    process.runtime.consume(&cursor, fast_options(), || Clumsy(seen.clone(), false));
    post_numbers(db, Some("k"), 1..=3).await;
    eventually("all messages are processed", TIMEOUT, async || *seen.lock().unwrap() == [1, 2, 3]).await;
    process.stop().await;
}

/// A connection whose claims of shards take long: they sort the free shards by `random()`, which is slow here.
async fn slow_connection(database: &TestDatabase) -> PgConnection {
    let slow = "create schema slow;
                create function slow.random() returns double precision language plpgsql volatile as
                $$ begin perform pg_sleep(0.02); return pg_catalog.random(); end $$";
    sqlx::raw_sql(slow).execute(database.pool()).await.unwrap();
    let mut db = PgConnection::connect_with(&database.connect_options()).await.unwrap();
    sqlx::query("set search_path = slow, pg_catalog, public").execute(&mut db).await.unwrap();
    db
}

#[tokio::test]
async fn a_worker_that_joins_while_another_one_claims_shards_shares_none_with_it() {
    let database = database().await;
    let (db, mut slow) = (database.pool(), slow_connection(&database).await);
    let process = Process::idle(db);
    let (mut first, mut second) = (process.runtime.shard_assignment("work"), process.runtime.shard_assignment("work"));
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut slow).await.unwrap();
    let claiming = tokio::spawn(async move { (first.rebalance(&mut slow).await, first, slow) });
    let is_claiming = "select count(*) from pg_stat_activity where pid = $1 and wait_event = 'PgSleep'";
    eventually("the first worker claims all shards", TIMEOUT, async || {
        sqlx::query_scalar::<_, i64>(is_claiming).bind(pid).fetch_one(db).await.unwrap() == 1
    })
    .await;
    let of_second = second.rebalance(&mut db.acquire().await.unwrap()).await.unwrap().unwrap();
    assert_eq!(of_second.len(), 8);
    let (of_first, mut first, mut slow) = claiming.await.unwrap();
    let of_first = of_first.unwrap().unwrap();
    assert_eq!(of_first.intersection(&of_second).collect::<Vec<_>>(), [&0; 0], "shards with two owners");
    assert_eq!(of_first.len(), 8, "the other shards");
    // What the database says later is the same.
    assert_eq!(first.rebalance(&mut slow).await.unwrap().unwrap(), of_first);
    process.stop().await;
}

#[tokio::test]
async fn a_late_heartbeat_costs_no_worker_its_shards_to_another_one_of_the_same_process() {
    let database = database().await;
    let db = database.pool();
    let process = Process::idle(db);
    let (mut first, mut second) = (process.runtime.shard_assignment("work"), process.runtime.shard_assignment("work"));
    let mut connection = db.acquire().await.unwrap();
    assert_eq!(first.rebalance(&mut connection).await.unwrap().unwrap().len(), 16);
    assert_eq!(second.rebalance(&mut connection).await.unwrap().unwrap().len(), 0);
    let fence = first.fence();
    // In one transaction, so that no heartbeat intervenes.
    let mut tx = db.begin().await.unwrap();
    let late = sqlx::query("update pillarbox.replica set until = now() - interval '1 s'").execute(&mut *tx).await;
    assert_eq!(late.unwrap().rows_affected(), 1);
    assert_eq!(second.rebalance(&mut tx).await.unwrap().unwrap().len(), 0);
    assert!(fence.lock(&mut tx).await.unwrap(), "the first worker is still there");
    tx.rollback().await.unwrap();
    process.stop().await;
}

#[tokio::test]
async fn a_former_owner_of_a_shard_cannot_commit() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let slow = PgPoolOptions::new().connect(&proxy.url(&database.url())).await.unwrap();
    let cursor = Consumer {
        name: "sink".to_owned(),
        kind: ConsumerKind::Relay,
        filter: Filter::matching(&MessagePattern::topic("test.#")),
        start: StartAt::Beginning,
    };
    let begin = |db: &PgPool, gate: &Arc<tokio::sync::RwLock<()>>| {
        let (process, seen) = (Process::idle(db), Arc::default());
        process.runtime.consume(&cursor, fast_options(), || Sink { seen: Arc::clone(&seen), gate: gate.clone() });
        (process, seen)
    };
    let gate = Arc::<tokio::sync::RwLock<()>>::default();
    let gate_closed = gate.write().await;
    let (paused, paused_saw) = begin(&slow, &gate);
    post_numbers(db, Some("k"), 1..=3).await;
    eventually("the first worker has started a batch", TIMEOUT, async || !paused_saw.lock().unwrap().is_empty()).await;
    proxy.stall(); // blocks its heartbeat and everything else
    let begun = paused_saw.lock().unwrap().clone();
    let open = Arc::default();
    let (second, second_saw) = begin(db, &open);
    eventually("the second worker has the shards", TIMEOUT, async || second_saw.lock().unwrap().len() == 3).await;
    post_numbers(db, Some("k"), [4]).await;
    eventually("the second worker processes the next message", TIMEOUT, async || second_saw.lock().unwrap().len() == 4)
        .await;
    second.stop().await;
    // The first worker resumes with a processed batch whose position is outdated.
    drop(gate_closed);
    proxy.pass();
    eventually("the first worker has joined again", TIMEOUT, async || {
        let lanes = "select count(*) from pillarbox.lease where owner in (select owner from pillarbox.shard_worker)";
        sqlx::query_scalar::<_, i64>(lanes).fetch_one(db).await.unwrap() == 16
    })
    .await;
    paused.stop().await;
    assert_eq!(
        *paused_saw.lock().unwrap(),
        begun,
        "its outdated position was not committed, so no message is repeated"
    );
    let (third, third_saw) = begin(db, &open);
    post_numbers(db, Some("k"), [5]).await;
    eventually("a third worker processes the next message", TIMEOUT, async || !third_saw.lock().unwrap().is_empty())
        .await;
    third.stop().await;
    assert_eq!(*third_saw.lock().unwrap(), [5]);
}

#[tokio::test]
async fn shards_are_balanced_and_a_dead_process_is_replaced() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    // As in production, but sooner: PostgreSQL ends a session that stalls inside a transaction, which frees its locks.
    let through_proxy: PgConnectOptions = proxy.url(&database.url()).parse().unwrap();
    let through_proxy = through_proxy.options([("idle_in_transaction_session_timeout", "2s")]);
    let slow = PgPoolOptions::new().connect_with(through_proxy).await.unwrap();
    let processes = [Process::start(&slow, recorder()), Process::start(db, recorder()), Process::start(db, recorder())];
    let shares = async |db: &PgPool| -> Vec<i64> {
        let query = "select count(lease.shard) from pillarbox.shard_worker left join pillarbox.lease using (owner) group by owner order by 1";
        sqlx::query_scalar(query).fetch_all(db).await.unwrap()
    };
    eventually("the shards are balanced", TIMEOUT, async || match shares(db).await {
        found if found == [4, 6, 6] => Ok(()),
        other => Err(other),
    })
    .await;
    // No shard moves away from a live worker.
    let changes = async |db: &PgPool| -> i64 {
        sqlx::query_scalar("select sum(epoch)::bigint from pillarbox.lease").fetch_one(db).await.unwrap()
    };
    let before = changes(db).await;
    for number in 0..60 {
        post_numbers(db, None, [number]).await;
        tokio::time::sleep(Duration::from_millis(50)).await; // three rounds of rebalancing
    }
    assert_eq!(changes(db).await, before);
    proxy.stall();
    eventually("the other workers have all shards", TIMEOUT, async || match shares(db).await {
        found if found == [8, 8] => Ok(()),
        other => Err(other),
    })
    .await;
    post_numbers(db, None, 60..110).await;
    wait_for_effects(db, 110).await;
    proxy.pass();
    for process in processes {
        process.stop().await;
    }
    assert_eq!(effects(db).await.len(), 110);
}

#[tokio::test]
async fn a_worker_that_registers_twice_leaks_no_shards() {
    let database = database().await;
    let db = database.pool();
    let proxy = FaultProxy::in_front_of(&database.url()).await;
    let slow = PgPoolOptions::new().connect(&proxy.url(&database.url())).await.unwrap();
    // A trigger makes the worker wait with its row inserted and not yet committed.
    sqlx::raw_sql(
        "create function wait_for_lock() returns trigger language plpgsql
             as $$ begin perform pg_advisory_xact_lock_shared(7); return null; end $$;
         create trigger wait_for_lock after insert on pillarbox.shard_worker for each row execute function wait_for_lock()",
    )
    .execute(db)
    .await
    .unwrap();
    let mut lock = db.begin().await.unwrap();
    sqlx::query("select pg_advisory_xact_lock(7)").execute(&mut *lock).await.unwrap();
    let process = Process::start(&slow, recorder());
    eventually("the worker waits in the trigger", TIMEOUT, async || {
        let waiting = "select exists (select from pg_locks join pg_database on pg_database.oid = database
                       where datname = current_database() and locktype = 'advisory' and not granted)";
        sqlx::query_scalar::<_, bool>(waiting).fetch_one(db).await.unwrap()
    })
    .await;
    proxy.refuse(); // the worker does not learn of its commit
    lock.rollback().await.unwrap();
    wait_for_count(db, "shard_worker", 1).await;
    proxy.pass();
    post_numbers(db, None, 0..64).await;
    eventually("messages of all shards are processed", Duration::from_secs(10), async || {
        match effects(db).await.len() {
            64 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    assert_eq!(count(db, "shard_worker").await, 1, "only the second registration remains");
    process.stop().await;
}

#[tokio::test]
async fn a_backlog_of_large_messages_is_read_in_small_batches() {
    /// Records the size of each batch.
    struct Scales(Arc<std::sync::Mutex<Vec<usize>>>);
    impl Processor for Scales {
        async fn process(&mut self, _: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
            self.0.lock().unwrap().push(items.iter().map(|item| item.message.payload.get().len()).sum());
            Ok(BatchResult { outcomes: vec![Outcome::Done; items.len()], tx: None })
        }
    }
    const BYTES: usize = 250_000;
    // 16 MiB, and at most one more message per shard.
    const BATCH_BYTES_MAX: usize = 16 * 1024 * 1024 + 16 * BYTES;
    let database = database().await;
    let db = database.pool();
    let post = "select pillarbox.post('test.large', to_json(repeat('x', $1 - 2)), key => 'k' || n)
                from generate_series(1, 200) as n";
    sqlx::query(post).bind(BYTES as i32).execute(db).await.unwrap();
    let (process, weighed) = (Process::idle(db), Arc::<std::sync::Mutex<Vec<usize>>>::default());
    let cursor = Consumer {
        name: "scales".to_owned(),
        kind: ConsumerKind::Relay,
        filter: Filter::matching(&MessagePattern::topic("test.#")),
        start: StartAt::Beginning,
    };
    process.runtime.consume(&cursor, fast_options(), || Scales(weighed.clone()));
    eventually("all messages are processed", TIMEOUT, async || {
        match weighed.lock().unwrap().iter().sum::<usize>() / BYTES {
            200 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    process.stop().await;
    let weighed = weighed.lock().unwrap();
    assert!(weighed.iter().all(|bytes| *bytes <= BATCH_BYTES_MAX), "{weighed:?}");
}

#[tokio::test]
async fn messages_that_do_not_match_are_not_unread_for_long() {
    let database = database().await;
    let db = database.pool();
    let process = Process::start(db, recorder());
    // The position is saved with the effect of the first message, so that it is not due again for a second.
    post_numbers(db, Some("k"), [1]).await;
    wait_for_effects(db, 1).await;
    let other = pillarbox::log::Post::new("test.other", crate::consumers::support::raw("2"));
    crate::events::fixture::post_messages(db, "other", &[other]).await;
    eventually("nothing is unread", Duration::from_secs(15), async || {
        let status = pillarbox::operations::status::consumers(db).await.unwrap().remove(0);
        match (status.lag_messages, status.lag_seconds) {
            (0, 0.0) => Ok(()),
            other => Err(other),
        }
    })
    .await;
    process.stop().await;
}
