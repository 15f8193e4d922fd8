//! A database, exchanges and queues for one run, and relays on them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueuePurgeOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Postgres, Transaction};

use crate::Outcome;
use crate::costs::Family;
use crate::server::Server;

pub(super) const EXCHANGE: &str = "bench.events";
pub(super) const QUEUE: &str = "bench.queue";
const SECOND_EXCHANGE: &str = "bench.second";
pub(super) const SECOND_QUEUE: &str = "bench.second.queue";

pub(super) struct Fixture {
    pillarbox: PathBuf,
    folder: PathBuf,
    admin: PgPool,
    database: String,
    database_url: String,
    amqp_url: String,
    pub(super) db: PgPool,
    postgres: Family,
    connection: Connection,
    channel: Channel,
}

pub(super) struct Relay(Server);

impl Relay {
    pub(super) fn rss_mib(&self) -> Outcome<f64> {
        Ok(self.0.rss_bytes()? as f64 / 1024.0 / 1024.0)
    }

    pub(super) async fn stop(self) -> Outcome<()> {
        self.0.stop().await
    }
}

impl Fixture {
    pub(super) async fn new(pillarbox: &Path) -> Outcome<Fixture> {
        let server = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set: run `make bench`"));
        let (postgres, amqp_url) = (server("PBX_TEST_POSTGRES_URL")?, server("PBX_TEST_AMQP_URL")?);
        let name = format!("bench_{}", uuid::Uuid::new_v4().simple());
        let folder = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(&folder)?;
        let admin = PgPool::connect(&postgres).await?;
        sqlx::query(sqlx::AssertSqlSafe(format!("create database {name}"))).execute(&admin).await?;
        let database_url =
            format!("{}/{name}", postgres.rsplit_once('/').ok_or("PBX_TEST_POSTGRES_URL names no database")?.0);
        let status = tokio::process::Command::new(pillarbox)
            .args(["migrate", "--database-url", &database_url, "--data-dir"])
            .arg(&folder)
            .status()
            .await?;
        if !status.success() {
            return Err("pillarbox migrate failed".into());
        }
        let db = PgPoolOptions::new().max_connections(16).connect(&database_url).await?;
        let connection = Connection::connect(&amqp_url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        for (exchange, queue) in [(EXCHANGE, QUEUE), (SECOND_EXCHANGE, SECOND_QUEUE)] {
            let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
            channel.exchange_declare(exchange.into(), ExchangeKind::Topic, durable, FieldTable::default()).await?;
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            let mut quorum = FieldTable::default();
            quorum.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
            channel.queue_declare(queue.into(), durable, quorum).await?;
            let options = QueueBindOptions::default();
            channel.queue_bind(queue.into(), exchange.into(), "#".into(), options, FieldTable::default()).await?;
        }
        let postgres = Family::of_postgres(&db).await?;
        let pillarbox = pillarbox.to_owned();
        let database = name;
        Ok(Fixture { pillarbox, folder, admin, database, database_url, amqp_url, db, postgres, connection, channel })
    }

    /// Starts a relay as a separate process with default settings except its routes.
    pub(super) async fn relay(&self, dual: bool) -> Outcome<Relay> {
        let mut settings =
            format!("[relay]\ninitial_delay_ms = 0\n[[relay.routes]]\nname = \"bench\"\nexchange = \"{EXCHANGE}\"\n");
        if dual {
            settings += &format!(
                "[[relay.routes]]\nname = \"second\"\nexchange = \"{SECOND_EXCHANGE}\"\nalso = true\nfrom_now = true\n"
            );
        }
        let file = self.folder.join("pillarbox.toml");
        std::fs::write(&file, settings)?;
        let (file, folder) = (file.to_string_lossy(), self.folder.to_string_lossy());
        let args = [
            "serve",
            "--config",
            &file,
            "--data-dir",
            &folder,
            "--listen",
            "127.0.0.1:0",
            "--roles",
            "relay",
            "--database-url",
            &self.database_url,
            "--amqp-url",
            &self.amqp_url,
        ];
        let relay = Relay(Server::start(&self.pillarbox, &args).await?);
        // Wait until its shard workers have claimed their shards.
        let consumers = if dual { 2 } else { 1 };
        for _ in 0..600 {
            let query = "select count(*) from pillarbox.lease join pillarbox.shard_worker using (consumer, owner)
                         join pillarbox.replica on replica.id = shard_worker.replica where until > now()";
            if sqlx::query_scalar::<_, i64>(query).fetch_one(&self.db).await? == consumers * 16 {
                return Ok(relay);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err("the relay did not claim its shards in time".into())
    }

    pub(super) async fn new_channel(&self) -> Outcome<Channel> {
        Ok(self.connection.create_channel().await?)
    }

    pub(super) async fn depth(&self, queue: &str) -> Outcome<u64> {
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = self.channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
        Ok(u64::from(queue.message_count()))
    }

    pub(super) async fn purge(&self) -> Outcome<()> {
        for queue in [QUEUE, SECOND_QUEUE] {
            self.empty(queue).await?;
        }
        Ok(())
    }

    /// Purges the queue. Returns the number of messages in it.
    pub(super) async fn empty(&self, queue: &str) -> Outcome<u64> {
        Ok(u64::from(self.channel.queue_purge(queue.into(), QueuePurgeOptions::default()).await?))
    }

    /// Starts a transaction whose snapshot prevents vacuum from removing later row versions.
    pub(super) async fn pin(&self) -> Outcome<Transaction<'static, Postgres>> {
        let mut pin = self.db.begin().await?;
        sqlx::query("set transaction isolation level repeatable read").execute(&mut *pin).await?;
        sqlx::query("select pg_current_xact_id()").execute(&mut *pin).await?;
        Ok(pin)
    }

    /// The CPU seconds of the relay, PostgreSQL and RabbitMQ.
    pub(super) fn cpu(&self, relay: &Relay) -> Outcome<[f64; 3]> {
        Ok([relay.0.cpu_seconds()?, self.postgres.cpu_seconds()?, cpu_of("beam.smp")?])
    }

    pub(super) async fn end(self) -> Outcome<()> {
        self.db.close().await;
        sqlx::query(sqlx::AssertSqlSafe(format!("drop database {} with (force)", self.database)))
            .execute(&self.admin)
            .await?;
        std::fs::remove_dir_all(&self.folder)?;
        Ok(())
    }
}

/// The CPU seconds of all processes with this name, since the process id of RabbitMQ is unknown.
fn cpu_of(name: &str) -> Outcome<f64> {
    let mut seconds = 0.0;
    for entry in std::fs::read_dir("/proc")? {
        let Ok(stat) = std::fs::read_to_string(entry?.path().join("stat")) else { continue };
        if stat.split_once('(').is_some_and(|(_, rest)| rest.starts_with(&format!("{name})"))) {
            seconds += crate::server::cpu_in(&stat)?;
        }
    }
    Ok(seconds)
}
