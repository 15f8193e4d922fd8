//! Use cases. A flow called from a worker or a command opens its transactions; a flow called from a message handler
//! joins the handler's transaction, and a flow that changes an event joins that of its idempotent request.

pub(crate) mod counts;
pub(crate) mod event;
pub(crate) mod feed;
pub(crate) mod handover;
pub mod reconcile;
pub(crate) mod trending;
