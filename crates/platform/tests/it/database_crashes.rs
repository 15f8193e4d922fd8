//! PostgreSQL crashes: what nobody waited for is not on disk, and its transaction ids are given out again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kit::clock::Clock;
use kit::health::Health;
use mailbox::cursor::{Cursor, Kind, Start};
use mailbox::filter::{Filter, Matching};
use mailbox::replica::Replica;
use mailbox::runtime::Runtime;
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use testkit::{OwnServers, drain};
use tokio_util::sync::CancellationToken;

use crate::consuming::{post_numbers, quick};
use crate::lanes::Sink;

const PATIENCE: Duration = Duration::from_secs(60);

/// Uses up a hundred transaction ids and posts a number, without waiting for the disk: a crash takes it all back.
async fn post_in_vain(db: &PgPool, number: i64) {
    let mut db = db.acquire().await.unwrap().detach();
    for statement in [
        "set synchronous_commit = off",
        "set session_replication_role = replica", // posts are durable by a trigger
        // Also a page of the log of writes that is full goes to disk. This begins a new one, and what follows fits into it.
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
async fn transaction_ids_that_are_given_out_again_after_a_crash_hide_no_message() {
    let servers = OwnServers::start().await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    mailbox::database::migrate(&options).await.unwrap();
    let (db, runtimes) = (
        PgPoolOptions::new().max_connections(1).connect_lazy_with(options.clone()),
        PgPoolOptions::new().connect_lazy_with(options),
    );
    // Nothing is written to disk but by who waits for it.
    for setting in ["wal_writer_delay = '10s'", "autovacuum = off", "bgwriter_lru_maxpages = 0"] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("alter system set {setting}"))).execute(&db).await.unwrap();
    }
    // It beats and shares out so rarely that its lane learns of a crash from the watcher alone.
    let (stop, replica) = (CancellationToken::new(), Replica::new("test", Duration::from_secs(600)));
    let runtime = Runtime::start(runtimes, Clock::system(), replica, Health::default(), stop.clone());
    let cursor = Cursor {
        consumer: "sink".to_owned(),
        kind: Kind::Relay,
        filter: Filter::matching(&Matching::topic("test.#")),
        start: Start::Beginning,
    };
    let (seen, gate) = (Arc::<Mutex<Vec<i64>>>::default(), Arc::<tokio::sync::RwLock<()>>::default());
    runtime.consume(&cursor, quick(), || Sink { seen: seen.clone(), gate: gate.clone() });
    let until_seen = async |number: i64| {
        drain("the next is seen", PATIENCE, async || match seen.lock().unwrap().clone() {
            seen if seen.contains(&number) => Ok(()),
            others => Err(others),
        })
        .await;
    };
    post_numbers(&db, Some("k"), [1]).await;
    until_seen(1).await;

    // Once while the lane waits for messages, and once while it is at work on one.
    for (in_vain, next, is_at_work) in [(-1, 2, false), (-2, 3, true)] {
        let held = match is_at_work {
            true => Some(gate.write().await),
            false => None,
        };
        // Who writes to disk by the clock does it now, and again in ten seconds.
        sqlx::query("select pg_reload_conf()").execute(&db).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        post_in_vain(&db, in_vain).await;
        until_seen(in_vain).await;
        let lost = transaction_of(&db, in_vain).await;
        servers.restart_postgres().await;
        drain("it answers", PATIENCE, async || sqlx::query("select").execute(&db).await).await;
        post_numbers(&db, Some("k"), [next]).await;
        assert_eq!(transaction_of(&db, in_vain).await, None, "the crash has taken it back");
        assert!(transaction_of(&db, next).await < lost, "and its transaction ids are given out again");
        drop(held);
        until_seen(next).await;
        // And kept: a lane that is still at work on it would wait at the gate with it, and not see what comes next.
        drain("it is kept", PATIENCE, async || {
            let query = "select count(*) from pillarbox.outbox_status where consumer = 'sink' and status = 'pending'";
            sqlx::query_scalar::<_, i64>(query).fetch_one(&db).await.is_ok_and(|pending| pending == 0)
        })
        .await;
    }
    stop.cancel();
    runtime.ended().await;
}
