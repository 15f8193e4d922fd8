//! Business events, recipients, and the notifications that follow: from the post to the recorded notification.

mod announcements;
mod broker;
mod contacts;
mod deleted_accounts;
pub(crate) mod fixture;
mod listeners;
mod participants;
mod producing;
mod recipients;
mod redelivery;
mod retention;
mod strangers;
