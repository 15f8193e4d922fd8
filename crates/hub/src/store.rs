//! The tables of the hub. Every function takes a connection and joins the caller's transaction; none decides anything.
//!
//! The store depends on [`domain`](crate::domain), [`hub_message`](crate::hub_message), [`delivery`](crate::delivery) and
//! [`operator_command`](crate::operator_command) only, never on fan-out or dispatcher.

pub(crate) mod dead_letter;
pub(crate) mod deferred_event;
pub(crate) mod delivery_reads;
pub(crate) mod delivery_writes;
pub(crate) mod dispatcher;
pub(crate) mod fanout;
pub(crate) mod maintenance;
pub(crate) mod message;
pub(crate) mod recovery;
pub(crate) mod subscriber;
pub(crate) mod tenant_backlog;
