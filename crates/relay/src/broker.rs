//! The connection to RabbitMQ.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kit::secret::Secret;
use lapin::types::ShortString;
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, ErrorKind};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout, timeout_at};

/// How long a caller waits for a connection that is being made.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long making one may take at first; twice as long after each attempt that is given up. lapin never answers if the
/// connection is cut at certain moments of the handshake, so giving up has to be possible; and it has a thread per
/// connection, which may outlive an attempt that is given up, so it has to be rare.
const CONNECT_TIME_MIN: Duration = Duration::from_secs(5);
const CONNECT_TIME_MAX: Duration = Duration::from_secs(600);
/// How long RabbitMQ may take to answer a request. A loaded one needs seconds to declare a quorum queue.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// How often to look whether the connection is still there, while a channel is opened.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Unless the address says otherwise. A peer that vanishes without a word is noticed after twice this time; with
/// RabbitMQ's own proposal, a minute, it would take two.
const HEARTBEAT_S: u16 = 10;

#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// Not the address itself: it holds a password.
    #[error("takes an address such as amqp://user:password@host:5672/vhost")]
    Address,
    #[error("RabbitMQ has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// With its host and port, which hold no secret.
    #[error("RabbitMQ at {0}: {1}")]
    Unreachable(String, #[source] lapin::Error),
    #[error("the connection to RabbitMQ is lost: try again")]
    Lost,
    #[error("RabbitMQ takes no messages, it is short of memory or disk: free some, or raise its limits")]
    Blocked,
    #[error("RabbitMQ did not confirm the messages within {} ms: publish them again", .0.as_millis())]
    Unconfirmed(Duration),
    #[error("RabbitMQ has no exchange `{0}`: declare it, or correct its name")]
    NoExchange(String),
    #[error("RabbitMQ has no queue `{0}`: declare it, or correct its name")]
    NoQueue(String),
    #[error("RabbitMQ no longer delivers from queue `{0}`, it was deleted or moved: consume it anew")]
    Cancelled(String),
    #[error("the channel of this delivery is gone: it comes again")]
    Stale,
    #[error("`{0}` is longer than the 255 bytes that AMQP gives a name")]
    LongName(String),
    #[error("RabbitMQ: {0}")]
    Amqp(#[from] lapin::Error),
}

/// One connection, shared by what publishes; what reads a queue has one of its own.
pub struct Broker {
    uri: Secret<AMQPUri>,
    state: Mutex<State>,
}

enum State {
    Disconnected,
    /// In a task of its own, one at a time: dropping an attempt halfway would leave its thread and socket behind.
    Connecting {
        since: Instant,
        time_max: Duration,
        attempt: JoinHandle<lapin::Result<Connection>>,
    },
    Connected(Arc<Connection>),
}

impl Broker {
    /// Checks the address; connects later, so that a broker that is away delays nothing.
    pub fn new(url: Secret<String>) -> Result<Broker, BrokerError> {
        let mut uri: AMQPUri = url.reveal().parse().map_err(|_| BrokerError::Address)?;
        uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
        Ok(Broker { uri: Secret::new(uri), state: Mutex::new(State::Disconnected) })
    }

    /// The same broker, over a connection of its own.
    pub(crate) fn apart(&self) -> Broker {
        Broker { uri: self.uri.clone(), state: Mutex::new(State::Disconnected) }
    }

    /// Fails unless there is a live connection, or one can be had soon.
    pub async fn check(&self) -> Result<(), BrokerError> {
        self.connection().await.map(drop)
    }

    /// A new channel of the one connection. Dropped, it is closed.
    pub(crate) async fn channel(&self) -> Result<Channel, BrokerError> {
        let connection = self.connection().await?;
        // A blocked connection sends nothing, so a request on it would only run into its time limit.
        if connection.status().blocked() {
            return Err(BrokerError::Blocked);
        }
        // Nothing is done about a connection that does not answer: it may just be busy. If it is dead, the heartbeat
        // ends it, and the next call connects again.
        tokio::select! {
            opened = answer(connection.create_channel()) => opened,
            () = lost(&connection) => Err(BrokerError::Lost),
        }
    }

    async fn connection(&self) -> Result<Arc<Connection>, BrokerError> {
        let patience_ends = tokio::time::Instant::now() + PATIENCE;
        // Also bounds the wait for others who wait: they hold the lock meanwhile.
        let Ok(mut state) = timeout_at(patience_ends, self.state.lock()).await else {
            return Err(BrokerError::Silent(PATIENCE));
        };
        match &mut *state {
            State::Connected(connection) if connection.status().connected() => return Ok(Arc::clone(connection)),
            State::Connecting { since, time_max, attempt } if since.elapsed() > *time_max => {
                attempt.abort();
                *state = self.connecting((*time_max * 2).min(CONNECT_TIME_MAX));
            }
            State::Connecting { .. } => {}
            State::Connected(_) | State::Disconnected => *state = self.connecting(CONNECT_TIME_MIN),
        }
        let State::Connecting { since, attempt, .. } = &mut *state else {
            return Err(BrokerError::Silent(CONNECT_TIME_MAX));
        };
        let Ok(finished) = timeout_at(patience_ends, attempt).await else {
            return Err(BrokerError::Silent(since.elapsed()));
        };
        *state = State::Disconnected;
        // If it panicked, that is lapin's to answer for; the next call tries again.
        let connected = finished.map_err(|_| BrokerError::Silent(Duration::ZERO))?;
        let connection = Arc::new(connected.map_err(|error| BrokerError::Unreachable(self.address(), error))?);
        *state = State::Connected(Arc::clone(&connection));
        Ok(connection)
    }

    fn address(&self) -> String {
        let authority = &self.uri.reveal().authority;
        format!("{}:{}", authority.host, authority.port)
    }

    fn connecting(&self, time_max: Duration) -> State {
        let uri = self.uri.reveal().clone();
        let attempt = tokio::spawn(async move {
            let properties = ConnectionProperties::default().with_connection_name("pillarbox".into());
            Connection::connect_uri(uri, properties).await
        });
        State::Connecting { since: Instant::now(), time_max, attempt }
    }

    /// Says goodbye, so that the broker's log has no lost connection.
    pub async fn close(&self) {
        match std::mem::replace(&mut *self.state.lock().await, State::Disconnected) {
            State::Connected(connection) => {
                if let Err(error) = answer(connection.close(200, "bye".into())).await {
                    tracing::debug!(%error, "the broker connection was already gone");
                }
            }
            State::Connecting { attempt, .. } => attempt.abort(),
            State::Disconnected => {}
        }
    }
}

/// lapin forgets a request for a channel if the connection ends at that moment: no answer ever comes.
async fn lost(connection: &Connection) {
    while connection.status().connected() {
        sleep(LOOK_EVERY).await;
    }
}

/// What RabbitMQ answers, if it does so in time. After an error the channel is of no more use: it is closed, or an
/// answer is still on its way.
pub(crate) async fn answer<T>(request: impl Future<Output = lapin::Result<T>>) -> Result<T, BrokerError> {
    match timeout(ANSWER_TIME_MAX, request).await {
        Ok(answered) => Ok(answered?),
        Err(_) => Err(BrokerError::Silent(ANSWER_TIME_MAX)),
    }
}

/// lapin's own conversion panics on a name that is too long.
pub(crate) fn name(text: &str) -> Result<ShortString, BrokerError> {
    ShortString::try_new(text).map_err(|_| BrokerError::LongName(text.to_owned()))
}

/// AMQP's code for a refusal (404, 406, ...).
pub(crate) fn code(error: &BrokerError) -> Option<u16> {
    let BrokerError::Amqp(error) = error else { return None };
    match error.kind() {
        ErrorKind::ProtocolError(refusal) => Some(refusal.get_id()),
        _ => None,
    }
}
