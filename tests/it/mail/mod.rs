//! E-mails: requests in the log, templates, and a real mail server that fails in many ways.

mod captured;
mod crashes;
pub(crate) mod fixture;
mod hostile_input;
mod operators;
mod outages;
mod priority;
mod replies;
mod stages;
mod starting;
mod transport;
