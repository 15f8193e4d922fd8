//! The hub's things as people see them. No secret is among them, but in the one answer that is there to show it.

mod dead_letter;
mod event;
mod message;
mod subscriber;

pub(crate) use self::dead_letter::*;
pub(crate) use self::event::*;
pub(crate) use self::message::*;
pub(crate) use self::subscriber::*;
