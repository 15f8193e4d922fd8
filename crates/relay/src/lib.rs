//! The only owner of RabbitMQ: nothing else in the house opens a broker connection.
//!
//! - [`Broker`]: one connection, opened when it is first needed and again when it is lost.
//! - [`Topology`]: the exchanges and queues that are to exist.
//! - [`Publisher`]: messages to an exchange, each confirmed, in order.
//! - [`Intake`]: a queue's messages, in batches.
//! - [`Route`]: which messages of the log go to which exchange; each route is a consumer of its own.
//! - [`bus`]: a consumer whose messages come over the broker.
//! - [`start`]: all of it, in the lanes of a [`mailbox::runtime::Runtime`]: the log to exchanges, queues to the log.
//!
//! Absences: nothing below [`Route`] retries or knows the database. What fails is dropped with its channel, and the
//! lane, which knows what is at stake, does it again. Nothing is called sent without a confirm.

mod bridge;
mod broker;
pub mod bus;
mod intake;
mod publish;
mod relay;
mod route;
mod topology;

pub use bridge::{IntakeQueue, source_of};
pub use relay::{RelaySettings, start, start_intake};
pub use route::{Format, Route};

pub use broker::{Broker, BrokerError};
pub use intake::{Incoming, Intake};
pub use publish::{Outgoing, Publisher, Sent};
pub use topology::{Binding, Exchange, ExchangeKind, Queue, Topology};
