//! How far a subscriber queue has read its subscriber's messages, and how many it may read at a time.

use crate::deliveries::message::HubMessage;

/// The maximum number of messages in memory.
pub(super) const MESSAGES_AHEAD_MAX: usize = 2_048;
/// Approximate bytes that one read returns: fewer messages if they are large.
const READ_BYTES: usize = 2 * 1024 * 1024;
/// Bytes that a message needs besides its payload.
const MESSAGE_BYTES_MIN: usize = 512;
/// The assumed size of a message, in bytes, before the first was read.
const MESSAGE_BYTES_INITIAL: usize = 64 * 1024;

#[derive(Debug)]
pub(super) struct ReadProgress {
    /// All messages up to this number were read, or belong to a detached lane.
    pub(super) read_to: i64,
    /// There may be messages beyond `read_to` in the database. While this is set, messages that fan-out hands over are not
    /// accepted: something lies between them and `read_to`.
    pub(super) has_more: bool,
    pub(super) is_reading: bool,
    /// The average size of the messages that came last, in bytes.
    message_bytes: usize,
}

impl ReadProgress {
    pub(super) fn new(position: i64) -> ReadProgress {
        ReadProgress { read_to: position, has_more: true, is_reading: false, message_bytes: MESSAGE_BYTES_INITIAL }
    }

    /// How many messages may be held in memory.
    pub(super) fn messages_max(&self) -> usize {
        (READ_BYTES / self.message_bytes.max(1)).clamp(1, MESSAGES_AHEAD_MAX)
    }

    pub(super) fn measure(&mut self, messages: &[HubMessage]) {
        if !messages.is_empty() {
            let events = messages.iter().filter_map(|message| message.event.as_ref());
            let bytes: usize = events.map(|event| event.payload.len()).sum();
            self.message_bytes = bytes / messages.len() + MESSAGE_BYTES_MIN;
        }
    }

    pub(super) fn start_read(&mut self) {
        (self.is_reading, self.has_more) = (true, false);
    }

    pub(super) fn finish_read(&mut self, is_complete: bool) {
        self.is_reading = false;
        self.has_more |= !is_complete;
    }

    pub(super) fn fail_read(&mut self) {
        (self.is_reading, self.has_more) = (false, true);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::deliveries::message::fixtures::event;

    fn messages(count: i64, payload_bytes: usize) -> Vec<HubMessage> {
        let event = Arc::new(event(payload_bytes));
        let message =
            |n| HubMessage { n, lane: None, seq: None, attempts_before: 0, replay: None, event: Some(event.clone()) };
        (1..=count).map(message).collect()
    }

    #[test]
    fn memory_is_bounded_by_the_size_of_messages() {
        let mut progress = ReadProgress::new(0);
        assert_eq!(progress.messages_max(), 32, "nothing is known about their size yet");
        for (payload_bytes, expected) in [(100, 2_048), (30_000, 68), (256 * 1024, 7), (10_000_000, 1)] {
            progress.measure(&messages(3, payload_bytes));
            assert_eq!(progress.messages_max(), expected, "{payload_bytes} bytes");
        }
        progress.measure(&[]);
        assert_eq!(progress.messages_max(), 1, "an empty read tells nothing about sizes");
    }

    #[test]
    fn an_announcement_during_a_read_is_not_lost() {
        let mut progress = ReadProgress::new(0);
        progress.start_read();
        assert!(!progress.has_more);
        progress.has_more = true;
        progress.finish_read(true);
        assert!(progress.has_more);
        progress.start_read();
        progress.fail_read();
        assert!(progress.has_more && !progress.is_reading);
    }
}
