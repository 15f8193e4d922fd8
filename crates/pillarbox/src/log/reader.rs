//! Reads the log without losing late commits and without waiting for them.
//!
//! Reading `id > last` loses rows that commit late; a cursor over (xid, id) waits for every long transaction. So a
//! reader moves from snapshot to snapshot: a window holds exactly the rows that became visible between two of them.
//! Rows whose transaction got its xid after the old snapshot have an id above the sequence value that was read before it
//! ([`Snapshot::now`] guarantees it; the first column of a log row is its xid, assigned before its id), and are read by
//! (shard, id) from there. The transactions of all other rows were in progress at the old snapshot; these are few, and are
//! read by xid. A window is read in chunks by id, so that a chunk costs the same at any backlog.
//!
//! # Order
//!
//! Two messages of a key are read in the order in which they were posted if the first was committed before the second got
//! its id, or if both transactions posted while they held the same row lock. The first then has the lower id, and is in
//! the same window or an earlier one; within a window, rows are sorted by id. Transactions that overlap without a common
//! lock have no defined order.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use futures_util::TryStreamExt;
use sqlx::{PgConnection, Row};

use super::SHARDS;
use super::filter::Filter;
use super::message::Message;
use super::position::Position;
use super::time_search;
use super::window::{BYTES_MAX, Window};
use crate::database::snapshot::Snapshot;

/// The row quota of a shard without a backlog. The shards with a backlog share the remainder of the limit.
const CAUGHT_UP_QUOTA: u32 = 4;

/// Reads some shards of the log, each from its own position.
#[derive(Debug, Clone)]
pub struct Reader {
    filter: Filter,
    positions: BTreeMap<i16, Position>,
    /// Shards that returned as many rows as their quota allowed, so that their window has more rows left, or may have.
    with_backlog: Vec<i16>,
    /// The average size of the messages of the last read, to request no more rows than fit into [`BYTES_MAX`].
    message_bytes: usize,
    /// All shards advance together, so that messages are read in the order of the log across shards.
    in_log_order: bool,
    /// How many bytes of content one read loads.
    bytes_max: usize,
}

/// The rows of one shard in one read.
#[derive(Default)]
struct ShardScan {
    rows: i32,
    last_id: i64,
    /// Rows were left over because the content was too large.
    is_cut: bool,
}

/// What one read found.
struct Scan {
    messages: Vec<Message>,
    bytes: usize,
    shards: BTreeMap<i16, ShardScan>,
}

/// A shard with an open window, and the number of rows that it may return.
struct OpenShard {
    shard: i16,
    position: Position,
    quota: i32,
}

impl Scan {
    /// Whether the window of the shard has more rows, or may have.
    fn has_backlog(&self, open: &OpenShard) -> bool {
        self.shards.get(&open.shard).is_some_and(|scan| scan.is_cut || scan.rows == open.quota)
    }
}

impl Reader {
    pub(crate) fn new(filter: Filter) -> Reader {
        Reader {
            filter,
            positions: BTreeMap::new(),
            with_backlog: Vec::new(),
            message_bytes: 0,
            in_log_order: false,
            bytes_max: BYTES_MAX,
        }
    }

    /// Reads all shards in the order of the log. The reader must have all shards.
    pub fn in_log_order(mut self) -> Reader {
        self.in_log_order = true;
        self
    }

    /// Loads at most about this many bytes of content in one read.
    pub(crate) fn with_bytes_max(mut self, bytes_max: usize) -> Reader {
        self.bytes_max = bytes_max;
        self
    }

    /// Continues a window that ends with `new` after an id, in all shards.
    pub(crate) fn continue_window(&mut self, new: &Snapshot, last_id: i64) {
        for position in self.positions.values_mut() {
            (position.new, position.last_id) = (new.clone(), last_id);
        }
    }

    /// Creates a reader of all shards that starts after `start`.
    pub fn of_all_shards(filter: Filter, start: &Snapshot) -> Reader {
        let mut reader = Reader::new(filter);
        (0..SHARDS).for_each(|shard| reader.insert(shard, Position::after(start.clone())));
        reader
    }

    /// Skips the messages of the open windows that were posted before `time`, except some that were posted shortly before it.
    pub async fn skip_to(&mut self, db: &mut PgConnection, time: DateTime<Utc>) -> sqlx::Result<()> {
        for (shard, position) in &mut self.positions {
            let first = time_search::first_since(db, *shard, time).await?;
            position.last_id = position.last_id.max(first - 1);
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, shard: i16, position: Position) {
        self.positions.insert(shard, position);
    }

    pub(crate) fn remove(&mut self, shard: i16) {
        self.positions.remove(&shard);
    }

    pub(crate) fn positions(&self) -> &BTreeMap<i16, Position> {
        &self.positions
    }

    /// Whether every window has been read to its end; [`Reader::open_windows`] opens the next ones.
    pub fn is_done(&self) -> bool {
        self.positions.values().all(Position::is_done)
    }

    /// Whether nothing is left to read up to this snapshot.
    pub(crate) fn has_reached(&self, now: &Snapshot) -> bool {
        self.positions.values().all(|position| position.is_done() && !now.is_after(&position.new))
    }

    /// Opens windows up to `now`. A window that is not done stays as it is, because replacing it would break the order.
    /// The position of a shard that was taken over from another process can be ahead of `now`, and must not go back.
    pub fn open_windows(&mut self, now: &Snapshot) {
        if self.in_log_order && !self.is_done() {
            return;
        }
        let done = self.positions.values_mut().filter(|position| position.is_done() && now.is_after(&position.new));
        for position in done {
            position.new = now.clone();
            position.last_id = 0;
        }
    }

    /// Reads from a window in memory. Returns the messages that match, or None if the window does not continue at every
    /// position or has more than `limit` matching messages.
    pub(crate) fn read_window(&mut self, window: &Window, limit: u32) -> Option<Vec<Message>> {
        let continues = |position: &Position| position.is_done() && position.new == window.old;
        if !window.new.is_after(&window.old) || !self.positions.values().all(continues) {
            return None;
        }
        let matches = |message: &&Message| self.positions.contains_key(&message.shard) && self.filter.matches(message);
        let found: Vec<Message> = window.messages.iter().filter(matches).take(limit as usize + 1).cloned().collect();
        if found.len() > limit as usize {
            return None;
        }
        self.positions.values_mut().for_each(|position| *position = Position::after(window.new.clone()));
        Some(found)
    }

    /// Reads the next messages of the open windows and advances past them. It reads about `limit` rows of the log,
    /// fewer if they are large. Messages are sorted by id; those that the filter does not match are skipped.
    pub async fn read(&mut self, db: &mut PgConnection, limit: u32) -> sqlx::Result<Vec<Message>> {
        let open = self.open_shards(limit.min((self.bytes_max / self.message_bytes.max(1)) as u32));
        if open.is_empty() {
            return Ok(Vec::new());
        }
        let mut scan = self.scan(db, &open).await?;
        if !scan.messages.is_empty() {
            self.message_bytes = scan.bytes / scan.messages.len();
        }
        scan.messages.sort_by_key(|message| message.id);
        self.with_backlog.clear();
        self.with_backlog.extend(open.iter().filter(|open| scan.has_backlog(open)).map(|open| open.shard));
        match self.common_last_id(&scan) {
            Some(last_id) => self.advance_all_to(last_id, &open, &mut scan),
            None => self.advance_each(&open, &scan),
        }
        Ok(scan.messages)
    }

    /// The shards with an open window. Shards with a backlog get most of the limit, so that one busy shard is read as
    /// fast as sixteen.
    fn open_shards(&self, limit: u32) -> Vec<OpenShard> {
        let is_open = |position: &&Position| !position.is_done();
        let count = self.positions.values().filter(is_open).count() as u32;
        let has_backlog = |shard: &i16| self.with_backlog.contains(shard);
        let backlog_count =
            self.positions.iter().filter(|(shard, position)| is_open(position) && has_backlog(shard)).count() as u32;
        let caught_up = count - backlog_count;
        let (caught_up_quota, backlog_quota) = match backlog_count {
            0 => (limit / caught_up.max(1), 0),
            _ => {
                let quota = CAUGHT_UP_QUOTA.min(limit / count);
                (quota, limit.saturating_sub(caught_up * quota) / backlog_count)
            }
        };
        let open = self.positions.iter().filter(|(_, position)| is_open(position));
        open.map(|(shard, position)| {
            let quota = if has_backlog(shard) { backlog_quota } else { caught_up_quota };
            OpenShard { shard: *shard, position: position.clone(), quota: quota.max(1) as i32 }
        })
        .collect()
    }

    /// Queries the rows of the open windows and decodes the matching messages, until `bytes_max` is reached.
    async fn scan(&self, db: &mut PgConnection, open: &[OpenShard]) -> sqlx::Result<Scan> {
        let (sources, subjects) = self.filter.sql_condition();
        let mut rows = sqlx::query(READ)
            .bind(open.iter().map(|open| open.shard).collect::<Vec<_>>())
            .bind(open.iter().map(|open| open.position.old.visible.as_str()).collect::<Vec<_>>())
            .bind(open.iter().map(|open| open.position.old.id_before).collect::<Vec<_>>())
            .bind(open.iter().map(|open| open.position.new.visible.as_str()).collect::<Vec<_>>())
            .bind(open.iter().map(|open| open.position.last_id).collect::<Vec<_>>())
            .bind(open.iter().map(|open| open.quota).collect::<Vec<_>>())
            .bind(sources)
            .bind(subjects)
            .bind(self.filter.excluded())
            .bind(self.filter.excluded_sources())
            .bind(self.filter.tenant())
            .fetch(db);
        let mut shards: BTreeMap<i16, ShardScan> = BTreeMap::new();
        // Allocated once: growing it step by step was a seventh of the relay's cost.
        let capacity = open.iter().map(|open| open.quota as usize).sum();
        let (mut messages, mut bytes) = (Vec::with_capacity(capacity), 0);
        while let Some(row) = rows.try_next().await? {
            let (shard, id): (i16, i64) = (row.try_get("shard")?, row.try_get("id")?);
            let scan = shards.entry(shard).or_default();
            if scan.is_cut || bytes > self.bytes_max {
                // The rows of a shard arrive in order, so all later rows of the shard are also left over.
                if !std::mem::replace(&mut scan.is_cut, true) {
                    scan.last_id = id - 1;
                }
                continue;
            }
            scan.rows += 1;
            scan.last_id = id;
            if row.try_get("matches")? {
                let message = Message::from_log_row(&row)?;
                bytes += message.bytes();
                messages.push(message);
            }
        }
        Ok(Scan { messages, bytes, shards })
    }

    /// In log order, no shard may advance beyond the shard that still has more rows: returns the lowest last id of the
    /// shards with a backlog. None if each shard advances by itself.
    fn common_last_id(&self, scan: &Scan) -> Option<i64> {
        if !self.in_log_order {
            return None;
        }
        self.with_backlog.iter().filter_map(|shard| scan.shards.get(shard)).map(|scan| scan.last_id).min()
    }

    fn advance_all_to(&mut self, last_id: i64, open: &[OpenShard], scan: &mut Scan) {
        scan.messages.retain(|message| message.id <= last_id);
        for OpenShard { shard, .. } in open {
            if let Some(position) = self.positions.get_mut(shard) {
                position.last_id = position.last_id.max(last_id);
            }
        }
    }

    fn advance_each(&mut self, open: &[OpenShard], scan: &Scan) {
        for OpenShard { shard, .. } in open {
            let Some(position) = self.positions.get_mut(shard) else { continue };
            match scan.shards.get(shard) {
                Some(scan) if self.with_backlog.contains(shard) => {
                    position.last_id = position.last_id.max(scan.last_id)
                }
                _ => *position = Position::after(position.new.clone()),
            }
        }
    }
}

/// Reads the next rows of each open window: those whose transaction got its xid after the old snapshot, by (shard, id), and
/// those whose transaction was in progress at the old snapshot, by xid.
const READ: &str = "
-- Rows that do not match return no content.
select ahead.shard, ahead.id, ahead.matches, ahead.message_id, ahead.source, ahead.tenant, ahead.topic, ahead.key,
       ahead.aggregate_type, ahead.aggregate_id, ahead.at,
       case when ahead.matches then ahead.headers end as headers,
       case when ahead.matches then ahead.payload end as payload
-- The snapshots are cast as arrays, once, and not for each row.
from unnest($1::smallint[], $2::text[]::pg_snapshot[], $3::bigint[], $4::text[]::pg_snapshot[], $5::bigint[],
            $6::integer[]) as position (shard, old, old_id, new, last_id, quota)
cross join lateral (
    select found.*,
           ($7::text[] is null or found.source = any($7))
           and ($11::text is null or found.tenant = $11)
           and ($8::text is null or pillarbox.subject(found.source, found.topic, found.aggregate_type) ~ $8)
           and ($9::text is null or ($10::text[] is not null and found.source <> all($10))
                or pillarbox.subject(found.source, found.topic, found.aggregate_type) !~ $9) as matches
    from (
        (select * from pillarbox.log
         where shard = position.shard and id > greatest(position.old_id, position.last_id)
           and xid >= pg_snapshot_xmax(position.old) and pg_visible_in_snapshot(xid, position.new)
         order by id limit position.quota)
        union all
        (select late.* from pg_snapshot_xip(position.old) as in_progress (xid)
         cross join lateral (
             -- Exact bounds in the index (xid, shard, id). With an equality on the xid, the planner assumes many matches on
             -- a day with few transactions and scans that whole day; a range of the xid alone scans all rows of the
             -- transaction for each chunk.
             select * from pillarbox.log
             where (xid, shard, id) > (in_progress.xid, position.shard,
                                       greatest(position.last_id, (select floor_id from pillarbox.cluster_identity)))
               and (xid, shard, id) <= (in_progress.xid, position.shard, 9223372036854775807)
             order by xid, shard, id limit position.quota
         ) late
         -- A transaction is searched only if it has become visible.
         where pg_visible_in_snapshot(in_progress.xid, position.new))
        order by id limit position.quota
    ) found
) ahead";
