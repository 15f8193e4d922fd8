//! Support for tests of consumers: a process with a handler, its effects, and copies of a database.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pillarbox::consumers::{
    ConsumerOptions, Handler, HandlerError, HandlerFuture, Replica, RetryPolicy, Runtime, StartAt, Subscription,
};
use pillarbox::database::Database;
use pillarbox::log::{Message, MessagePattern, Post, Source, post_all};
use runtime::backoff::Backoff;
use runtime::clock::Clock;
use runtime::health::Health;
use serde_json::value::RawValue;
use server::migrations;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{TestDatabase, eventually};
use tokio_util::sync::CancellationToken;

pub(crate) const SOURCE: Source = Source::new("test");
pub(crate) const LEASE_TIME: Duration = Duration::from_secs(2);
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn raw(text: impl Into<String>) -> Box<RawValue> {
    RawValue::from_string(text.into()).unwrap()
}

/// The consumers of one process. The database cannot distinguish it from a separate process.
pub(crate) struct Process {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) stop: CancellationToken,
    pub(crate) health: Health,
}

pub(crate) fn fast_options() -> ConsumerOptions {
    let mut options = ConsumerOptions::default();
    options.worker.batch = 32;
    options.worker.retry =
        RetryPolicy { retries: Some(3), backoff: Backoff::new(Duration::from_millis(50), Duration::from_millis(400)) };
    options.pause = Duration::from_millis(200);
    options
}

impl Process {
    pub(crate) fn idle(db: &PgPool) -> Process {
        Process::idle_on(Database::new(db.clone()))
    }

    fn idle_on(db: Database) -> Process {
        let (stop, health) = (CancellationToken::new(), Health::default());
        let replica = Replica::new("test", LEASE_TIME);
        let runtime = Runtime::start(db, Clock::system(), replica, health.clone(), stop.clone());
        Process { runtime: Arc::new(runtime), stop, health }
    }

    pub(crate) fn start(db: &PgPool, handler: Arc<dyn Handler>) -> Process {
        Process::start_with(db, handler, StartAt::Beginning, fast_options())
    }

    pub(crate) fn start_with(
        db: &PgPool,
        handler: Arc<dyn Handler>,
        start: StartAt,
        options: ConsumerOptions,
    ) -> Process {
        Process::start_on(Database::new(db.clone()), handler, start, options)
    }

    pub(crate) fn start_on(
        db: Database,
        handler: Arc<dyn Handler>,
        start: StartAt,
        options: ConsumerOptions,
    ) -> Process {
        let process = Process::idle_on(db);
        let matching = MessagePattern { sources: vec!["test".to_owned()], ..MessagePattern::default() };
        process.runtime.subscribe(&Subscription { consumer: "effects".into(), matching, start, handler, options });
        process
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.runtime.join().await;
    }
}

/// A handler that inserts the number of each message into the table `effect`. The function may then fail or panic.
pub(crate) struct Recorder<F>(pub(crate) F);

impl<F: Fn(&Message, i64) -> Result<(), HandlerError> + Send + Sync + 'static> Handler for Recorder<F> {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let number: i64 = message.payload.get().parse()?;
            sqlx::query("insert into effect (key, number) values ($1, $2)")
                .bind(message.key.as_deref())
                .bind(number)
                .execute(&mut **tx)
                .await?;
            // After the insert, because a failure must roll it back.
            (self.0)(message, number)
        })
    }
}

pub(crate) fn recorder() -> Arc<dyn Handler> {
    Arc::new(Recorder(|_: &Message, _| Ok(())))
}

/// A consumer `effects` that fails for negative numbers until the test calls `stop_failing`.
pub(crate) struct FailingConsumer {
    is_fixed: Arc<AtomicBool>,
    pub(crate) process: Process,
}

impl FailingConsumer {
    /// Retries after ten minutes, so that only an operator can retry during the test.
    pub(crate) fn with_slow_retries(db: &PgPool) -> FailingConsumer {
        let mut options = fast_options();
        options.worker.retry.backoff.first = Duration::from_secs(600);
        options.worker.retry.backoff.max = Duration::from_secs(600);
        FailingConsumer::start(db, options)
    }

    /// Makes a message a dead letter at its first failure.
    pub(crate) fn without_retries(db: &PgPool) -> FailingConsumer {
        let mut options = fast_options();
        options.worker.retry.retries = Some(0);
        FailingConsumer::start(db, options)
    }

    fn start(db: &PgPool, options: ConsumerOptions) -> FailingConsumer {
        let is_fixed = Arc::new(AtomicBool::new(false));
        let handler_is_fixed = is_fixed.clone();
        let handler =
            Recorder(move |_: &Message, number| match number < 0 && !handler_is_fixed.load(Ordering::SeqCst) {
                true => Err("negative".into()),
                false => Ok(()),
            });
        FailingConsumer { is_fixed, process: Process::start_with(db, Arc::new(handler), StartAt::Beginning, options) }
    }

    pub(crate) fn stop_failing(&self) {
        self.is_fixed.store(true, Ordering::SeqCst);
    }
}

pub(crate) async fn database() -> TestDatabase {
    let database = TestDatabase::new(&migrations()).await;
    let table = "create table effect (n bigint generated always as identity, key text, number bigint, at timestamptz default clock_timestamp())";
    sqlx::query(table).execute(database.pool()).await.unwrap();
    database
}

pub(crate) async fn post_numbers(db: &PgPool, key: Option<&str>, numbers: impl IntoIterator<Item = i64>) {
    let message = |number: i64| {
        let message = Post::new("test.posted", raw(number.to_string()));
        match key {
            Some(key) => message.with_key(key),
            None => message,
        }
    };
    let messages: Vec<Post> = numbers.into_iter().map(message).collect();
    let mut tx = db.begin().await.unwrap();
    post_all(&mut tx, &SOURCE, &messages).await.unwrap();
    tx.commit().await.unwrap();
}

pub(crate) async fn effects(db: &PgPool) -> Vec<(Option<String>, i64)> {
    sqlx::query_as("select key, number from effect order by n").fetch_all(db).await.unwrap()
}

pub(crate) async fn numbers(db: &PgPool) -> Vec<i64> {
    effects(db).await.into_iter().map(|(_, number)| number).collect()
}

pub(crate) async fn wait_for_effects(db: &PgPool, count: usize) {
    eventually("the effects exist", TIMEOUT, async || {
        let so_far = effects(db).await.len();
        if so_far >= count { Ok(()) } else { Err(format!("{so_far} of {count}")) }
    })
    .await;
}

pub(crate) async fn count(db: &PgPool, table: &str) -> i64 {
    let query = format!("select count(*) from pillarbox.{table}");
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(db).await.unwrap()
}

pub(crate) async fn wait_for_count(db: &PgPool, table: &str, expected: i64) {
    eventually("the table has the expected number of rows", TIMEOUT, async || {
        let found = count(db, table).await;
        if found == expected { Ok(()) } else { Err(format!("{found} in {table}, not {expected}")) }
    })
    .await;
}

pub(crate) async fn wait_for_replays(db: &PgPool) {
    eventually("all replays are done", TIMEOUT, async || {
        sqlx::query_scalar::<_, bool>("select coalesce(bool_and(done), true) from pillarbox.replay_shard")
            .fetch_one(db)
            .await
            .unwrap()
    })
    .await;
}

/// Copies a database with `pg_dump` and `psql`, as an operator does.
pub(crate) fn copy_database(from: &TestDatabase, to: &TestDatabase) {
    restore_database(to, &dump_database(from));
}

pub(crate) fn dump_database(from: &TestDatabase) -> Vec<u8> {
    let dump = std::process::Command::new("pg_dump").arg(from.url()).output().unwrap();
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    dump.stdout
}

pub(crate) fn restore_database(to: &TestDatabase, dump: &[u8]) {
    let mut restore = std::process::Command::new("psql")
        .args(["-q", "-v", "ON_ERROR_STOP=1", &to.url()])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut restore.stdin.take().unwrap(), dump).unwrap();
    assert!(restore.wait().unwrap().success());
}
