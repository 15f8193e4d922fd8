//! The raw limits of RabbitMQ and PostgreSQL, and the in-process runs that are compared with them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use chrono::Utc;
use contracts::{Envelope, EventId, SCHEMA_VERSION};
use futures_util::future::try_join_all;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, PublisherConfirm};
use pillarbox::consumers::{
    BatchResult, Consumer, ConsumerError, ConsumerKind, ConsumerOptions, Delivery, Outcome as MessageOutcome,
    Processor, Replica, Runtime, StartAt, WorkerContext,
};
use pillarbox::database::{self, Database, PoolLimits};
use pillarbox::log::{Filter, Post, Source, post_all};
use runtime::clock::Clock;
use runtime::health::Health;
use serde_json::value::RawValue;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::fixture::{EXCHANGE, Fixture};
use crate::Outcome;

/// The maximum number of unconfirmed messages. A larger one does not increase the rate.
const WINDOW: usize = 200;
const GROUP: usize = 50;
/// Rows per insert, and concurrent writers.
const BATCH: usize = 1_000;
const WRITERS: usize = 2;
const BATCHES: usize = 60;

/// A payload of 512 bytes.
pub(super) fn payload() -> String {
    format!("{{\"text\":\"{}\"}}", "x".repeat(501))
}

/// Plain publishing with the same client library, body, properties, exchange and queue.
pub(super) struct RawPublishing<'a> {
    fixture: &'a Fixture,
    channel: Channel,
}

impl RawPublishing<'_> {
    pub(super) async fn new(fixture: &Fixture) -> Outcome<RawPublishing<'_>> {
        let channel = fixture.new_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(RawPublishing { fixture, channel })
    }

    /// Returns the confirmed messages per second.
    pub(super) async fn run(&self, count: u64) -> Outcome<f64> {
        self.fixture.purge().await?;
        let began = Instant::now();
        let mut unconfirmed = VecDeque::with_capacity(WINDOW);
        for _ in 0..count / GROUP as u64 {
            // Sent concurrently: one by one, each send would wait for the write.
            let sending = (0..GROUP).map(|_| self.send());
            unconfirmed.extend(try_join_all(sending).await?);
            while unconfirmed.len() > WINDOW - GROUP
                && let Some(first) = unconfirmed.pop_front()
            {
                first.await?;
            }
        }
        for confirm in unconfirmed {
            confirm.await?;
        }
        let rate = count as f64 / began.elapsed().as_secs_f64();
        self.fixture.purge().await?;
        Ok(rate)
    }

    async fn send(&self) -> Outcome<PublisherConfirm> {
        let id = EventId(Uuid::now_v7());
        let body = serde_json::to_vec(&Envelope {
            event_id: id,
            event_type: "bench.posted".to_owned(),
            timestamp: Utc::now(),
            aggregate_type: None,
            aggregate_id: None,
            trace_id: Some(id.0.simple().to_string()),
            source_event_id: None,
            schema_version: SCHEMA_VERSION,
            payload: RawValue::from_string(payload())?,
        })?;
        let properties = BasicProperties::default()
            .with_content_type("application/json".into())
            .with_delivery_mode(2)
            .with_message_id(id.to_string().into())
            .with_type("bench.posted".into());
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        Ok(self.channel.basic_publish(EXCHANGE.into(), "bench.posted".into(), options, &body, properties).await?)
    }
}

/// Plain inserts with `unnest` into a table with the columns and indexes of the log.
pub(super) struct RawInserts {
    db: PgPool,
}

impl RawInserts {
    pub(super) async fn new(fixture: &Fixture) -> Outcome<RawInserts> {
        sqlx::raw_sql(
            "create table raw_log (like pillarbox.log including defaults including constraints);
             create index on raw_log (shard, id);
             create index on raw_log (xid, shard, id)",
        )
        .execute(&fixture.db)
        .await?;
        Ok(RawInserts { db: fixture.db.clone() })
    }

    /// Returns the rows per second.
    pub(super) async fn run(&self) -> Outcome<f64> {
        let began = Instant::now();
        let writers: Vec<_> = (0..WRITERS).map(|_| tokio::spawn(insert(self.db.clone()))).collect();
        for writer in writers {
            writer.await??;
        }
        let rate = (WRITERS * BATCHES * BATCH) as f64 / began.elapsed().as_secs_f64();
        sqlx::query("truncate raw_log").execute(&self.db).await?;
        Ok(rate)
    }
}

async fn insert(db: PgPool) -> Outcome<()> {
    let payload = payload();
    for _ in 0..BATCHES {
        let ids: Vec<Uuid> = (0..BATCH).map(|_| Uuid::now_v7()).collect();
        let shards: Vec<i16> = (0..BATCH as i16).map(|number| number % 16).collect();
        let text = |text: &str| vec![text.to_owned(); BATCH];
        sqlx::query(
            "insert into raw_log (shard, message_id, source, tenant, topic, key, headers, payload)
             select m.shard, m.message_id, 'bench', m.tenant, m.topic, m.key, '{}', m.payload::json
             from unnest($1::smallint[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[])
                  as m (shard, message_id, tenant, topic, key, payload)",
        )
        .bind(shards)
        .bind(&ids)
        .bind(text("main"))
        .bind(text("bench.posted"))
        .bind(ids.iter().map(Uuid::to_string).collect::<Vec<_>>())
        .bind(text(&payload))
        .execute(&db)
        .await?;
    }
    Ok(())
}

/// Posts messages while a consumer in this process reads and ignores them.
pub(super) struct NullSink {
    db: PgPool,
    runtime: Runtime,
    stop: CancellationToken,
    read: Arc<AtomicU64>,
}

struct Count(Arc<AtomicU64>);

impl Processor for Count {
    async fn process(&mut self, _: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        self.0.fetch_add(items.len() as u64, Ordering::Relaxed);
        Ok(BatchResult { outcomes: vec![MessageOutcome::Done; items.len()], tx: None })
    }
}

impl NullSink {
    pub(super) async fn start(fixture: &Fixture) -> Outcome<NullSink> {
        let (stop, read) = (CancellationToken::new(), Arc::<AtomicU64>::default());
        let limits = PoolLimits { connections_min: 0, connections_max: 4, for_workers: true, ..PoolLimits::default() };
        let work_db = database::pool((*fixture.db.connect_options()).clone(), limits);
        let replica = Replica::new("bench", Duration::from_secs(15));
        let runtime = Runtime::start(Database::new(work_db), Clock::system(), replica, Health::default(), stop.clone());
        let consumer = Consumer {
            name: "null".to_owned(),
            kind: ConsumerKind::Handler,
            filter: Filter::everything(),
            start: StartAt::Now,
        };
        let mut options = ConsumerOptions::default();
        options.worker.batch = BATCH as u32;
        options.workers = 2;
        runtime.consume(&consumer, options, || Count(read.clone()));
        let sink = NullSink { db: fixture.db.clone(), runtime, stop, read };
        let known = "select count(*) from pillarbox.lease where consumer = 'null' and owner is not null";
        while sqlx::query_scalar::<_, i64>(known).fetch_one(&sink.db).await? < 16 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(sink)
    }

    /// Returns the messages per second, from the first post to the last read.
    pub(super) async fn run(&self) -> Outcome<f64> {
        let (before, count) = (self.read.load(Ordering::Relaxed), (WRITERS * BATCHES * BATCH) as u64);
        let began = Instant::now();
        let writers: Vec<_> = (0..WRITERS).map(|_| tokio::spawn(post(self.db.clone()))).collect();
        for writer in writers {
            writer.await??;
        }
        while self.read.load(Ordering::Relaxed) < before + count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(count as f64 / began.elapsed().as_secs_f64())
    }

    pub(super) async fn stop(self) {
        self.stop.cancel();
        self.runtime.join().await;
    }
}

async fn post(db: PgPool) -> Outcome<()> {
    for batch in 0..BATCHES {
        let message = |number: usize| -> Outcome<Post> {
            Ok(Post::new("bench.posted", RawValue::from_string(payload())?)
                .with_key((batch * BATCH + number).to_string()))
        };
        let messages = (0..BATCH).map(message).collect::<Outcome<Vec<Post>>>()?;
        let mut tx = db.begin().await?;
        post_all(&mut tx, &Source::new("bench"), &messages).await?;
        tx.commit().await?;
    }
    Ok(())
}
