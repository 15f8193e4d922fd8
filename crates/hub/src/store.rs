//! The tables of the hub. Every function takes a connection and joins the caller's transaction; none decides anything.
//!
//! The store depends on [`domain`](crate::domain), [`catalogue`](crate::catalogue), [`hub_message`](crate::hub_message),
//! [`delivery`](crate::delivery), [`operator_command`](crate::operator_command), [`health`](crate::health) and
//! [`replay`](crate::replay) only, never on fan-out or dispatcher.

pub(crate) mod catalogue;
pub(crate) mod dead_letter;
pub(crate) mod deferred_event;
pub(crate) mod delivery_reads;
pub(crate) mod delivery_writes;
pub(crate) mod dispatcher;
pub(crate) mod fanout;
pub(crate) mod health;
pub(crate) mod maintenance;
pub(crate) mod message;
pub(crate) mod overview;
pub(crate) mod recovery;
pub(crate) mod replay;
pub(crate) mod stream;
pub(crate) mod stream_maintenance;
pub(crate) mod stream_message;
pub(crate) mod subscriber;
pub(crate) mod tenant;
pub(crate) mod tenant_backlog;
