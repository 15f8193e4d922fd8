//! The connection to RabbitMQ.

use std::time::Duration;

use kit::secret::Secret;
use lapin::{Connection, ConnectionProperties};
use tokio::sync::Mutex;

const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// Not the address itself: it holds a password.
    #[error("setting `amqp_url`: takes an address such as amqp://user:password@host:5672/vhost")]
    Address,
    #[error("RabbitMQ did not answer within {} s", CONNECT_TIME_MAX.as_secs())]
    Timeout,
    #[error("RabbitMQ: {0}")]
    Amqp(#[from] lapin::Error),
}

/// One connection per process, shared by what publishes and consumes.
pub struct Broker {
    url: Secret<String>,
    connection: Mutex<Option<Connection>>,
}

impl Broker {
    /// Checks the address; connects later, so that a broker that is away delays nothing.
    pub fn new(url: Secret<String>) -> Result<Broker, BrokerError> {
        url.reveal().parse::<lapin::uri::AMQPUri>().map_err(|_| BrokerError::Address)?;
        Ok(Broker { url, connection: Mutex::new(None) })
    }

    /// Fails unless there is a live connection, or one can be had now.
    pub async fn check(&self) -> Result<(), BrokerError> {
        let mut connection = self.connection.lock().await;
        if connection.as_ref().is_some_and(|connection| connection.status().connected()) {
            return Ok(());
        }
        *connection = None;
        let properties = ConnectionProperties::default().with_connection_name("pillarbox".into());
        let connecting = Connection::connect(self.url.reveal(), properties);
        *connection =
            Some(tokio::time::timeout(CONNECT_TIME_MAX, connecting).await.map_err(|_| BrokerError::Timeout)??);
        Ok(())
    }

    /// Says goodbye, so that the broker's log has no lost connection.
    pub async fn close(&self) {
        if let Some(connection) = self.connection.lock().await.take()
            && let Err(error) = connection.close(200, "bye".into()).await
        {
            tracing::debug!(%error, "the broker connection was already gone");
        }
    }
}
