//! Reading the log without missing or stalling.
//!
//! `id > last` loses what commits late; a cursor on (xid, id) stalls behind a long transaction. So a reader moves from
//! snapshot to snapshot: a window holds exactly what became visible between two of them. Of those rows, the ones whose
//! transaction began after the old snapshot have an id above what the sequence had before it was taken ([`Moment::now`]
//! sees to that), and are read by (shard, id) from there; the others were in progress at the old snapshot, are few, and
//! are read by xid. A window is read in chunks by id, so a chunk costs the same at any backlog. Order per key holds: within a
//! window by id, and between windows because what committed earlier is in an earlier one.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use futures_util::TryStreamExt;
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::filter::Filter;
use crate::moment::Moment;
use crate::post::AggregateId;
use crate::watch::Ahead;

pub const SHARDS: i16 = 16;

/// What a shard with nothing ahead may bring at once; the others share the rest.
const CALM_SHARE: u32 = 4;

/// How much content is taken at a time; the rest is left for the next time.
const BYTES_MAX: usize = 16 * 1024 * 1024;

/// A reader's place in one shard: a window, and how far it has been read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub(crate) old: Moment,
    pub(crate) new: Moment,
    /// Within the window; starts again with each.
    pub(crate) last_id: i64,
}

impl Place {
    /// Behind everything that is visible at `moment`.
    pub fn behind(moment: Moment) -> Place {
        Place { old: moment.clone(), new: moment, last_id: 0 }
    }

    /// True when the window has been read to its end.
    pub fn is_done(&self) -> bool {
        self.old == self.new
    }
}

/// What a shard has brought.
#[derive(Default)]
struct Scanned {
    rows: i32,
    last_id: i64,
    /// There was more than could be taken.
    is_cut: bool,
}

/// Reads some shards of the log, each from its own place.
#[derive(Debug, Clone)]
pub struct Reader {
    filter: Filter,
    places: BTreeMap<i16, Place>,
    /// Shards that brought as much as they were asked for: there is more.
    full: Vec<i16>,
    /// How large messages are, by the last that were read: what cannot be taken is not even asked for.
    message_bytes: usize,
    /// All shards move together: what is read is in the order of the log, across shards, too.
    in_step: bool,
}

impl Reader {
    pub fn new(filter: Filter) -> Reader {
        Reader { filter, places: BTreeMap::new(), full: Vec::new(), message_bytes: 0, in_step: false }
    }

    /// Keeps all shards in step. It must have all of them.
    pub(crate) fn in_step(mut self) -> Reader {
        self.in_step = true;
        self
    }

    /// Reads all shards from the same moment.
    pub fn of_all_shards(filter: Filter, start: &Moment) -> Reader {
        let mut reader = Reader::new(filter);
        (0..SHARDS).for_each(|shard| reader.put(shard, Place::behind(start.clone())));
        reader
    }

    pub(crate) fn put(&mut self, shard: i16, place: Place) {
        self.places.insert(shard, place);
    }

    pub(crate) fn remove(&mut self, shard: i16) {
        self.places.remove(&shard);
    }

    pub(crate) fn places(&self) -> &BTreeMap<i16, Place> {
        &self.places
    }

    /// True when every window has been read to its end; [`Reader::open`] opens the next.
    pub fn is_done(&self) -> bool {
        self.places.values().all(Place::is_done)
    }

    /// Whether nothing is left to read up to this moment.
    pub(crate) fn has_reached(&self, now: &Moment) -> bool {
        self.places.values().all(|place| place.is_done() && !now.is_after(&place.new))
    }

    /// Opens windows up to `now`. One that is not done stays as it is: cutting it short breaks the order. A place that was
    /// taken over may be ahead of what this process has seen, and must not go back.
    pub fn open(&mut self, now: &Moment) {
        if self.in_step && !self.is_done() {
            return;
        }
        for place in self.places.values_mut().filter(|place| place.is_done() && now.is_after(&place.new)) {
            place.new = now.clone();
            place.last_id = 0;
        }
    }

    /// Takes what is for this reader of what was read ahead, if it continues where every place is, and is at most `limit`.
    pub(crate) fn follow(&mut self, ahead: &Ahead, limit: u32) -> Option<Vec<Message>> {
        let continues = |place: &Place| place.is_done() && place.new == ahead.old;
        if !ahead.new.is_after(&ahead.old) || !self.places.values().all(continues) {
            return None;
        }
        let is_mine = |message: &&Message| self.places.contains_key(&message.shard) && self.filter.takes(message);
        let mine: Vec<Message> = ahead.messages.iter().filter(is_mine).take(limit as usize + 1).cloned().collect();
        if mine.len() > limit as usize {
            return None;
        }
        self.places.values_mut().for_each(|place| *place = Place::behind(ahead.new.clone()));
        Some(mine)
    }

    /// Reads the next messages of the open windows, about `limit` rows of the log, fewer if they are large, and moves
    /// behind them. Each shard's are in its order; what the filter does not want is passed over.
    pub async fn read(&mut self, db: &mut PgConnection, limit: u32) -> sqlx::Result<Vec<Message>> {
        let open: Vec<(i16, Place)> =
            self.places.iter().filter(|(_, place)| !place.is_done()).map(|(s, place)| (*s, place.clone())).collect();
        if open.is_empty() {
            return Ok(Vec::new());
        }
        let shares = self.shares(&open, limit.min((BYTES_MAX / self.message_bytes.max(1)) as u32));
        let (sources, subjects) = self.filter.narrows();
        let mut rows = sqlx::query(READ)
            .bind(open.iter().map(|(shard, _)| *shard).collect::<Vec<_>>())
            .bind(open.iter().map(|(_, place)| place.old.snapshot.as_str()).collect::<Vec<_>>())
            .bind(open.iter().map(|(_, place)| place.old.id_before).collect::<Vec<_>>())
            .bind(open.iter().map(|(_, place)| place.new.snapshot.as_str()).collect::<Vec<_>>())
            .bind(open.iter().map(|(_, place)| place.last_id).collect::<Vec<_>>())
            .bind(&shares)
            .bind(sources)
            .bind(subjects)
            .bind(self.filter.leaves())
            .fetch(db);
        let mut scanned: BTreeMap<i16, Scanned> = BTreeMap::new();
        // At once: to grow it step by step is a seventh of what the relay costs.
        let mut messages: Vec<Message> = Vec::with_capacity(shares.iter().sum::<i32>() as usize);
        let mut bytes = 0;
        while let Some(row) = rows.try_next().await? {
            let (shard, id): (i16, i64) = (row.try_get("shard")?, row.try_get("id")?);
            let scanned = scanned.entry(shard).or_default();
            if scanned.is_cut || bytes > BYTES_MAX {
                // A shard's rows come in order, so all that follow are left, too.
                if !std::mem::replace(&mut scanned.is_cut, true) {
                    scanned.last_id = id - 1;
                }
                continue;
            }
            scanned.rows += 1;
            scanned.last_id = id;
            if row.try_get("wanted")? {
                let message = message(&row)?;
                bytes += message.bytes();
                messages.push(message);
            }
        }
        drop(rows);
        if !messages.is_empty() {
            self.message_bytes = bytes / messages.len();
        }
        messages.sort_by_key(|message| message.id);
        // In step, nobody goes further than the shard that has more behind what it brought.
        let is_full =
            |shard: i16, share: i32| scanned.get(&shard).is_some_and(|scanned| scanned.is_cut || scanned.rows == share);
        let reach = open.iter().zip(&shares).filter(|((shard, _), share)| self.in_step && is_full(*shard, **share));
        let reach = reach.filter_map(|((shard, _), _)| scanned.get(shard)).map(|scanned| scanned.last_id).min();
        if let Some(reach) = reach {
            messages.retain(|message| message.id <= reach);
            self.full.clear();
            for ((shard, _), share) in open.iter().zip(&shares) {
                let Some(place) = self.places.get_mut(shard) else { continue };
                place.last_id = place.last_id.max(reach);
                if is_full(*shard, *share) {
                    self.full.push(*shard);
                }
            }
            return Ok(messages);
        }
        self.full.clear();
        for ((shard, _), share) in open.iter().zip(shares) {
            let Some(place) = self.places.get_mut(shard) else { continue };
            match scanned.get(shard) {
                Some(scanned) if scanned.is_cut || scanned.rows == share => {
                    place.last_id = place.last_id.max(scanned.last_id);
                    self.full.push(*shard);
                }
                _ => *place = Place::behind(place.new.clone()),
            }
        }
        Ok(messages)
    }

    /// How many rows each open shard may bring: the full ones most, so that one busy shard is read as fast as sixteen.
    fn shares(&self, open: &[(i16, Place)], limit: u32) -> Vec<i32> {
        let full = open.iter().filter(|(shard, _)| self.full.contains(shard)).count() as u32;
        let calm = open.len() as u32 - full;
        let (calm_share, full_share) = match full {
            0 => (limit / calm.max(1), 0),
            _ => {
                let calm_share = CALM_SHARE.min(limit / open.len() as u32);
                (calm_share, limit.saturating_sub(calm * calm_share) / full)
            }
        };
        let share = |shard: &i16| if self.full.contains(shard) { full_share } else { calm_share };
        open.iter().map(|(shard, _)| share(shard).max(1) as i32).collect()
    }
}

// The snapshots are cast as arrays, once, and not for each row. An unwanted row brings no content. A transaction that was in
// progress is looked into once it is visible, and between exact ends in the index (xid, shard, id): as rows, because an
// equality looks so common, on a day that was posted in few transactions, that it is sought through all of that day, and a range
// of the xid alone walks all that the transaction posted, for each chunk.
const READ: &str = "
select ahead.shard, ahead.id, ahead.wanted, ahead.message_id, ahead.source, ahead.tenant, ahead.topic, ahead.key,
       ahead.aggregate_type, ahead.aggregate_id, ahead.at,
       case when ahead.wanted then ahead.headers end as headers,
       case when ahead.wanted then ahead.payload end as payload
from unnest($1::smallint[], $2::text[]::pg_snapshot[], $3::bigint[], $4::text[]::pg_snapshot[], $5::bigint[],
            $6::integer[]) as place (shard, old, old_id, new, last_id, share)
cross join lateral (
    select found.*,
           ($7::text[] is null or found.source = any($7))
           and ($8::text is null or pillarbox.subject(found.source, found.topic, found.aggregate_type) ~ $8)
           and ($9::text is null or pillarbox.subject(found.source, found.topic, found.aggregate_type) !~ $9) as wanted
    from (
        (select * from pillarbox.log
         where shard = place.shard and id > greatest(place.old_id, place.last_id)
           and xid >= pg_snapshot_xmax(place.old) and pg_visible_in_snapshot(xid, place.new)
         order by id limit place.share)
        union all
        (select late.* from pg_snapshot_xip(place.old) as in_progress (xid)
         cross join lateral (
             select * from pillarbox.log
             where (xid, shard, id) > (in_progress.xid, place.shard,
                                       greatest(place.last_id, (select floor_id from pillarbox.home)))
               and (xid, shard, id) <= (in_progress.xid, place.shard, 9223372036854775807)
             order by xid, shard, id limit place.share
         ) late
         where pg_visible_in_snapshot(in_progress.xid, place.new))
        order by id limit place.share
    ) found
) ahead";

/// All that became visible between two moments that follow each other, in the order of the log; None if it is more than
/// `limit`. Of all shards at once it is found by transaction, at a third of what a look into each shard costs.
pub(crate) async fn between(
    db: &mut PgConnection,
    old: &Moment,
    new: &Moment,
    limit: u32,
) -> sqlx::Result<Option<Vec<Message>>> {
    let mut rows = sqlx::query(BETWEEN)
        .bind(&old.snapshot)
        .bind(old.id_before)
        .bind(&new.snapshot)
        .bind(i64::from(limit) + 1)
        .fetch(db);
    let (mut messages, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await? {
        let message = message(&row)?;
        bytes += message.bytes();
        messages.push(message);
        if messages.len() > limit as usize || bytes > BYTES_MAX {
            return Ok(None);
        }
    }
    messages.sort_by_key(|message: &Message| message.id);
    Ok(Some(messages))
}

// The same rows as READ finds for all shards. What came here from another cluster has ids up to the floor, and xids that
// mean nothing.
const BETWEEN: &str = "
select * from pillarbox.log
where xid >= pg_snapshot_xmax($1::pg_snapshot) and xid < pg_snapshot_xmax($3::pg_snapshot) and id > $2
  and pg_visible_in_snapshot(xid, $3::pg_snapshot)
union all
select late.* from pg_snapshot_xip($1::pg_snapshot) as in_progress (xid)
cross join lateral (
    select * from pillarbox.log
    where xid >= in_progress.xid and xid <= in_progress.xid and id > (select floor_id from pillarbox.home)
    limit $4
) late
where pg_visible_in_snapshot(in_progress.xid, $3::pg_snapshot)
limit $4";

/// A message as the log has it.
#[derive(Debug, Clone)]
pub struct Message {
    pub id: i64,
    pub shard: i16,
    pub message_id: Uuid,
    pub source: String,
    pub tenant: String,
    pub topic: String,
    pub key: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<AggregateId>,
    /// As they were posted: a reader does not stumble over what it does not use.
    pub headers: Box<RawValue>,
    /// The text as it was posted.
    pub payload: Box<RawValue>,
    pub at: DateTime<Utc>,
}

impl Message {
    /// About how much memory it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.payload.get().len() + self.headers.get().len()
    }
}

/// Makes the log's partitions for today and so many days ahead; returns how many it made.
pub async fn make_partitions(db: &mut PgConnection, days: i32) -> sqlx::Result<i32> {
    sqlx::query_scalar("select pillarbox.make_log_partitions($1)").bind(days).fetch_one(db).await
}

/// Where a message is in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogRef {
    pub shard: i16,
    pub id: i64,
    /// It says in which partition.
    pub at: DateTime<Utc>,
}

impl Message {
    pub fn place(&self) -> LogRef {
        LogRef { shard: self.shard, id: self.id, at: self.at }
    }
}

/// The messages at these places, in no order; those that the log no longer has are missing.
pub async fn at_places(db: &mut PgConnection, places: &[LogRef]) -> sqlx::Result<Vec<Message>> {
    let rows = sqlx::query(
        "select found.* from unnest($1::smallint[], $2::bigint[], $3::timestamptz[]) as place (shard, id, at)
         cross join lateral (
             select * from pillarbox.log where log.shard = place.shard and log.id = place.id and log.at = place.at
         ) found",
    )
    .bind(places.iter().map(|place| place.shard).collect::<Vec<_>>())
    .bind(places.iter().map(|place| place.id).collect::<Vec<_>>())
    .bind(places.iter().map(|place| place.at).collect::<Vec<_>>())
    .fetch_all(db)
    .await?;
    rows.iter().map(message).collect()
}

/// From columns of these names.
pub(crate) fn message(row: &PgRow) -> sqlx::Result<Message> {
    let raw = |column| row.try_get::<Json<Box<RawValue>>, _>(column).map(|Json(text)| text);
    Ok(Message {
        id: row.try_get("id")?,
        shard: row.try_get("shard")?,
        message_id: row.try_get("message_id")?,
        source: row.try_get("source")?,
        tenant: row.try_get("tenant")?,
        topic: row.try_get("topic")?,
        key: row.try_get("key")?,
        aggregate_type: row.try_get("aggregate_type")?,
        aggregate_id: row.try_get::<Option<Json<AggregateId>>, _>("aggregate_id")?.map(|Json(id)| id),
        headers: raw("headers")?,
        payload: raw("payload")?,
        at: row.try_get("at")?,
    })
}
