//! The relay: publishes messages of the log to RabbitMQ, and reads queues into the log. No other crate connects to
//! RabbitMQ.
//!
//! The AMQP layer, which knows no database:
//! - [`Broker`]: one connection, opened on first use and again after it is lost.
//! - [`Topology`]: declares exchanges, queues and bindings.
//! - [`Publisher`]: publishes to an exchange, in order, and waits for the confirm of every message.
//! - [`Intake`]: consumes a queue in batches. Of a body with more than [`BODY_BYTES_MAX`] bytes it returns the beginning,
//!   with the size and the digest of the whole.
//!
//! The relay itself, which runs in a [`pillarbox::consumers::Runtime`]:
//! - [`Route`]: settings; which messages are published to which exchange. Each route is a consumer of the log.
//! - [`IntakeQueue`]: settings; a queue that is read into the log.
//! - [`start`]: starts all routes and intake queues. [`start_intake`]: starts one intake queue.
//! - [`bus`]: subscriptions of services whose messages arrive over the broker.
//! - [`start_queue_checks`]: finds out what the queues of services have lost, and publishes it again.
//! - [`MessageSigner`]: signs what the routes publish, and verifies what the subscriptions receive.
//!
//! Invariants: a message counts as published only when RabbitMQ has confirmed it, and a message of a queue is
//! acknowledged only when its post is committed. The AMQP layer never retries: after an error it drops the channel, and
//! the shard worker, which knows the positions, repeats the batch.

mod body_limit;
mod broker;
pub mod bus;
mod control;
mod frame_text;
mod headers;
mod intake;
mod intake_queue;
mod intake_worker;
mod publish;
mod queue_check;
mod relay;
mod route;
mod route_processor;
mod service_queue;
mod signature;
mod stored_body;
mod topology;
mod type_queues;

pub use body_limit::{BODY_BYTES_MAX, OversizedBody};
pub use broker::{Broker, BrokerError};
pub use intake::{Incoming, Intake};
pub use intake_queue::{IntakeFormat, IntakeQueue, InvalidIntake};
pub use intake_worker::source_of;
pub use publish::{Outgoing, PublishOutcome, Publisher};
pub use queue_check::start as start_queue_checks;
pub use relay::{RelaySettings, register_first_routes, start, start_intake};
pub use route::{Format, Route};
pub use signature::MessageSigner;
pub use topology::{Binding, Difference, Exchange, ExchangeKind, Queue, Topology};

/// The metrics of this crate, with their help texts for `/metrics`.
pub const METRICS: &[runtime::MetricHelp] = &[
    ("pillarbox_relay_published_total", "Messages that RabbitMQ has confirmed, by route."),
    ("pillarbox_relay_returned_total", "Messages for which no queue is bound, by route."),
    ("event_publish_duration_seconds", "Time from sending a message until the last confirm of its batch, by route."),
    ("pillarbox_intake_messages_total", "Messages that were read from a queue of RabbitMQ."),
    ("pillarbox_service_queues_created_total", "How often a service's queue was missing and declared, by queue."),
    ("pillarbox_service_queue_lost_messages_total", "Messages that a service's queue has lost, by queue."),
];
