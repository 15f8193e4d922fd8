//! Looking whether the servers that this process depends on are there.

use std::time::Duration;

use kit::config::BadSetting;
use kit::health::{Health, Probe};
use kit::secret::Secret;
use mailbox::database;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use relay::Broker;
use sqlx::PgPool;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;

use crate::settings::Settings;

const CHECK_TIME_MAX: Duration = Duration::from_secs(3);

/// One server, and the place to report on it.
struct Check {
    probe: Probe,
    server: Server,
}

enum Server {
    Postgres(PgPool),
    RabbitMq(Broker),
    Redis(Redis),
    Smtp(String),
}

struct Redis {
    client: redis::Client,
    connection: OnceCell<ConnectionManager>,
}

/// The servers that the settings name. Only PostgreSQL is required: without RabbitMQ messages wait in the log, without
/// Redis reads are slower, without SMTP mails wait.
pub(crate) struct Checks(Vec<Check>);

impl Checks {
    pub(crate) fn new(settings: &Settings, db: &PgPool, health: &Health) -> Result<Checks, BadSetting> {
        let mut checks =
            vec![Check { probe: health.dependency("postgres", true), server: Server::Postgres(db.clone()) }];
        let mut add = |name, server| checks.push(Check { probe: health.dependency(name, false), server });
        if let Some(url) = &settings.amqp_url {
            let broker = Broker::new(url.clone()).map_err(|error| BadSetting::new("amqp_url", error))?;
            add("rabbitmq", Server::RabbitMq(broker));
        }
        if let Some(url) = &settings.redis_url {
            let takes = "takes an address such as redis://host:6379/0";
            let client = redis::Client::open(url.reveal().as_str()).map_err(|_| BadSetting::new("redis_url", takes))?;
            add("redis", Server::Redis(Redis { client, connection: OnceCell::new() }));
        }
        if let Some(url) = &settings.smtp_url {
            add("smtp", Server::Smtp(smtp_address(url)?));
        }
        Ok(Checks(checks))
    }

    /// Looks at all of them at once.
    pub(crate) async fn run(&self) {
        futures_util::future::join_all(self.0.iter().map(Check::run)).await;
    }

    pub(crate) async fn close(&self) {
        for check in &self.0 {
            if let Server::RabbitMq(broker) = &check.server {
                broker.close().await;
            }
        }
    }
}

impl Check {
    async fn run(&self) {
        match tokio::time::timeout(CHECK_TIME_MAX, self.server.ping()).await {
            Ok(Ok(())) => self.probe.up(),
            Ok(Err(error)) => self.probe.down(&error),
            Err(_) => self.probe.down(&format!("no answer within {} s", CHECK_TIME_MAX.as_secs())),
        }
    }
}

impl Server {
    async fn ping(&self) -> Result<(), String> {
        match self {
            Server::Postgres(db) => database::ping(db).await.map_err(|error| error.to_string()),
            Server::RabbitMq(broker) => broker.check().await.map_err(|error| error.to_string()),
            Server::Redis(redis) => redis.ping().await.map_err(|error| error.to_string()),
            Server::Smtp(address) => greet_smtp(address).await.map_err(|error| error.to_string()),
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

fn smtp_address(url: &Secret<String>) -> Result<String, BadSetting> {
    let takes = || BadSetting::new("smtp_url", "takes an address such as smtp://user:password@host:587");
    let uri: axum::http::Uri = url.reveal().parse().map_err(|_| takes())?;
    let port = match (uri.scheme_str(), uri.port_u16()) {
        (Some("smtp" | "smtps"), Some(port)) => port,
        (Some("smtp"), None) => 587,
        (Some("smtps"), None) => 465,
        _ => return Err(takes()),
    };
    Ok(format!("{}:{port}", uri.host().ok_or_else(takes)?))
}

/// A mail server speaks first. (Behind TLS it does not; reaching it is all that can be asked then.)
async fn greet_smtp(address: &str) -> std::io::Result<()> {
    let stream = TcpStream::connect(address).await?;
    if address.ends_with(":465") {
        return Ok(());
    }
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await?;
    if line.starts_with("220") { Ok(()) } else { Err(std::io::Error::other("it did not greet as a mail server does")) }
}
