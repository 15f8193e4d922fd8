//! The hub's tables. Everything here joins the caller's transaction, and decides nothing.

pub(crate) mod aside;
pub(crate) mod dead_letter;
pub(crate) mod dispatch;
pub(crate) mod fanout;
pub(crate) mod message;
pub(crate) mod subscriber;
pub(crate) mod upkeep;
