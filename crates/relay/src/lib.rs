//! The only owner of RabbitMQ: nothing else in the house opens a broker connection.
//!
//! - [`Broker`]: one connection, opened when it is first needed and again when it is lost.
//! - [`Topology`]: the exchanges and queues that are to exist.
//! - [`Publisher`]: messages to an exchange, each confirmed, in order.
//! - [`Intake`]: a queue's messages, in batches.
//!
//! Absences: nothing here retries. What fails is dropped with its channel, and the caller, who knows what is at stake,
//! does it again. Nothing here knows the database.

mod broker;
mod intake;
mod publish;
mod topology;

pub use broker::{Broker, BrokerError};
pub use intake::{Incoming, Intake};
pub use publish::{Outgoing, Publisher, Sent};
pub use topology::{Binding, Exchange, ExchangeKind, Queue, Topology};
