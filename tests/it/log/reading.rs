//! Reading the log: every committed message is read once and in order, and no other message is.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pillarbox::log::{AggregateId, Filter, Message, MessagePattern, Post, Reader, Snapshot, Source, post, post_all};
use serde_json::value::RawValue;
use server::migrations;
use sqlx::postgres::PgConnectOptions;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{PrivateServers, Server, TestDatabase};
use tokio::sync::Mutex;

const SOURCE: Source = Source::new("test");

fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

/// Reads all shards, one window per call.
pub(crate) struct LogReader(Option<Reader>);

impl LogReader {
    pub(crate) fn from_the_beginning() -> LogReader {
        LogReader(None)
    }

    /// Returns all messages that have become visible since the last call. It reads them in chunks of `limit`.
    pub(crate) async fn read(&mut self, db: &PgPool, limit: u32) -> Vec<Message> {
        let mut db = db.acquire().await.unwrap();
        if self.0.is_none() {
            let beginning = Snapshot::beginning(&mut db).await.unwrap();
            self.0 = Some(Reader::of_all_shards(Filter::everything(), &beginning));
        }
        let reader = self.0.as_mut().unwrap();
        reader.open_windows(&Snapshot::now(&mut db).await.unwrap());
        let mut messages = Vec::new();
        while !reader.is_done() {
            messages.extend(reader.read(&mut db, limit).await.unwrap());
        }
        messages
    }
}

pub(crate) async fn post_one(tx: &mut Transaction<'_, Postgres>, text: &str) {
    post(tx, &SOURCE, &Post::new("test.posted", raw(text)).with_key("k")).await.unwrap();
}

fn payloads(messages: &[Message]) -> Vec<&str> {
    messages.iter().map(|message| message.payload.get()).collect()
}

#[tokio::test]
async fn a_message_is_read_as_it_was_posted() {
    let database = TestDatabase::new(&migrations()).await;
    let mut tx = database.pool().begin().await.unwrap();
    let text = r#"{"b": 1.50,  "a":"é" }"#;
    let mut message = Post::new("order.created", raw(text)).with_key("order 5");
    message.aggregate_type = Some("RESTAURANT".to_owned());
    message.aggregate_id = Some(AggregateId::Number(5));
    let id = post(&mut tx, &SOURCE, &message).await.unwrap();
    message.aggregate_id = Some(AggregateId::Text("5".to_owned()));
    post(&mut tx, &SOURCE, &message).await.unwrap();
    tx.commit().await.unwrap();
    let read = LogReader::from_the_beginning().read(database.pool(), 10).await;
    assert_eq!(payloads(&read), [text, text]);
    assert_eq!((read[0].message_id, read[0].source.as_str(), read[0].tenant.as_str()), (id, "test", "main"));
    assert_eq!((read[0].key.as_deref(), read[0].aggregate_type.as_deref()), (Some("order 5"), Some("RESTAURANT")));
    assert_eq!(read[0].aggregate_id, Some(AggregateId::Number(5)));
    assert_eq!(read[1].aggregate_id, Some(AggregateId::Text("5".to_owned())));
}

#[tokio::test]
async fn a_message_that_was_rolled_back_is_never_read() {
    let database = TestDatabase::new(&migrations()).await;
    let mut reader = LogReader::from_the_beginning();
    let mut tx = database.pool().begin().await.unwrap();
    post_one(&mut tx, "1").await;
    assert!(reader.read(database.pool(), 10).await.is_empty(), "not before the commit");
    tx.rollback().await.unwrap();
    let mut tx = database.pool().begin().await.unwrap();
    post_one(&mut tx, "2").await;
    sqlx::query("savepoint s").execute(&mut *tx).await.unwrap();
    post_one(&mut tx, "3").await;
    sqlx::query("rollback to s").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(payloads(&reader.read(database.pool(), 10).await), ["2"]);
    assert!(reader.read(database.pool(), 10).await.is_empty(), "once");
}

#[tokio::test]
async fn a_late_commit_is_not_lost_and_delays_no_other_message() {
    let database = TestDatabase::new(&migrations()).await;
    let mut reader = LogReader::from_the_beginning();
    let mut late = database.pool().begin().await.unwrap();
    post_one(&mut late, "\"late\"").await;
    for round in 0..3 {
        let mut tx = database.pool().begin().await.unwrap();
        post_one(&mut tx, &round.to_string()).await;
        tx.commit().await.unwrap();
        assert_eq!(payloads(&reader.read(database.pool(), 10).await), [round.to_string()]);
    }
    late.commit().await.unwrap();
    assert_eq!(payloads(&reader.read(database.pool(), 10).await), ["\"late\""]);
    assert!(reader.read(database.pool(), 10).await.is_empty());
}

#[tokio::test]
async fn the_first_message_of_an_empty_log_is_read() {
    let database = TestDatabase::new(&migrations()).await;
    let mut reader = LogReader::from_the_beginning();
    assert!(reader.read(database.pool(), 10).await.is_empty());
    let mut db = database.pool().acquire().await.unwrap();
    let before = Snapshot::now(&mut db).await.unwrap();
    let mut tx = database.pool().begin().await.unwrap();
    post_one(&mut tx, "1").await;
    assert!(before.is_outdated(&mut db).await.unwrap(), "an id was assigned");
    let during = Snapshot::now(&mut db).await.unwrap();
    tx.commit().await.unwrap();
    assert!(during.is_outdated(&mut db).await.unwrap(), "a transaction in progress has ended");
    assert_eq!(payloads(&reader.read(database.pool(), 10).await), ["1"]);
}

#[tokio::test]
async fn a_filter_selects_the_same_messages_in_sql_and_in_memory() {
    let database = TestDatabase::new(&migrations()).await;
    let mut tx = database.pool().begin().await.unwrap();
    for (topic, aggregate_type) in
        [("order", None), ("order.created", None), ("order.line.added", Some("A|B\n")), ("orders.created", Some("B"))]
    {
        let mut message = Post::new(topic, raw(&format!("\"{topic}\"")));
        message.aggregate_type = aggregate_type.map(str::to_owned);
        post(&mut tx, &SOURCE, &message).await.unwrap();
    }
    tx.commit().await.unwrap();
    let all = ["order", "order.created", "order.line.added", "orders.created"];
    let topics = |patterns: &[&str]| MessagePattern {
        topics: patterns.iter().map(|pattern| (*pattern).to_owned()).collect(),
        ..MessagePattern::default()
    };
    let of = |sources: &[&str], types: &[&str]| MessagePattern {
        sources: sources.iter().map(|source| (*source).to_owned()).collect(),
        aggregate_types: types.iter().map(|kind| (*kind).to_owned()).collect(),
        ..MessagePattern::default()
    };
    let everything = LogReader::from_the_beginning().read(database.pool(), 100).await;
    for (filter, expected) in [
        (Filter::everything(), &all[..]),
        (Filter::matching(&MessagePattern::default()), &all[..]),
        (Filter::matching(&topics(&["#"])), &all[..]),
        (Filter::matching(&topics(&["order.#"])), &all[..3]),
        (Filter::matching(&topics(&["order.*"])), &all[1..2]),
        (Filter::matching(&topics(&["*"])), &all[..1]),
        (Filter::matching(&topics(&["#.created", "order"])), &[all[0], all[1], all[3]]),
        (Filter::matching(&topics(&["order.#.added"])), &all[2..3]),
        (Filter::matching(&topics(&["#.order.created.#"])), &all[1..2]),
        (Filter::matching(&of(&["test"], &[])), &all[..]),
        (Filter::matching(&of(&["hub"], &[])), &[]),
        (Filter::matching(&of(&[], &["A|B\n"])), &all[2..3]),
        (Filter::matching(&of(&[], &["A", "B"])), &all[3..]),
        (Filter::matching(&MessagePattern::default()).excluding([&topics(&["order.#"])]), &all[3..]),
        (Filter::everything().excluding([&topics(&["order"]), &of(&[], &["B"])]), &all[1..3]),
    ] {
        let mut db = database.pool().acquire().await.unwrap();
        let beginning = Snapshot::beginning(&mut db).await.unwrap();
        let mut reader = Reader::of_all_shards(filter.clone(), &beginning);
        reader.open_windows(&Snapshot::now(&mut db).await.unwrap());
        let mut seen = Vec::new();
        while !reader.is_done() {
            seen.extend(reader.read(&mut db, 16).await.unwrap());
        }
        let in_memory = everything.iter().filter(|message| filter.matches(message)).count();
        assert_eq!(in_memory, expected.len(), "the filter in memory differs from the one in SQL: {filter:?}");
        seen.sort_by_key(|message| message.id);
        let seen: Vec<&str> = seen.iter().map(|message| message.topic.as_str()).collect();
        assert_eq!(seen, expected, "{filter:?}");
    }
}

#[tokio::test]
async fn a_large_window_is_read_in_chunks_without_a_gap() {
    let database = TestDatabase::new(&migrations()).await;
    let mut late = database.pool().begin().await.unwrap();
    post_one(&mut late, "0").await;
    let mut reader = LogReader::from_the_beginning();
    assert!(reader.read(database.pool(), 7).await.is_empty());
    let mut tx = database.pool().begin().await.unwrap();
    let batch: Vec<Post> = (1..500).map(|number| Post::new("a", raw(&number.to_string())).with_key("k")).collect();
    post_all(&mut tx, &SOURCE, &batch).await.unwrap();
    tx.commit().await.unwrap();
    late.commit().await.unwrap();
    // Transactions in progress at the old snapshot and later ones are merged by id.
    let expected: Vec<String> = (0..500).map(|number| number.to_string()).collect();
    assert_eq!(payloads(&reader.read(database.pool(), 7).await), expected);
}

/// Writes with savepoints, rollbacks, pauses, and transactions that get their id long before they post.
async fn write(db: PgPool, writer: usize, until: Arc<AtomicBool>, committed: Arc<Mutex<HashMap<String, Vec<i64>>>>) {
    let mut random = writer as u64;
    let mut next = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    while !until.load(Ordering::SeqCst) {
        let key = format!("key{}", next(5));
        let mut tx = db.begin().await.unwrap();
        if next(2) == 0 {
            sqlx::query("select pg_current_xact_id()").execute(&mut *tx).await.unwrap(); // gets a transaction id before the lock
        }
        if next(3) == 0 {
            tokio::time::sleep(Duration::from_millis(next(8))).await;
        }
        // The row lock serialises the transactions of a key, and the counter records their order.
        let first: i64 = sqlx::query_scalar("update counter set value = value + 3 where key = $1 returning value")
            .bind(&key)
            .fetch_one(&mut *tx)
            .await
            .unwrap();
        let message = |number: i64| Post::new("raced", raw(&number.to_string())).with_key(&key);
        let mut posted = vec![first];
        post(&mut tx, &SOURCE, &message(first)).await.unwrap();
        sqlx::query("savepoint s").execute(&mut *tx).await.unwrap();
        post(&mut tx, &SOURCE, &message(first + 1)).await.unwrap();
        if next(2) == 0 {
            sqlx::query("rollback to s").execute(&mut *tx).await.unwrap();
        } else {
            posted.push(first + 1);
        }
        if next(4) == 0 {
            tx.rollback().await.unwrap();
            continue;
        }
        // Recorded under the row lock, so in the order of the commits.
        let mut committed = committed.lock().await;
        tx.commit().await.unwrap();
        committed.entry(key).or_default().extend(posted);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn racing_writers_are_read_once_and_in_order() {
    let database = TestDatabase::new(&migrations()).await;
    sqlx::raw_sql("create table counter (key text primary key, value bigint); insert into counter select 'key' || n, 0 from generate_series(0, 4) n")
        .execute(database.pool())
        .await
        .unwrap();
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(20).connect_lazy_with(database.connect_options());
    let mut open = pool.begin().await.unwrap();
    post(&mut open, &SOURCE, &Post::new("open", raw("0")).with_key("open")).await.unwrap();

    let (until, committed) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<HashMap<String, Vec<i64>>>>::default());
    let writers: Vec<_> =
        (0..12).map(|writer| tokio::spawn(write(pool.clone(), writer, until.clone(), committed.clone()))).collect();
    let enough = if std::env::var_os("PBX_SOAK").is_some() { 20_000 } else { 1_000 };
    let mut reader = LogReader::from_the_beginning();
    let mut seen: Vec<Message> = Vec::new();
    let started = std::time::Instant::now();
    while seen.len() < enough && started.elapsed() < Duration::from_secs(120) {
        seen.extend(reader.read(&pool, 13).await);
    }
    until.store(true, Ordering::SeqCst);
    for writer in writers {
        writer.await.unwrap();
    }
    seen.extend(reader.read(&pool, 13).await);
    assert!(seen.iter().all(|message| message.topic == "raced"));
    open.commit().await.unwrap();
    assert_eq!(reader.read(&pool, 13).await.len(), 1, "the message of the transaction that stayed open");

    let unique: HashSet<_> = seen.iter().map(|message| message.message_id).collect();
    assert_eq!(unique.len(), seen.len(), "no message is read twice");
    let mut by_key: HashMap<String, Vec<i64>> = HashMap::new();
    for message in &seen {
        by_key.entry(message.key.clone().unwrap()).or_default().push(message.payload.get().parse().unwrap());
    }
    let committed = committed.lock().await;
    assert!(seen.len() >= enough);
    for (key, expected) in committed.iter() {
        let mut expected = expected.clone();
        expected.sort_unstable();
        assert_eq!(by_key.get(key), Some(&expected), "{key}: all messages in order");
    }
}

const BACKLOG: &str = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, payload)
    select n % 16, gen_random_uuid(), 'test', 'main', 'a', 'k', '{}' from generate_series(1, 50000) n";

/// The number of blocks of the table and its indexes that are accessed to read a chunk of 160 messages.
async fn blocks_of_a_chunk(db: &mut sqlx::PgConnection, reader: &mut Reader) -> i64 {
    let blocks = async |db: &mut sqlx::PgConnection| -> i64 {
        sqlx::query("select pg_stat_force_next_flush()").execute(&mut *db).await.unwrap();
        let query = "select sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit)::bigint
                     from pg_statio_user_tables where schemaname = 'pillarbox' and relname like 'log\\_%'";
        sqlx::query_scalar(query).fetch_one(db).await.unwrap()
    };
    let before = blocks(&mut *db).await;
    assert_eq!(reader.read(&mut *db, 160).await.unwrap().len(), 160);
    blocks(db).await - before
}

#[tokio::test]
async fn a_chunk_of_a_long_backlog_is_read_by_index() {
    let database = TestDatabase::new(&migrations()).await;
    let mut db = database.pool().acquire().await.unwrap();
    let beginning = Snapshot::beginning(&mut db).await.unwrap();
    sqlx::raw_sql(BACKLOG).execute(&mut *db).await.unwrap();
    sqlx::raw_sql("analyze pillarbox.log").execute(&mut *db).await.unwrap();
    let mut reader = Reader::of_all_shards(Filter::everything(), &beginning);
    reader.open_windows(&Snapshot::now(&mut db).await.unwrap());
    let blocks = blocks_of_a_chunk(&mut db, &mut reader).await;
    assert!(blocks < 1_000, "{blocks} blocks were accessed");
}

#[tokio::test]
async fn a_chunk_of_a_large_late_commit_is_read_by_index() {
    // A separate cluster: a snapshot lists the open transactions of all databases, so that those of other tests would
    // change the plan.
    let servers = PrivateServers::start(&[Server::Postgres]).await;
    let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
    pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
    let pool = PgPool::connect_lazy_with(options);
    let mut late = pool.begin().await.unwrap();
    sqlx::raw_sql(BACKLOG).execute(&mut *late).await.unwrap();
    let mut db = pool.acquire().await.unwrap();
    let mut reader = Reader::of_all_shards(Filter::everything(), &Snapshot::now(&mut db).await.unwrap());
    late.commit().await.unwrap();
    sqlx::raw_sql("analyze pillarbox.log").execute(&mut *db).await.unwrap();
    reader.open_windows(&Snapshot::now(&mut db).await.unwrap());
    for _ in 0..3 {
        let blocks = blocks_of_a_chunk(&mut db, &mut reader).await;
        assert!(blocks < 1_000, "{blocks} blocks were accessed");
    }
}
