//! The connection to RabbitMQ: opened on first use, and again after it is lost.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::types::ShortString;
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, ErrorKind};
use runtime::backoff::Backoff;
use runtime::secret::Secret;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout, timeout_at};

use crate::body_limit;

/// How long a caller waits for a connection that is being opened.
const WAIT_TIME_MAX: Duration = Duration::from_secs(2);
/// The time limit of one attempt to connect; it doubles after each attempt that exceeds it. lapin never responds if
/// the connection is cut at certain points of the handshake, so an attempt needs a limit. An aborted attempt may
/// leave a thread of lapin behind, so aborts have to be rare.
const CONNECT_TIME: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(600));
/// The time limit of a request to RabbitMQ. Under load it needs seconds to declare a quorum queue.
const RESPONSE_TIME_MAX: Duration = Duration::from_secs(10);
/// The pause between two checks of the connection while a channel is opened.
const CHECK_PAUSE: Duration = Duration::from_millis(100);
/// The heartbeat in seconds, unless the address sets another. A peer that vanishes is detected after twice this time;
/// with RabbitMQ's own default, 60 s, detection would take two minutes.
const HEARTBEAT_S: u16 = 10;

/// AMQP's code for an object that does not exist.
pub(crate) const NOT_FOUND: u16 = 404;

/// A failure of the broker or of the connection to it.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// Without the address, which contains a password.
    #[error("must be an address such as amqp://user:password@host:5672/vhost")]
    Address,
    #[error("RabbitMQ has not responded for {} s", .0.as_secs())]
    Timeout(Duration),
    /// With host and port, which are not secret.
    #[error("RabbitMQ at {0}: {1}")]
    Unreachable(String, #[source] lapin::Error),
    #[error("the connection to RabbitMQ was lost: try again")]
    ConnectionLost,
    #[error(
        "RabbitMQ accepts no messages, because it is short of memory or disk space: free some, or raise its limits"
    )]
    Blocked,
    #[error("RabbitMQ did not confirm the messages within {} ms: publish them again", .0.as_millis())]
    Unconfirmed(Duration),
    /// The caller no longer wants to publish the rest.
    #[error("the rest of the batch may not be published any more")]
    Stopped,
    #[error("RabbitMQ has no exchange `{0}`: declare it, or correct its name")]
    NoExchange(String),
    #[error("RabbitMQ has no queue `{0}`: declare it, or correct its name")]
    NoQueue(String),
    #[error("RabbitMQ no longer delivers from queue `{0}`, which was deleted or moved: consume it again")]
    Cancelled(String),
    #[error("the channel of this delivery is closed: RabbitMQ delivers the message again")]
    StaleDelivery,
    #[error("`{0}` is too long: a name in AMQP has at most 255 bytes")]
    NameTooLong(String),
    #[error("RabbitMQ: {0}")]
    Amqp(#[from] lapin::Error),
}

/// One connection. All publishers share one; each intake has its own.
pub struct Broker {
    uri: Secret<AMQPUri>,
    state: Mutex<State>,
}

enum State {
    Disconnected,
    /// The attempt runs in its own task, and there is only one at a time: dropping an attempt before it ends would
    /// leak its thread and socket.
    Connecting {
        since: Instant,
        /// The number of this attempt since the last connection; it determines the time limit.
        number: u32,
        attempt: JoinHandle<lapin::Result<Connection>>,
    },
    Connected(Arc<Connection>),
}

impl Broker {
    /// Checks the address. The first use connects, so that an unavailable broker does not delay the start.
    pub fn new(url: Secret<String>) -> Result<Broker, BrokerError> {
        let mut uri: AMQPUri = url.reveal().parse().map_err(|_| BrokerError::Address)?;
        uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
        Ok(Broker { uri: Secret::new(uri), state: Mutex::new(State::Disconnected) })
    }

    /// Returns a broker with the same address and its own connection.
    pub(crate) fn separate_connection(&self) -> Broker {
        Broker { uri: self.uri.clone(), state: Mutex::new(State::Disconnected) }
    }

    /// Fails unless there is a live connection, or one can be opened in time.
    pub async fn check(&self) -> Result<(), BrokerError> {
        self.connection().await.map(drop)
    }

    /// Opens a channel. Dropping it closes it.
    pub(crate) async fn channel(&self) -> Result<Channel, BrokerError> {
        let connection = self.connection().await?;
        // A blocked connection sends nothing, so a request would only reach its time limit.
        if connection.status().blocked() {
            return Err(BrokerError::Blocked);
        }
        // A connection that does not respond is not closed here, because it may only be busy. If it is dead, the
        // heartbeat closes it, and the next call connects again.
        tokio::select! {
            opened = response_of(connection.create_channel()) => opened,
            () = lost(&connection) => Err(BrokerError::ConnectionLost),
        }
    }

    async fn connection(&self) -> Result<Arc<Connection>, BrokerError> {
        let deadline = tokio::time::Instant::now() + WAIT_TIME_MAX;
        // Callers that wait for a connection hold the lock, so the deadline applies to the lock as well.
        let Ok(mut state) = timeout_at(deadline, self.state.lock()).await else {
            return Err(BrokerError::Timeout(WAIT_TIME_MAX));
        };
        match &mut *state {
            State::Connected(connection) if connection.status().connected() => return Ok(Arc::clone(connection)),
            State::Connecting { since, number, attempt } if since.elapsed() > CONNECT_TIME.pause(*number) => {
                attempt.abort();
                *state = self.connecting(number.saturating_add(1));
            }
            State::Connecting { .. } => {}
            State::Connected(_) | State::Disconnected => *state = self.connecting(1),
        }
        let State::Connecting { since, attempt, .. } = &mut *state else {
            return Err(BrokerError::Timeout(CONNECT_TIME.max));
        };
        let Ok(finished) = timeout_at(deadline, attempt).await else {
            return Err(BrokerError::Timeout(since.elapsed()));
        };
        *state = State::Disconnected;
        // The attempt panicked inside lapin; the next call tries again.
        let connected = finished.map_err(|_| BrokerError::Timeout(Duration::ZERO))?;
        let connection = Arc::new(connected.map_err(|error| BrokerError::Unreachable(self.address(), error))?);
        *state = State::Connected(Arc::clone(&connection));
        Ok(connection)
    }

    fn address(&self) -> String {
        let authority = &self.uri.reveal().authority;
        format!("{}:{}", authority.host, authority.port)
    }

    fn connecting(&self, number: u32) -> State {
        let uri = self.uri.reveal().clone();
        let attempt = tokio::spawn(async move {
            let properties = ConnectionProperties::default().with_connection_name("pillarbox".into());
            body_limit::connect(uri, properties).await
        });
        State::Connecting { since: Instant::now(), number, attempt }
    }

    /// Closes the connection properly, so that the broker does not log a lost connection.
    pub async fn close(&self) {
        match std::mem::replace(&mut *self.state.lock().await, State::Disconnected) {
            State::Connected(connection) => {
                if let Err(error) = response_of(connection.close(200, "bye".into())).await {
                    tracing::debug!(%error, "the connection to the broker was already closed");
                }
            }
            State::Connecting { attempt, .. } => attempt.abort(),
            State::Disconnected => {}
        }
    }
}

/// Returns when the connection has ended. lapin never completes a request for a channel if the connection ends at the
/// same time.
async fn lost(connection: &Connection) {
    while connection.status().connected() {
        sleep(CHECK_PAUSE).await;
    }
}

/// Returns RabbitMQ's response. Fails after a time limit. After an error the channel must not be used again: it is
/// closed, or a late response is still to come.
pub(crate) async fn response_of<T>(request: impl Future<Output = lapin::Result<T>>) -> Result<T, BrokerError> {
    match timeout(RESPONSE_TIME_MAX, request).await {
        Ok(responded) => Ok(responded?),
        Err(_) => Err(BrokerError::Timeout(RESPONSE_TIME_MAX)),
    }
}

/// Converts a name. lapin's own conversion panics on a name that is too long.
pub(crate) fn short_name(text: &str) -> Result<ShortString, BrokerError> {
    ShortString::try_new(text).map_err(|_| BrokerError::NameTooLong(text.to_owned()))
}

/// Returns AMQP's code of a rejected request (404, 406, ...).
pub(crate) fn amqp_code(error: &BrokerError) -> Option<u16> {
    let BrokerError::Amqp(error) = error else { return None };
    match error.kind() {
        ErrorKind::ProtocolError(refusal) => Some(refusal.get_id()),
        _ => None,
    }
}
