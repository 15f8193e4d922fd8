//! The only owner of RabbitMQ: nothing else in the house opens a broker connection.
//!
//! - [`Broker`]: one connection, opened when it is first needed and again when it is lost.

mod broker;

pub use broker::{Broker, BrokerError};
