//! A consumer with a handler, as the services' subscriptions run: what several tests need of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kit::clock::Clock;
use kit::health::Health;
use mailbox::cursor::Start;
use mailbox::database::migrations;
use mailbox::filter::Matching;
use mailbox::handler::{Failure, Handler, Handling};
use mailbox::log::Message;
use mailbox::post::{Post, Source, post_all};
use mailbox::replica::Replica;
use mailbox::retry::Retry;
use mailbox::runtime::{Rhythm, Runtime, Subscription};
use serde_json::value::RawValue;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{TestDatabase, drain};
use tokio_util::sync::CancellationToken;

pub(crate) const SOURCE: Source = Source::new("test");
pub(crate) const LEASE_TIME: Duration = Duration::from_secs(2);
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn raw(text: impl Into<String>) -> Box<RawValue> {
    RawValue::from_string(text.into()).unwrap()
}

/// One process, as far as the database can tell.
pub(crate) struct Process {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) stop: CancellationToken,
    pub(crate) health: Health,
}

pub(crate) fn quick() -> Rhythm {
    let mut rhythm = Rhythm::default();
    rhythm.lane.batch = 32;
    rhythm.lane.retry =
        Retry { retries: Some(3), first: Duration::from_millis(50), longest: Duration::from_millis(400) };
    rhythm.pause = Duration::from_millis(200);
    rhythm
}

impl Process {
    pub(crate) fn idle(db: &PgPool) -> Process {
        let (stop, health) = (CancellationToken::new(), Health::default());
        let replica = Replica::new("test", LEASE_TIME);
        let runtime = Runtime::start(db.clone(), Clock::system(), replica, health.clone(), stop.clone());
        Process { runtime: Arc::new(runtime), stop, health }
    }

    pub(crate) fn start(db: &PgPool, handler: Arc<dyn Handler>) -> Process {
        Process::start_with(db, handler, Start::Beginning, quick())
    }

    pub(crate) fn start_with(db: &PgPool, handler: Arc<dyn Handler>, start: Start, rhythm: Rhythm) -> Process {
        let process = Process::idle(db);
        let matching = Matching { sources: vec!["test".to_owned()], ..Matching::default() };
        process.runtime.subscribe(&Subscription { consumer: "effects", matching, start, handler }, rhythm);
        process
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.runtime.ended().await;
    }
}

/// Writes each message's number into a table, in the order of handling; `before` may fail or panic first.
pub(crate) struct Recorder<F>(pub(crate) F);

impl<F: Fn(&Message, i64) -> Result<(), Failure> + Send + Sync + 'static> Handler for Recorder<F> {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            let number: i64 = message.payload.get().parse()?;
            sqlx::query("insert into effect (key, number) values ($1, $2)")
                .bind(message.key.as_deref())
                .bind(number)
                .execute(&mut **tx)
                .await?;
            // After the effect: a failure must undo it.
            (self.0)(message, number)
        })
    }
}

pub(crate) fn recorder() -> Arc<dyn Handler> {
    Arc::new(Recorder(|_: &Message, _| Ok(())))
}

/// A consumer `effects` that fails for negative numbers until it is cured.
pub(crate) struct Patient {
    cured: Arc<AtomicBool>,
    pub(crate) process: Process,
}

impl Patient {
    /// Retries so late that only an operator brings them forward.
    pub(crate) fn slow(db: &PgPool) -> Patient {
        let mut rhythm = quick();
        rhythm.lane.retry.first = Duration::from_secs(600);
        rhythm.lane.retry.longest = Duration::from_secs(600);
        Patient::start(db, rhythm)
    }

    /// Gives up at once, at the second try.
    pub(crate) fn hasty(db: &PgPool) -> Patient {
        let mut rhythm = quick();
        rhythm.lane.retry.retries = Some(0);
        Patient::start(db, rhythm)
    }

    fn start(db: &PgPool, rhythm: Rhythm) -> Patient {
        let cured = Arc::new(AtomicBool::new(false));
        let is_cured = cured.clone();
        let handler = Recorder(move |_: &Message, number| match number < 0 && !is_cured.load(Ordering::SeqCst) {
            true => Err("negative".into()),
            false => Ok(()),
        });
        Patient { cured, process: Process::start_with(db, Arc::new(handler), Start::Beginning, rhythm) }
    }

    pub(crate) fn cure(&self) {
        self.cured.store(true, Ordering::SeqCst);
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

pub(crate) async fn until_effects(db: &PgPool, count: usize) {
    drain("the effects", PATIENCE, async || {
        let so_far = effects(db).await.len();
        if so_far >= count { Ok(()) } else { Err(format!("{so_far} of {count}")) }
    })
    .await;
}

pub(crate) async fn count(db: &PgPool, table: &str) -> i64 {
    let query = format!("select count(*) from pillarbox.{table}");
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(db).await.unwrap()
}

pub(crate) async fn until_count(db: &PgPool, table: &str, expected: i64) {
    drain(table, PATIENCE, async || {
        let found = count(db, table).await;
        if found == expected { Ok(()) } else { Err(format!("{found} in {table}, not {expected}")) }
    })
    .await;
}

pub(crate) async fn until_replays_are_done(db: &PgPool) {
    drain("the replays", PATIENCE, async || {
        sqlx::query_scalar::<_, bool>("select coalesce(bool_and(done), true) from pillarbox.replay_shard")
            .fetch_one(db)
            .await
            .unwrap()
    })
    .await;
}

/// As an operator does it.
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
