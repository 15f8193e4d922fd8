//! SQL. Every function joins the caller's transaction.

pub(crate) mod project;
pub(crate) mod state;
