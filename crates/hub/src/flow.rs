//! What people may do, one transaction each. A subscriber, event, message or dead letter of another tenant is not there.

pub(crate) mod dead_letter;
pub(crate) mod event;
pub(crate) mod subscriber;

use mailbox::post::Source;

/// What people ask of the owner of a subscriber's shard: it alone may settle a message.
const CONTROL: Source = Source::new("hub.control");
