//! SQL of the identity service. Every function joins the caller's transaction.

pub(crate) mod accepted_request;
pub(crate) mod account;
pub(crate) mod audit;
pub(crate) mod expiry;
pub(crate) mod one_time_token;
pub(crate) mod session;
pub(crate) mod subscription;
pub(crate) mod throttle;
