//! What people may do, one transaction each. A subscriber, event, message or dead letter of another tenant is not there.

pub(crate) mod dead_letter;
pub(crate) mod event;
pub(crate) mod subscriber;
