//! The hub's data as the API shows it. Only [`SubscriberWithSecret`] contains a secret.

mod dead_letter;
mod event;
mod event_type;
mod health;
mod message;
mod replay;
mod stream;
mod subscriber;

pub(crate) use self::dead_letter::*;
pub(crate) use self::event::*;
pub(crate) use self::event_type::*;
pub(crate) use self::health::*;
pub(crate) use self::message::*;
pub(crate) use self::replay::*;
pub(crate) use self::stream::*;
pub(crate) use self::subscriber::*;
