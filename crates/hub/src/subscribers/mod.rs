//! Subscribers: the webhook endpoints of tenants, and the settings that their owners choose.

pub(crate) mod domain;
mod fields;
mod flow;
pub(crate) mod http;
pub(crate) mod recipient;
pub(crate) mod store;
mod view;
