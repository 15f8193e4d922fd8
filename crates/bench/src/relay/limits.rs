//! The raw limits, and what stands beside them in this process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use chrono::Utc;
use contracts::{Envelope, EventId, SCHEMA_VERSION};
use futures_util::future::try_join_all;
use kit::clock::Clock;
use kit::health::Health;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, PublisherConfirm};
use mailbox::cursor::{Cursor, Kind, Start};
use mailbox::database::{self, PoolLimits};
use mailbox::filter::Filter;
use mailbox::post::{Post, Source, post_all};
use mailbox::replica::Replica;
use mailbox::runtime::{Rhythm, Runtime};
use mailbox::work::{Item, LaneError, LaneId, Outcome as Came, Work, Worked};
use serde_json::value::RawValue;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::fixture::{EXCHANGE, Fixture};
use crate::Outcome;

/// So many are unconfirmed at a time; more brings nothing.
const WINDOW: usize = 200;
const GROUP: usize = 50;
/// Rows of an insert, and how many writers insert at once.
const BATCH: usize = 1_000;
const WRITERS: usize = 2;
const BATCHES: usize = 60;

/// 512 bytes of payload.
pub(super) fn payload() -> String {
    format!("{{\"text\":\"{}\"}}", "x".repeat(501))
}

/// Plain publishing with the same client: the same body and properties, the same exchange and queue.
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

    /// Confirmed messages a second.
    pub(super) async fn run(&self, count: u64) -> Outcome<f64> {
        self.fixture.purge().await?;
        let began = Instant::now();
        let mut unconfirmed = VecDeque::with_capacity(WINDOW);
        for _ in 0..count / GROUP as u64 {
            // Handed over together: one by one, each would wait until it is written.
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

/// Plain inserts by unnest into a table with the log's columns and indexes.
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

    /// Rows a second.
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

/// Posting, and a consumer that reads it all and does nothing with it, in this process and at once.
pub(super) struct NullSink {
    db: PgPool,
    runtime: Runtime,
    stop: CancellationToken,
    read: Arc<AtomicU64>,
}

struct Count(Arc<AtomicU64>);

impl Work for Count {
    async fn run(&mut self, _: &LaneId, items: &[&Item]) -> Result<Worked, LaneError> {
        self.0.fetch_add(items.len() as u64, Ordering::Relaxed);
        Ok(Worked { outcomes: vec![Came::Done; items.len()], tx: None })
    }
}

impl NullSink {
    pub(super) async fn start(fixture: &Fixture) -> Outcome<NullSink> {
        let (stop, read) = (CancellationToken::new(), Arc::<AtomicU64>::default());
        let limits = PoolLimits { connections_min: 0, connections_max: 4, for_workers: true, ..PoolLimits::default() };
        let work_db = database::pool((*fixture.db.connect_options()).clone(), limits);
        let replica = Replica::new("bench", Duration::from_secs(15));
        let runtime = Runtime::start(work_db, Clock::system(), replica, Health::default(), stop.clone());
        let cursor = Cursor {
            consumer: "null".to_owned(),
            kind: Kind::Handler,
            filter: Filter::everything(),
            start: Start::Now,
        };
        let mut rhythm = Rhythm::default();
        rhythm.lane.batch = BATCH as u32;
        rhythm.lanes = 2;
        runtime.consume(&cursor, rhythm, || Count(read.clone()));
        let sink = NullSink { db: fixture.db.clone(), runtime, stop, read };
        let known = "select count(*) from pillarbox.lease where consumer = 'null' and owner is not null";
        while sqlx::query_scalar::<_, i64>(known).fetch_one(&sink.db).await? < 16 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(sink)
    }

    /// Messages a second, from the first post to the last read.
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
        self.runtime.ended().await;
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
