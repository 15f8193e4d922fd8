//! Streams: which part a message belongs to, and which reader reads which parts. No I/O, no async, no clock.
//!
//! A stream has [`PARTS`] parts. All messages of a key are in one part, and a part belongs to one reader at a time, so two
//! readers never have messages of one key. The caller loads an [`Assignment`] with its rows locked, and saves what a function
//! has changed.

use chrono::{DateTime, TimeDelta, Utc};
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::directory::domain::{EventTypes, Filter};

/// The parts of a stream, and so the number of readers that can share it.
pub(crate) const PARTS: i16 = 16;
/// Readers of one stream whose leases have not ended.
pub(crate) const READERS_MAX: usize = 64;
/// A reader whose lease ended this long ago is deleted.
const ENDED_READER_RETENTION: TimeDelta = TimeDelta::hours(1);

/// A stream of a tenant: the events that it contains.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct Stream {
    pub(crate) id: Uuid,
    #[sqlx(try_from = "String")]
    pub(crate) tenant: Tenant,
    pub(crate) name: String,
    pub(crate) version: i64,
    #[sqlx(flatten)]
    pub(crate) settings: StreamSettings,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
}

/// The settings that the owner of a stream chooses.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub(crate) struct StreamSettings {
    pub(crate) event_types: Vec<EventTypes>,
    #[sqlx(json(nullable))]
    pub(crate) filter: Option<Filter>,
    /// A JSON pointer into the payload: messages with the same value there form a lane.
    pub(crate) ordering_key: Option<String>,
}

/// The part of a message. A message without a lane has its event as its key.
pub(crate) fn part_of(lane: Option<&str>, event: Uuid) -> i16 {
    let digest = match lane {
        Some(lane) => Sha256::digest(lane.as_bytes()),
        None => Sha256::digest(event.as_bytes()),
    };
    i16::from(digest[0]) % PARTS
}

/// One part of a stream and its reader.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Part {
    pub(crate) part: i16,
    /// Messages up to this number are processed.
    pub(crate) acknowledged: i64,
    /// Messages up to this number were handed out to the reader.
    pub(crate) handed_out: i64,
    pub(crate) reader: Option<String>,
    /// Counts the readers of the part.
    pub(crate) epoch: i64,
    /// The highest number that retention has dropped before it was acknowledged.
    pub(crate) dropped_to: i64,
}

/// A reader and the end of its lease, by the clock of the database.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Reader {
    #[sqlx(rename = "reader")]
    pub(crate) name: String,
    pub(crate) lease_until: DateTime<Utc>,
}

/// Who reads which parts of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// All parts, in their order.
    pub(crate) parts: Vec<Part>,
    pub(crate) readers: Vec<Reader>,
    /// Counts the seeks.
    pub(crate) generation: i64,
    /// The incarnation of the database. None if no process has begun it yet.
    pub(crate) incarnation: Option<Uuid>,
}

/// What a pull has returned: the last number of each part, with the epoch of the part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StreamCursor {
    generation: i64,
    /// Numbers are assigned again after a failover that has lost transactions, so a cursor is valid in its incarnation only.
    incarnation: Option<Uuid>,
    parts: Vec<(i16, i64, i64)>,
}

/// The messages of a part that a pull returns: those with numbers above `after`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadRange {
    pub(crate) part: i16,
    pub(crate) after: i64,
    /// The part is about to move to another reader, so nothing beyond this number is handed out.
    pub(crate) up_to: Option<i64>,
}

/// Why a cursor is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaseLost;

/// Why a reader is refused: there are too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooManyReaders;

/// Why a seek is refused: this reader has a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InUse(pub(crate) String);

impl Part {
    /// Whether the reader has nothing of this part that it has not acknowledged.
    fn is_clean(&self) -> bool {
        self.handed_out <= self.acknowledged
    }

    fn release(&mut self) {
        self.reader = None;
        self.epoch += 1;
        self.handed_out = self.acknowledged;
    }

    fn is_of(&self, reader: &str) -> bool {
        self.reader.as_deref() == Some(reader)
    }
}

impl Assignment {
    /// Acknowledges what a pull has returned: all parts of the cursor, or none. A cursor that was acknowledged before
    /// changes nothing, also if other readers have its parts now: the answer to the first acknowledgement may have been lost.
    pub(crate) fn acknowledge(&mut self, reader: &str, cursor: &StreamCursor) -> Result<(), LeaseLost> {
        if cursor.generation != self.generation || cursor.incarnation.is_none() {
            return Err(LeaseLost);
        }
        if cursor.incarnation != self.incarnation {
            return Err(LeaseLost);
        }
        let allows = |&(number, epoch, n): &(i16, i64, i64)| {
            let found = self.parts.iter().find(|part| part.part == number);
            found.is_some_and(|part| part.acknowledged >= n || (part.is_of(reader) && part.epoch == epoch))
        };
        if !cursor.parts.iter().all(allows) {
            return Err(LeaseLost);
        }
        for &(number, _, n) in &cursor.parts {
            for part in self.parts.iter_mut().filter(|part| part.part == number) {
                part.acknowledged = part.acknowledged.max(n);
                part.handed_out = part.handed_out.max(part.acknowledged);
            }
        }
        Ok(())
    }

    /// Renews the lease of a reader, and gives it parts without a reader up to its share. A reader with more than its share
    /// gives up those of which it has acknowledged everything.
    pub(crate) fn join(&mut self, reader: &str, now: DateTime<Utc>, lease: TimeDelta) -> Result<(), TooManyReaders> {
        self.readers.retain(|known| known.name == reader || known.lease_until + ENDED_READER_RETENTION > now);
        let lease_until = now + lease;
        match self.readers.iter_mut().find(|known| known.name == reader) {
            Some(known) => known.lease_until = lease_until,
            None => self.readers.push(Reader { name: reader.to_owned(), lease_until }),
        }
        if self.live_readers(now).count() > READERS_MAX {
            return Err(TooManyReaders);
        }
        let share = self.share(reader, now);
        let mut surplus = self.parts_of(reader).count().saturating_sub(share);
        for part in self.parts.iter_mut().rev().filter(|part| part.is_of(reader)) {
            if surplus > 0 && part.is_clean() {
                part.release();
                surplus -= 1;
            }
        }
        let mut missing = share.saturating_sub(self.parts_of(reader).count());
        let live: Vec<String> = self.live_readers(now).map(|live| live.name.clone()).collect();
        let is_free = |part: &Part| !part.reader.as_ref().is_some_and(|reader| live.iter().any(|live| live == reader));
        for part in self.parts.iter_mut().filter(|part| is_free(part)) {
            if missing > 0 {
                part.release();
                part.reader = Some(reader.to_owned());
                missing -= 1;
            }
        }
        Ok(())
    }

    /// What a reader may be given of its parts. Nothing new of the parts that it has beyond its share, so that it can give
    /// them up.
    pub(crate) fn readable(&self, reader: &str, now: DateTime<Utc>) -> Vec<ReadRange> {
        let share = self.share(reader, now);
        let range = |(at, part): (usize, &Part)| ReadRange {
            part: part.part,
            after: part.acknowledged,
            up_to: (at >= share).then_some(part.handed_out),
        };
        self.parts_of(reader).enumerate().map(range).collect()
    }

    /// Records the messages that a pull returns, each by its part and number, and returns the cursor that acknowledges them.
    pub(crate) fn hand_out(&mut self, messages: impl Iterator<Item = (i16, i64)>) -> StreamCursor {
        let mut parts: Vec<(i16, i64, i64)> = Vec::new();
        for (number, n) in messages {
            let Some(part) = self.parts.iter_mut().find(|part| part.part == number) else { continue };
            part.handed_out = part.handed_out.max(n);
            match parts.iter_mut().find(|(of, _, _)| *of == number) {
                Some((_, _, last)) => *last = n.max(*last),
                None => parts.push((number, part.epoch, n)),
            }
        }
        StreamCursor { generation: self.generation, incarnation: self.incarnation, parts }
    }

    /// Ends the lease of a reader. Others continue after what it has acknowledged.
    pub(crate) fn release_reader(&mut self, reader: &str) {
        self.readers.retain(|known| known.name != reader);
        self.parts.iter_mut().filter(|part| part.is_of(reader)).for_each(Part::release);
    }

    /// Continues after the message `n`, in all parts. Ends all leases, if `force`; otherwise it fails while there are any.
    pub(crate) fn seek(&mut self, n: i64, now: DateTime<Utc>, force: bool) -> Result<(), InUse> {
        let user = self.live_readers(now).find(|live| self.parts_of(&live.name).next().is_some());
        if let Some(user) = user.filter(|_| !force) {
            return Err(InUse(user.name.clone()));
        }
        self.readers.clear();
        self.generation += 1;
        for part in &mut self.parts {
            part.acknowledged = n;
            part.dropped_to = 0;
            part.release();
        }
        Ok(())
    }

    /// The first part of the reader of which retention has dropped unacknowledged messages.
    pub(crate) fn lapsed_part(&self, reader: &str) -> Option<i16> {
        self.parts_of(reader).find(|part| part.acknowledged < part.dropped_to).map(|part| part.part)
    }

    /// Whether the reader has fewer parts than its share.
    pub(crate) fn is_waiting_for_parts(&self, reader: &str, now: DateTime<Utc>) -> bool {
        self.parts_of(reader).count() < self.share(reader, now)
    }

    pub(crate) fn parts_of<'a>(&'a self, reader: &'a str) -> impl Iterator<Item = &'a Part> {
        self.parts.iter().filter(move |part| part.is_of(reader))
    }

    pub(crate) fn live_readers(&self, now: DateTime<Utc>) -> impl Iterator<Item = &Reader> {
        self.readers.iter().filter(move |reader| reader.lease_until > now)
    }

    /// How many parts the reader should have. The shares of all live readers are all parts.
    fn share(&self, reader: &str, now: DateTime<Utc>) -> usize {
        let count = self.live_readers(now).count().max(1);
        let before = self.live_readers(now).filter(|live| live.name.as_str() < reader).count();
        let parts = self.parts.len();
        parts / count + usize::from(before < parts % count)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
    }

    fn lease(seconds: i64) -> TimeDelta {
        TimeDelta::seconds(seconds)
    }

    fn new_assignment() -> Assignment {
        let part = |part| Part { part, acknowledged: 0, handed_out: 0, reader: None, epoch: 0, dropped_to: 0 };
        let incarnation = Some(Uuid::from_u128(1));
        Assignment { parts: (0..PARTS).map(part).collect(), readers: Vec::new(), generation: 0, incarnation }
    }

    fn parts(assignment: &Assignment, reader: &str) -> usize {
        assignment.parts_of(reader).count()
    }

    #[test]
    fn a_key_has_one_part_and_keys_spread_over_all() {
        let event = Uuid::now_v7();
        assert_eq!(part_of(Some("order-17"), event), part_of(Some("order-17"), Uuid::now_v7()));
        assert_eq!(part_of(Some("order-17"), event), 2, "stored rows depend on it");
        let mut counts = BTreeMap::new();
        (0..16_000).for_each(|n| *counts.entry(part_of(Some(&format!("key-{n}")), event)).or_insert(0) += 1);
        assert!(counts.len() == 16 && counts.values().all(|count| (700..1_300).contains(count)), "{counts:?}");
    }

    #[test]
    fn readers_share_the_parts_and_give_up_only_what_is_acknowledged() {
        let mut all = new_assignment();
        all.join("a", at(0), lease(30)).unwrap();
        assert_eq!(parts(&all, "a"), 16);
        let cursor = all.hand_out([(15, 1), (3, 2)].into_iter());
        all.join("b", at(1), lease(30)).unwrap();
        assert_eq!((parts(&all, "b"), all.is_waiting_for_parts("b", at(1))), (0, true), "a has them all");
        all.join("a", at(2), lease(30)).unwrap();
        assert!(parts(&all, "a") == 8 && all.parts[15].is_of("a") && all.parts[3].is_of("a"), "{all:?}");
        all.join("b", at(3), lease(30)).unwrap();
        assert_eq!(parts(&all, "b"), 8);
        all.acknowledge("a", &cursor).unwrap();
        assert_eq!((all.parts[15].acknowledged, all.parts[3].acknowledged), (1, 2));
    }

    #[test]
    fn nothing_new_is_handed_out_of_parts_beyond_the_share() {
        let mut all = new_assignment();
        all.join("a", at(0), lease(30)).unwrap();
        all.hand_out((0..16).map(|part| (part, i64::from(part) + 1)));
        all.join("b", at(1), lease(30)).unwrap();
        all.join("a", at(2), lease(30)).unwrap();
        let ranges = all.readable("a", at(2));
        let limited = ranges.iter().filter(|range| range.up_to.is_some()).count();
        assert_eq!((ranges.len(), limited), (16, 8));
        assert!(ranges.iter().all(|range| range.up_to.is_none_or(|up_to| up_to == i64::from(range.part) + 1)));
    }

    #[test]
    fn a_part_moves_when_the_lease_ends_and_the_old_cursor_is_refused() {
        let mut all = new_assignment();
        all.join("a", at(0), lease(30)).unwrap();
        let cursor = all.hand_out([(0, 5)].into_iter());
        all.join("b", at(29), lease(30)).unwrap();
        assert_eq!(parts(&all, "b"), 0);
        all.join("b", at(30), lease(30)).unwrap();
        assert_eq!(parts(&all, "b"), 16, "the lease has ended");
        let before = all.clone();
        assert_eq!(all.acknowledge("a", &cursor), Err(LeaseLost));
        assert_eq!(all, before, "a refused cursor changes nothing");
        assert_eq!(all.readable("b", at(30))[0], ReadRange { part: 0, after: 0, up_to: None });
        // Nor is it valid when the former reader has the part again: it may have dropped the messages since then.
        all.release_reader("b");
        all.join("a", at(31), lease(30)).unwrap();
        assert!(all.parts[0].is_of("a"));
        assert_eq!(all.acknowledge("a", &cursor), Err(LeaseLost));
    }

    #[test]
    fn a_reader_whose_lease_ended_unnoticed_may_still_acknowledge() {
        let mut all = new_assignment();
        all.join("a", at(0), lease(5)).unwrap();
        let cursor = all.hand_out([(0, 5)].into_iter());
        all.join("a", at(60), lease(5)).unwrap();
        all.acknowledge("a", &cursor).unwrap();
        all.acknowledge("a", &cursor).unwrap();
        assert_eq!(all.parts[0].acknowledged, 5);
    }

    #[test]
    fn an_acknowledged_cursor_can_be_repeated_and_one_of_another_incarnation_cannot() {
        let mut all = new_assignment();
        all.join("a", at(0), lease(30)).unwrap();
        let cursor = all.hand_out([(0, 5)].into_iter());
        all.acknowledge("a", &cursor).unwrap();
        all.release_reader("a");
        all.join("b", at(1), lease(30)).unwrap();
        assert_eq!(all.acknowledge("a", &cursor), Ok(()), "it was acknowledged before");
        let next = all.hand_out([(0, 6)].into_iter());
        let lost = Assignment { incarnation: Some(Uuid::from_u128(2)), ..all.clone() };
        assert_eq!(lost.clone().acknowledge("b", &next), Err(LeaseLost));
        let unknown = StreamCursor { incarnation: None, ..next.clone() };
        assert_eq!(Assignment { incarnation: None, ..all.clone() }.acknowledge("b", &unknown), Err(LeaseLost));
        all.acknowledge("b", &next).unwrap();
    }

    #[test]
    fn a_seek_needs_force_while_there_are_leases_and_ends_all_cursors() {
        let mut all = new_assignment();
        all.join("a", at(0), lease(30)).unwrap();
        let cursor = all.hand_out([(0, 5)].into_iter());
        assert_eq!(all.seek(9, at(1), false), Err(InUse("a".to_owned())));
        all.seek(9, at(1), true).unwrap();
        assert!(all.parts.iter().all(|part| part.acknowledged == 9 && part.reader.is_none()));
        assert_eq!(all.acknowledge("a", &cursor), Err(LeaseLost), "although its number is below the position");
        all.seek(3, at(2), false).unwrap();
        all.join("a", at(3), lease(30)).unwrap();
        all.parts[4].dropped_to = 4;
        assert_eq!(all.lapsed_part("a"), Some(4));
        all.seek(3, at(4), true).unwrap();
        all.join("a", at(5), lease(30)).unwrap();
        assert_eq!(all.lapsed_part("a"), None);
    }

    #[test]
    fn the_number_of_readers_is_limited() {
        let mut all = new_assignment();
        let names: Vec<String> = (0..READERS_MAX).map(|n| format!("reader-{n:02}")).collect();
        names.iter().for_each(|name| all.join(name, at(0), lease(30)).unwrap());
        assert_eq!(all.join("one-more", at(1), lease(30)), Err(TooManyReaders));
        all.readers.retain(|known| known.name != "one-more");
        all.join("one-more", at(31), lease(30)).unwrap();
        all.join("one-more", at(3_700), lease(30)).unwrap();
        assert_eq!(all.readers.len(), 1, "readers that ended long ago are deleted");
    }

    /// What a reader of the model believes: until when its lease is valid, and what it has got of each key.
    #[derive(Default)]
    struct ModelReader {
        lease_until: i64,
        unacknowledged: Vec<(StreamCursor, Vec<(i16, i64)>)>,
        /// What it had when its lease ended. It may still try to acknowledge it, but others may have it.
        late: Vec<(StreamCursor, Vec<(i16, i64)>)>,
    }

    /// Readers join, crash, return, acknowledge late or twice, and pull again, in random order. The checks know nothing of
    /// epochs and shares: a message that a reader has got and not acknowledged is at no other reader within the leases of
    /// both, no message is skipped, and when all readers but one have ended, that one gets everything.
    #[test]
    fn no_message_is_skipped_or_at_two_readers_at_once() {
        for seed in 0..300 {
            let mut random = StdRng::seed_from_u64(seed);
            let (mut all, mut now) = (new_assignment(), 0);
            let mut readers: HashMap<String, ModelReader> = HashMap::new();
            let mut done: HashMap<i16, i64> = HashMap::new();
            let mut newest = 0;
            for step in 0..250 {
                now += random.random_range(0..8);
                newest += random.random_range(0..4);
                let name = format!("reader-{}", random.random_range(0..4));
                let reader = readers.entry(name.clone()).or_default();
                if random.random_bool(0.1) {
                    reader.unacknowledged.clear();
                    continue;
                }
                if random.random_bool(0.05) {
                    all.release_reader(&name);
                    *reader = ModelReader::default();
                    continue;
                }
                if reader.lease_until <= now {
                    reader.late.append(&mut reader.unacknowledged);
                }
                let (late, current) = (reader.late.split_off(0), reader.unacknowledged.split_off(0));
                let all_open =
                    late.into_iter().map(|one| (one, true)).chain(current.into_iter().map(|one| (one, false)));
                for ((cursor, messages), is_late) in all_open {
                    if random.random_bool(0.3) {
                        let open = if is_late { &mut reader.late } else { &mut reader.unacknowledged };
                        open.push((cursor, messages));
                    } else if all.acknowledge(&name, &cursor).is_ok() {
                        for (part, n) in messages {
                            let position = done.entry(part).or_default();
                            *position = n.max(*position);
                        }
                    }
                }
                let seconds = random.random_range(5..20);
                all.join(&name, at(now), lease(seconds)).unwrap();
                // Message n is in part n % 16.
                let mut got = Vec::new();
                for range in all.readable(&name, at(now)) {
                    assert_eq!(range.after, done.get(&range.part).copied().unwrap_or(0), "seed {seed}, step {step}");
                    let up_to = range.up_to.unwrap_or(newest).min(newest);
                    let numbers = (range.after + 1..=up_to).filter(|n| n % 16 == i64::from(range.part));
                    got.extend(numbers.take(2).map(|n| (range.part, n)));
                }
                let cursor = all.hand_out(got.iter().copied());
                let reader = readers.get_mut(&name).unwrap();
                reader.lease_until = now + seconds;
                reader.unacknowledged.push((cursor, got.clone()));
                for (other, state) in readers.iter().filter(|(other, state)| **other != name && state.lease_until > now)
                {
                    let open = state.unacknowledged.iter().flat_map(|(_, messages)| messages);
                    let open = open.filter(|(part, n)| *n > done.get(part).copied().unwrap_or(0));
                    for (part, _) in open {
                        let is_shared = got.iter().any(|(mine, _)| mine == part);
                        assert!(!is_shared, "seed {seed}, step {step}: {name} and {other} both have part {part}");
                    }
                }
            }
            all.join("last", at(now + 1_000), lease(30)).unwrap();
            assert_eq!(parts(&all, "last"), 16, "seed {seed}");
        }
    }
}
