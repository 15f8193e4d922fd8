//! Use cases of the service.

pub(crate) mod announcements;
pub(crate) mod contacts;
pub(crate) mod delivery;
pub(crate) mod expansion;
pub(crate) mod inbox;
pub(crate) mod notifications;
pub(crate) mod operator;
pub(crate) mod participants;
pub(crate) mod preferences;
pub(crate) mod produce;
pub(crate) mod recipients;
pub(crate) mod requests;
pub(crate) mod retention;
pub(crate) mod sending;
