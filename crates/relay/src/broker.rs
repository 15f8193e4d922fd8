//! The connection to RabbitMQ.

use std::time::{Duration, Instant};

use kit::secret::Secret;
use lapin::{Connection, ConnectionProperties};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

/// How long a caller waits for a connection that is being made.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long making one may take. lapin has a thread per connection, which outlives an attempt that is given up, so
/// giving up is rare.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(600);

#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// Not the address itself: it holds a password.
    #[error("takes an address such as amqp://user:password@host:5672/vhost")]
    Address,
    #[error("RabbitMQ has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("RabbitMQ: {0}")]
    Amqp(#[from] lapin::Error),
}

/// One connection per process, shared by what publishes and consumes.
pub struct Broker {
    url: Secret<String>,
    state: Mutex<State>,
}

enum State {
    Disconnected,
    /// In a task of its own, one at a time: dropping an attempt halfway would leave its thread and socket behind.
    Connecting {
        since: Instant,
        attempt: JoinHandle<lapin::Result<Connection>>,
    },
    Connected(Connection),
}

impl Broker {
    /// Checks the address; connects later, so that a broker that is away delays nothing.
    pub fn new(url: Secret<String>) -> Result<Broker, BrokerError> {
        url.reveal().parse::<lapin::uri::AMQPUri>().map_err(|_| BrokerError::Address)?;
        Ok(Broker { url, state: Mutex::new(State::Disconnected) })
    }

    /// Fails unless there is a live connection, or one can be had soon.
    pub async fn check(&self) -> Result<(), BrokerError> {
        let mut state = self.state.lock().await;
        match &mut *state {
            State::Connected(connection) if connection.status().connected() => return Ok(()),
            State::Connecting { since, attempt } if since.elapsed() > CONNECT_TIME_MAX => {
                attempt.abort();
                *state = State::Disconnected;
            }
            State::Connecting { .. } => {}
            State::Connected(_) | State::Disconnected => *state = self.connecting(),
        }
        let State::Connecting { since, attempt } = &mut *state else {
            return Err(BrokerError::Silent(CONNECT_TIME_MAX));
        };
        let Ok(finished) = tokio::time::timeout(PATIENCE, attempt).await else {
            return Err(BrokerError::Silent(since.elapsed()));
        };
        *state = State::Disconnected;
        match finished {
            Ok(connected) => *state = State::Connected(connected?),
            // It panicked, which is lapin's to answer for; the next check tries again.
            Err(_) => return Err(BrokerError::Silent(Duration::ZERO)),
        }
        Ok(())
    }

    fn connecting(&self) -> State {
        let url = self.url.clone();
        let attempt = tokio::spawn(async move {
            let properties = ConnectionProperties::default().with_connection_name("pillarbox".into());
            Connection::connect(url.reveal(), properties).await
        });
        State::Connecting { since: Instant::now(), attempt }
    }

    /// Says goodbye, so that the broker's log has no lost connection.
    pub async fn close(&self) {
        match std::mem::replace(&mut *self.state.lock().await, State::Disconnected) {
            State::Connected(connection) => {
                if let Err(error) = connection.close(200, "bye".into()).await {
                    tracing::debug!(%error, "the broker connection was already gone");
                }
            }
            State::Connecting { attempt, .. } => attempt.abort(),
            State::Disconnected => {}
        }
    }
}
