//! Crashes of PostgreSQL: asynchronous commits are lost, and their transaction ids are assigned again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pillarbox::consumers::{Consumer, ConsumerKind, Replica, Runtime, StartAt};
use pillarbox::database::Database;
use pillarbox::log::{Filter, MessagePattern};
use runtime::clock::Clock;
use runtime::health::Health;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use testkit::{PrivateServers, Server, eventually};
use tokio_util::sync::CancellationToken;

use crate::consumers::shard_workers::Sink;
use crate::consumers::support::{fast_options, post_numbers};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Consumes a hundred transaction ids and posts a number with an asynchronous commit. A crash loses all of it.
async fn post_without_flush(db: &PgPool, number: i64) {
    let mut db = db.acquire().await.unwrap().detach();
    for statement in [
        "set synchronous_commit = off",
        "set session_replication_role = replica", // disables the trigger that makes posts durable
        // PostgreSQL also flushes a full WAL page. This starts a new segment, in which the following records fit into one page.
        "select pg_switch_wal()",
        "do $$ begin for n in 1..100 loop perform pg_current_xact_id(); commit; end loop; end $$",
    ] {
        sqlx::raw_sql(statement).execute(&mut db).await.unwrap();
    }
    let post = "select pillarbox.post('test.posted', to_json($1::bigint), key => 'k')";
    sqlx::query(post).bind(number).execute(&mut db).await.unwrap();
}

async fn transaction_of(db: &PgPool, number: i64) -> Option<i64> {
    let query = "select xid::text::bigint from pillarbox.log where payload::text::bigint = $1";
    sqlx::query_scalar(query).bind(number).fetch_optional(db).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_ids_reused_after_a_crash_hide_no_message() {
    let servers = PrivateServers::start(&[Server::Postgres]).await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let (db, runtimes) = (
        PgPoolOptions::new().max_connections(1).connect_lazy_with(options.clone()),
        PgPoolOptions::new().connect_lazy_with(options),
    );
    // Only commits that wait for the disk flush the WAL; no background process does.
    for setting in ["wal_writer_delay = '10s'", "autovacuum = off", "bgwriter_lru_maxpages = 0"] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("alter system set {setting}"))).execute(&db).await.unwrap();
    }
    // Heartbeat and rebalancing are so rare that the shard worker learns of a crash from the watcher alone.
    let (stop, replica) = (CancellationToken::new(), Replica::new("test", Duration::from_secs(600)));
    let runtime = Runtime::start(Database::new(runtimes), Clock::system(), replica, Health::default(), stop.clone());
    let cursor = Consumer {
        name: "sink".to_owned(),
        kind: ConsumerKind::Relay,
        filter: Filter::matching(&MessagePattern::topic("test.#")),
        start: StartAt::Beginning,
    };
    let (seen, gate) = (Arc::<Mutex<Vec<i64>>>::default(), Arc::<tokio::sync::RwLock<()>>::default());
    runtime.consume(&cursor, fast_options(), || Sink { seen: seen.clone(), gate: gate.clone() });
    let until_seen = async |number: i64| {
        eventually("the number is processed", TIMEOUT, async || match seen.lock().unwrap().clone() {
            seen if seen.contains(&number) => Ok(()),
            others => Err(others),
        })
        .await;
    };
    post_numbers(&db, Some("k"), [1]).await;
    until_seen(1).await;

    // Once while the shard worker waits for messages, and once while it processes one.
    for (lost_number, next, is_busy) in [(-1, 2, false), (-2, 3, true)] {
        let gate_closed = match is_busy {
            true => Some(gate.write().await),
            false => None,
        };
        // The WAL writer flushes now, and the next time in ten seconds.
        sqlx::query("select pg_reload_conf()").execute(&db).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        post_without_flush(&db, lost_number).await;
        until_seen(lost_number).await;
        let lost = transaction_of(&db, lost_number).await;
        servers.restart_postgres().await;
        eventually("PostgreSQL responds", TIMEOUT, async || sqlx::query("select").execute(&db).await).await;
        post_numbers(&db, Some("k"), [next]).await;
        assert_eq!(transaction_of(&db, lost_number).await, None, "the crash has lost the message");
        assert!(transaction_of(&db, next).await < lost, "its transaction ids are assigned again");
        drop(gate_closed);
        until_seen(next).await;
        // Wait for the commit: otherwise the shard worker could wait at the gate with this message in the next round.
        eventually("the message is committed", TIMEOUT, async || {
            let query = "select count(*) from pillarbox.outbox_status where consumer = 'sink' and status = 'pending'";
            sqlx::query_scalar::<_, i64>(query).fetch_one(&db).await.is_ok_and(|pending| pending == 0)
        })
        .await;
    }
    stop.cancel();
    runtime.join().await;
}
