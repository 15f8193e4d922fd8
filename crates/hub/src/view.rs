//! The hub's data as the API shows it. Only [`SubscriberWithSecret`] contains a secret.

mod dead_letter;
mod event;
mod message;
mod subscriber;

pub(crate) use self::dead_letter::*;
pub(crate) use self::event::*;
pub(crate) use self::message::*;
pub(crate) use self::subscriber::*;
