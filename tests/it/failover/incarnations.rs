//! Incarnations of the database: when one begins, and what it invalidates.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pillarbox::consumers::{Consumer, ConsumerKind, Replica, Runtime, ShardAssignment, StartAt};
use pillarbox::database::{Database, Incarnation};
use pillarbox::log::{Filter, MessagePattern, Snapshot};
use pillarbox::operations::cursors;
use runtime::clock::Clock;
use runtime::health::Health;
use serde_json::json;
use server::migrations;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection};
use testkit::{PrivateServers, Server, TestDatabase, eventually};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::consumers::shard_workers::Sink;
use crate::consumers::support::{count, fast_options, post_numbers, wait_for_count};
use crate::events::fixture::{Fixture, event_id, event_path, meetup, publish_event};
use crate::support::DEADLINE;

async fn incarnation(url: &str) -> Incarnation {
    let connect = async || PgConnection::connect(url).await;
    let mut db = eventually("PostgreSQL responds", DEADLINE, connect).await;
    Incarnation::current(&mut db).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_begins_an_incarnation_and_removes_every_fence() {
    let servers = PrivateServers::start(&[Server::Postgres]).await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let before = incarnation(servers.postgres_url()).await;
    assert_eq!(before, incarnation(servers.postgres_url()).await, "it lasts until the next crash");
    let mut db = PgConnection::connect(servers.postgres_url()).await.unwrap();
    let join = "insert into pillarbox.shard_worker (consumer, owner, replica)
                values ('c', gen_random_uuid(), gen_random_uuid())";
    sqlx::query(join).execute(&mut db).await.unwrap();
    sqlx::query("checkpoint").execute(&mut db).await.unwrap();
    servers.restart_postgres().await;
    assert_ne!(before, incarnation(servers.postgres_url()).await);
    let mut db = PgConnection::connect(servers.postgres_url()).await.unwrap();
    let fences: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.shard_worker").fetch_one(&mut db).await.unwrap();
    assert_eq!(fences, 0);
}

#[tokio::test]
async fn the_database_refuses_a_position_that_is_ahead_of_it() {
    let (servers, other) = (PrivateServers::start(&[Server::Postgres]).await, TestDatabase::new(&migrations()).await);
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let mut db = PgConnection::connect_with(&options).await.unwrap();
    let consumer = Consumer {
        name: "sink".to_owned(),
        kind: ConsumerKind::Relay,
        filter: Filter::everything(),
        start: StartAt::Beginning,
    };
    consumer.register(&sqlx::PgPool::connect_with(options).await.unwrap()).await.unwrap();
    // A snapshot of a database that has assigned more transaction ids, as a primary has whose last commits are lost.
    let mut ahead = other.pool().acquire().await.unwrap();
    let assign = "do $$ begin for n in 1..10000 loop perform pg_current_xact_id(); commit; end loop; end $$";
    sqlx::raw_sql(assign).execute(&mut *ahead).await.unwrap();
    let (ahead, own) = (Snapshot::now(&mut ahead).await.unwrap(), Snapshot::now(&mut db).await.unwrap());
    let refused = cursors::reset_in(&mut db, "sink", None, &ahead).await.unwrap_err().to_string();
    assert!(refused.contains("the database has lost transactions since the snapshot"), "{refused}");
    assert!(cursors::reset_in(&mut db, "sink", None, &own).await.unwrap());
}

/// Registers one process after the other for the work `work`, until each has its part.
async fn rebalance_all(db: &mut PgConnection, processes: &mut [ShardAssignment]) -> Vec<usize> {
    let mut parts = Vec::new();
    for _ in 0..3 {
        parts.clear();
        for process in processes.iter_mut() {
            parts.push(process.rebalance(db).await.unwrap().unwrap_or_default().len());
        }
    }
    parts
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failover_shards_are_claimed_when_every_process_knows_it_or_its_lease_has_ended() {
    const LEASE_TIME: Duration = Duration::from_secs(60);
    let database = TestDatabase::new(&migrations()).await;
    let mut db = PgConnection::connect_with(&database.connect_options()).await.unwrap();
    let stop = CancellationToken::new();
    let runtimes = ["a", "b"].map(|name| {
        let (shared, replica) = (Database::new(database.pool().clone()), Replica::new(name, LEASE_TIME));
        Runtime::start(shared, Clock::system(), replica, Health::default(), stop.clone())
    });
    let mut processes = runtimes.each_ref().map(|runtime| runtime.shard_assignment("work"));
    assert_eq!(rebalance_all(&mut db, &mut processes).await, [8, 8]);
    // What a failover does to the unlogged tables.
    let fail_over = "begin; delete from pillarbox.incarnation; delete from pillarbox.shard_worker; commit";
    for is_noticed in [true, false] {
        sqlx::raw_sql(fail_over).execute(&mut db).await.unwrap();
        assert_eq!(rebalance_all(&mut db, &mut processes[..1]).await, [0], "the other one may still send");
        match is_noticed {
            true => assert_eq!(rebalance_all(&mut db, &mut processes).await, [8, 8], "every process knows it"),
            false => {
                let later = "update pillarbox.incarnation set since = since - interval '61 seconds'";
                sqlx::query(later).execute(&mut db).await.unwrap();
                assert_eq!(rebalance_all(&mut db, &mut processes[..1]).await, [16], "its lease has ended");
            }
        }
    }
    stop.cancel();
    for runtime in runtimes {
        runtime.join().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_was_processed_before_a_failover_is_not_committed_after_it() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, stop) = (database.pool(), CancellationToken::new());
    let replica = Replica::new("test", Duration::from_secs(600));
    let runtime = Runtime::start(Database::new(db.clone()), Clock::system(), replica, Health::default(), stop.clone());
    let consumer = Consumer {
        name: "sink".to_owned(),
        kind: ConsumerKind::Relay,
        filter: Filter::matching(&MessagePattern::topic("test.#")),
        start: StartAt::Beginning,
    };
    let (seen, gate) = (Arc::<std::sync::Mutex<Vec<i64>>>::default(), Arc::<tokio::sync::RwLock<()>>::default());
    runtime.consume(&consumer, fast_options(), || Sink { seen: seen.clone(), gate: gate.clone() });
    let until_seen = async |numbers: &[i64]| {
        eventually("the numbers are processed", DEADLINE, async || match seen.lock().unwrap().clone() {
            seen if seen == numbers => Ok(()),
            other => Err(other),
        })
        .await;
    };
    // Processed, but not committed.
    let gate_closed = gate.write().await;
    post_numbers(db, Some("k"), [1]).await;
    until_seen(&[1]).await;
    // What a failover does to the unlogged tables. The worker tries to commit before the watcher's next poll.
    sqlx::raw_sql("begin; delete from pillarbox.incarnation; delete from pillarbox.shard_worker; commit")
        .execute(db)
        .await
        .unwrap();
    drop(gate_closed);
    until_seen(&[1, 1]).await;
    stop.cancel();
    runtime.join().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_watcher_and_the_heartbeat_invalidate_nothing() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, stop, health) = (database.pool(), CancellationToken::new(), Health::default());
    let shared = Database::new(PgPoolOptions::new().connect_lazy_with(database.connect_options()));
    let dropped = Arc::<AtomicUsize>::default();
    let counted = dropped.clone();
    shared.on_invalidation(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let replica = Replica::new("test", Duration::from_secs(2));
    let runtime = Runtime::start(shared, Clock::system(), replica, health.clone(), stop.clone());
    let is_down = |name: &str| health.report().iter().any(|state| state.name == name && !state.up);
    let terminate = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                     where datname = current_database() and application_name = 'pillarbox'";
    eventually("the watcher fails", DEADLINE, async || {
        sqlx::query(terminate).execute(db).await.unwrap();
        is_down("watcher")
    })
    .await;
    // Any error of the heartbeat.
    sqlx::query("alter table pillarbox.replica rename to missing").execute(db).await.unwrap();
    eventually("the heartbeat fails", DEADLINE, async || is_down("heartbeat")).await;
    sqlx::query("alter table pillarbox.missing rename to replica").execute(db).await.unwrap();
    eventually("both continue", DEADLINE, async || !is_down("watcher") && !is_down("heartbeat")).await;
    assert_eq!(dropped.load(Ordering::SeqCst), 0, "the database has lost nothing");
    stop.cancel();
    runtime.join().await;
}

#[tokio::test]
async fn twenty_processes_that_find_no_incarnation_begin_the_same_one() {
    let database = TestDatabase::new(&migrations()).await;
    let begin = (0..20).map(|_| async {
        let mut db = PgConnection::connect_with(&database.connect_options()).await.unwrap();
        Incarnation::current(&mut db).await.unwrap()
    });
    let found = futures_util::future::join_all(begin).await;
    assert!(found.iter().all(|incarnation| *incarnation == found[0]), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_incarnation_drops_every_cache_and_every_worker_joins_again() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, stop) = (database.pool(), CancellationToken::new());
    let shared = Database::new(db.clone());
    let dropped = Arc::<AtomicUsize>::default();
    let counted = dropped.clone();
    shared.on_invalidation(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    // Heartbeat and rebalancing are so rare that only the watcher can notice it.
    let replica = Replica::new("test", Duration::from_secs(600));
    let runtime = Runtime::start(shared, Clock::system(), replica, Health::default(), stop.clone());
    let consumer = Consumer {
        name: "sink".to_owned(),
        kind: ConsumerKind::Relay,
        filter: Filter::matching(&MessagePattern::topic("test.#")),
        start: StartAt::Beginning,
    };
    let seen = Arc::<std::sync::Mutex<Vec<i64>>>::default();
    runtime.consume(&consumer, fast_options(), || Sink { seen: seen.clone(), gate: Arc::default() });
    let until_seen = async |number: i64| {
        eventually("the number is processed", DEADLINE, async || seen.lock().unwrap().contains(&number)).await;
    };
    let owner = async || {
        let query = "select owner from pillarbox.shard_worker where consumer = 'sink'";
        sqlx::query_scalar::<_, Uuid>(query).fetch_optional(db).await.unwrap()
    };
    post_numbers(db, Some("k"), [1]).await;
    until_seen(1).await;
    let (owner_before, dropped_before) = (owner().await, dropped.load(Ordering::SeqCst));
    assert!(owner_before.is_some());

    // What a failover does to the unlogged tables. No connection is lost.
    sqlx::raw_sql("begin; delete from pillarbox.incarnation; delete from pillarbox.shard_worker; commit")
        .execute(db)
        .await
        .unwrap();
    eventually("the caches are dropped", DEADLINE, async || dropped.load(Ordering::SeqCst) > dropped_before).await;
    wait_for_count(db, "shard_worker", 1).await;
    assert_ne!(owner().await, owner_before, "the fence of the old id stays invalid");
    post_numbers(db, Some("k"), [2]).await;
    until_seen(2).await;
    assert_eq!(count(db, "incarnation").await, 1);
    stop.cancel();
    runtime.join().await;
}

#[tokio::test]
async fn a_cached_event_is_dropped_from_memory_in_a_new_incarnation() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let title = async || fixture.app.anonymous().get(&event_path(&event)).await.json()["title"].clone();
    assert_eq!(title().await, "Rust meetup");
    // The same version with other content: nothing but a new incarnation can tell.
    let change = "update pillarbox_events.event set title = 'Changed' where id = $1";
    sqlx::query(change).bind(event_id(&event)).execute(fixture.db()).await.unwrap();
    assert_eq!(title().await, "Rust meetup", "it is cached");
    sqlx::query("delete from pillarbox.incarnation").execute(fixture.db()).await.unwrap();
    eventually("the cached event is dropped", DEADLINE, async || match title().await {
        title if title == json!("Changed") => Ok(()),
        other => Err(other),
    })
    .await;
    fixture.app.stop().await;
}
