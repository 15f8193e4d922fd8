//! Use cases. A flow called from HTTP or from a worker opens one transaction; a flow called from a message handler
//! joins the handler's transaction.

pub(crate) mod command_batch;
pub(crate) mod queries;
pub(crate) mod reconcile;
pub(crate) mod sweep;
