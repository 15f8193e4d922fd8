//! Use cases of the service.

pub(crate) mod operator;
pub(crate) mod requests;
pub(crate) mod retention;
pub(crate) mod sending;
