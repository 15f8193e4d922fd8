//! Deliveries: hub messages, to whom they are sent and how, and one attempt to send them.
//!
//! | module | responsibility |
//! |---|---|
//! | [`message`] | hub events and hub messages |
//! | [`domain`] | formats, retry rules, outcomes, credentials of endpoints |
//! | [`recipient`] | to whom the dispatcher sends |
//! | [`attempt`], [`webhook`], [`attempt_result`] | one request, its body and headers, and its result |
//! | [`clients`] | the HTTP clients of the tenants |
//! | [`command`] | operator commands about messages |
//! | [`system_event`] | what the hub itself reports as events |

pub(crate) mod attempt;
pub(crate) mod attempt_result;
pub(crate) mod clients;
pub(crate) mod command;
pub(crate) mod domain;
pub(crate) mod message;
pub(crate) mod recipient;
pub(crate) mod system_event;
mod webhook;
