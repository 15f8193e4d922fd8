//! Blanks the payloads of confidential messages: when every consumer whose filter matches has processed the message, and in any
//! case when it has expired.
//!
//! A consumer that is behind, has lapsed or is not run has not processed a message, and neither has one that has parked it, has
//! given it up, or is to read it in a replay. Only the messages in `pillarbox.confidential` are checked, some in each round and
//! those that have expired first, so the cost depends neither on the size of the log nor on how many messages wait for a consumer that is stuck.
//!
//! The disk is another matter: the former version of a row stays in the files of PostgreSQL until it is vacuumed, and in its WAL
//! and in backups for as long as these are retained.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};

use runtime::worker::Round;
use sqlx::{PgConnection, PgPool};

use crate::database::cluster_identity;
use crate::log::blank;

/// The number of messages that a round checks.
const PAGE: i64 = 500;

/// Why a consumer that has not processed an expired message does not get it.
const EXPIRED: &str = "its confidential payload expired before it was processed";

/// Blanks confidential messages, some in each round.
#[derive(Debug, Default)]
pub struct Blanking {
    /// The log id of the last message that the previous round checked; 0 to begin again.
    after: AtomicI64,
}

/// A message that a round checks.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    log_id: i64,
    is_expired: bool,
    is_blanked: bool,
}

impl Candidate {
    fn new((log_id, is_expired, is_blanked): (i64, bool, bool)) -> Candidate {
        Candidate { log_id, is_expired, is_blanked }
    }
}

/// What a message waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pending {
    /// A consumer has yet to read it, or may have read it just now: it can still park a copy of the payload.
    Reader,
    /// Only copies, parked or dead.
    Copy,
}

/// What a round does.
#[derive(Debug, Default, PartialEq, Eq)]
struct Decisions {
    /// No reader needs the payload, and no new copy of it can appear.
    finished: Vec<i64>,
    /// Expired before every consumer has processed it.
    expired: Vec<i64>,
    /// Blanked before; a consumer may have parked a copy since.
    repeated: Vec<i64>,
}

impl Blanking {
    /// Checks the next messages. Returns `Busy` if there is more to blank.
    pub async fn run_once(&self, db: &PgPool) -> sqlx::Result<Round> {
        let mut tx = db.begin().await?;
        let mut candidates = candidates(&mut tx, self.after.load(Ordering::Relaxed)).await?;
        let is_last_page = candidates.len() < PAGE as usize;
        let last = candidates.last().map_or(0, |candidate| candidate.log_id);
        self.after.store(if is_last_page { 0 } else { last }, Ordering::Relaxed);
        candidates.extend(expired(&mut tx).await?);
        candidates.sort_unstable_by_key(|candidate| candidate.log_id);
        candidates.dedup_by_key(|candidate| candidate.log_id);
        // Positions of another cluster mean nothing here, and the operator may still need all data.
        if candidates.is_empty() || cluster_identity::is_restored(&mut tx).await? {
            return Ok(Round::Idle);
        }
        let decisions = decide(&candidates, &pending(&mut tx, &candidates).await?);
        blank(&mut tx, &decisions.expired, Some(EXPIRED)).await?;
        blank(&mut tx, &[decisions.finished.as_slice(), &decisions.repeated].concat(), None).await?;
        let query = "delete from pillarbox.confidential where log_id = any($1)";
        sqlx::query(query).bind(&decisions.finished).execute(&mut *tx).await?;
        tx.commit().await?;
        let has_progress = !decisions.finished.is_empty() || !decisions.expired.is_empty();
        Ok(if has_progress && !is_last_page { Round::Busy } else { Round::Idle })
    }
}

/// The next messages after `after`, locked, so that the processes with the role `maintain` do not do the same work.
async fn candidates(tx: &mut PgConnection, after: i64) -> sqlx::Result<Vec<Candidate>> {
    let query = "select log_id, until <= now(), blanked_at is not null
                 from pillarbox.confidential where log_id > $1 order by log_id limit $2 for update skip locked";
    let rows = sqlx::query_as(query).bind(after).bind(PAGE).fetch_all(tx).await?;
    Ok(rows.into_iter().map(Candidate::new).collect())
}

/// Messages that have expired and are not blanked yet, locked.
async fn expired(tx: &mut PgConnection) -> sqlx::Result<Vec<Candidate>> {
    let query = "select log_id, true, false from pillarbox.confidential
                 where until <= now() and blanked_at is null order by until limit $1 for update skip locked";
    let rows = sqlx::query_as(query).bind(PAGE).fetch_all(tx).await?;
    Ok(rows.into_iter().map(Candidate::new).collect())
}

async fn pending(tx: &mut PgConnection, candidates: &[Candidate]) -> sqlx::Result<HashMap<i64, Pending>> {
    let query =
        "select log_id, bool_or(state in ('unread', 'replay')) from pillarbox.confidential_pending($1) group by 1";
    let ids: Vec<i64> = candidates.iter().map(|candidate| candidate.log_id).collect();
    let found: Vec<(i64, bool)> = sqlx::query_as(query).bind(ids).fetch_all(tx).await?;
    let pending = |(id, has_reader)| (id, if has_reader { Pending::Reader } else { Pending::Copy });
    Ok(found.into_iter().map(pending).collect())
}

fn decide(candidates: &[Candidate], pending: &HashMap<i64, Pending>) -> Decisions {
    let mut decisions = Decisions::default();
    for candidate in candidates {
        let pending = pending.get(&candidate.log_id).copied();
        let expires = candidate.is_expired && !candidate.is_blanked && pending.is_some();
        if expires {
            decisions.expired.push(candidate.log_id);
        }
        match pending {
            None => decisions.finished.push(candidate.log_id),
            Some(Pending::Copy) if expires || candidate.is_blanked => decisions.finished.push(candidate.log_id),
            Some(Pending::Reader) if candidate.is_blanked => decisions.repeated.push(candidate.log_id),
            Some(Pending::Copy | Pending::Reader) => {}
        }
    }
    decisions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_stays_until_no_reader_needs_it_or_it_has_expired() {
        let candidate = |log_id, is_expired, is_blanked| Candidate::new((log_id, is_expired, is_blanked));
        let candidates = [
            candidate(1, false, false),
            candidate(2, false, false),
            candidate(3, true, false),
            candidate(4, true, false),
            candidate(5, true, true),
            candidate(6, true, true),
            candidate(7, false, true),
        ];
        let pending = HashMap::from([
            (2, Pending::Reader),
            (3, Pending::Reader),
            (4, Pending::Copy),
            (5, Pending::Reader),
            (6, Pending::Copy),
        ]);
        let expected = Decisions { finished: vec![1, 4, 6, 7], expired: vec![3, 4], repeated: vec![5] };
        assert_eq!(decide(&candidates, &pending), expected);
    }
}
