//! Health checks of the servers that this process depends on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::database::{self, pooler};
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use relay::Broker;
use runtime::config::InvalidSetting;
use runtime::deadline;
use runtime::health::{Health, Probe};
use sqlx::PgPool;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, OnceCell};

use crate::settings::{Settings, SmtpServer};

/// Timeout of one check.
const CHECK_TIME_MAX: Duration = Duration::from_secs(3);

/// The check of one server, and the probe that reports its result.
struct Check {
    probe: Probe,
    server: Server,
    next_at: Mutex<Instant>,
}

enum Server {
    Postgres(PgPool),
    Pooler(PgPool),
    RabbitMq(Arc<Broker>),
    Redis(Redis),
    Smtp(SmtpServer),
}

struct Redis {
    client: redis::Client,
    connection: OnceCell<ConnectionManager>,
}

/// The checks of all configured servers. Only PostgreSQL and its pooler are required: without RabbitMQ messages wait in the
/// log, without Redis reads are slower, without SMTP e-mails wait.
pub(crate) struct Checks(Vec<Check>);

impl Checks {
    /// Fails when the address of a server is invalid.
    pub(crate) fn new(
        settings: &Settings,
        db: &PgPool,
        pooler: Option<PgPool>,
        broker: Option<Arc<Broker>>,
        health: &Health,
    ) -> Result<Checks, InvalidSetting> {
        let mut checks = Vec::new();
        let mut add = |name, required, server| {
            let next_at = Mutex::new(Instant::now());
            checks.push(Check { probe: health.dependency(name, required), server, next_at });
        };
        add("postgres", true, Server::Postgres(db.clone()));
        if let Some(pooler) = pooler {
            add("pooler", true, Server::Pooler(pooler));
        }
        if let Some(broker) = broker {
            add("rabbitmq", false, Server::RabbitMq(broker));
        }
        if let Some(client) = settings.redis_client()? {
            add("redis", false, Server::Redis(Redis { client, connection: OnceCell::new() }));
        }
        if let Some(server) = settings.smtp_server()? {
            add("smtp", false, Server::Smtp(server));
        }
        Ok(Checks(checks))
    }

    /// Runs all checks that are due, concurrently.
    pub(crate) async fn run(&self) {
        futures_util::future::join_all(self.0.iter().map(Check::run)).await;
    }

    pub(crate) async fn close(&self) {
        for check in &self.0 {
            match &check.server {
                Server::Postgres(db) | Server::Pooler(db) => db.close().await,
                Server::RabbitMq(broker) => broker.close().await,
                Server::Redis(_) | Server::Smtp(_) => {}
            }
        }
    }
}

impl Check {
    /// Checks the server, unless the last check is too recent.
    async fn run(&self) {
        let mut next_at = self.next_at.lock().await;
        if Instant::now() < *next_at {
            return;
        }
        *next_at = Instant::now() + self.server.pause();
        let time_max = self.server.time_max();
        match deadline::within(time_max, self.server.ping()).await {
            Ok(Ok(())) => self.probe.up(),
            Ok(Err(error)) => self.probe.down(&error),
            Err(_) => self.probe.down(&format!("no response within {} s", time_max.as_secs())),
        }
    }
}

impl Server {
    async fn ping(&self) -> Result<(), String> {
        match self {
            Server::Postgres(db) => database::ping(db).await.map_err(|error| error.to_string()),
            Server::Pooler(db) => pooler::ping(db).await.map_err(|error| error.to_string()),
            Server::RabbitMq(broker) => broker.check().await.map_err(|error| error.to_string()),
            Server::Redis(redis) => redis.ping().await.map_err(|error| error.to_string()),
            Server::Smtp(smtp) => smtp.ping().await.map_err(|error| error.to_string()),
        }
    }

    /// The minimum time between two checks. A mail server logs every check as a session, so it is checked rarely.
    fn pause(&self) -> Duration {
        match self {
            Server::Postgres(_) | Server::Pooler(_) | Server::RabbitMq(_) | Server::Redis(_) => Duration::ZERO,
            Server::Smtp(_) => Duration::from_secs(60),
        }
    }

    /// The check of a pooler queues behind requests, so a busy pooler gets more time.
    fn time_max(&self) -> Duration {
        match self {
            Server::Pooler(_) => CHECK_TIME_MAX * 2,
            Server::Postgres(_) | Server::RabbitMq(_) | Server::Redis(_) | Server::Smtp(_) => CHECK_TIME_MAX,
        }
    }
}

impl Redis {
    async fn ping(&self) -> redis::RedisResult<()> {
        let config =
            ConnectionManagerConfig::new().set_number_of_retries(1).set_connection_timeout(Some(CHECK_TIME_MAX));
        let connect = || self.client.get_connection_manager_with_config(config);
        let mut connection = self.connection.get_or_try_init(connect).await?.clone();
        redis::cmd("PING").query_async(&mut connection).await
    }
}

impl SmtpServer {
    /// Connects and reads the greeting. With TLS from the first byte, a successful connection is enough.
    async fn ping(&self) -> std::io::Result<()> {
        const GREETING_BYTES_MAX: u64 = 512;
        let mut stream = TcpStream::connect(&self.address).await?;
        if self.tls {
            return Ok(());
        }
        let (reading, mut writing) = stream.split();
        let mut line = String::new();
        BufReader::new(reading.take(GREETING_BYTES_MAX)).read_line(&mut line).await?;
        writing.write_all(b"QUIT\r\n").await?;
        if line.starts_with("220") {
            Ok(())
        } else {
            Err(std::io::Error::other("the server did not send an SMTP greeting"))
        }
    }
}
