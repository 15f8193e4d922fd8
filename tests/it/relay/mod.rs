//! Proves that messages travel between the log and RabbitMQ without loss and in the order of their keys, also while
//! servers fail and processes are killed.

pub(crate) mod broker_client;
mod bus;
mod default_routes;
mod dual_publish;
mod faults;
mod first_start;
mod hostile_fields;
mod intake;
mod intake_ids;
mod joining;
mod lost_queues;
mod migration_plan;
mod oversized;
mod publishing;
mod raw_amqp;
mod route_changes;
mod signatures;
pub(crate) mod support;
mod suspended_relay;
