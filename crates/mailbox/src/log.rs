//! Reading the log without missing or stalling.
//!
//! `id > last` loses what commits late; a cursor on (xid, id) stalls behind a long transaction. So a reader moves from
//! snapshot to snapshot: a window holds exactly what became visible between two of them. Of those rows, the ones whose
//! transaction began after the old snapshot have an id above what the sequence had before it was taken ([`Moment::now`]
//! sees to that), and are read by (shard, id) from there; the others were in progress at the old snapshot, are few, and
//! are read by xid. A window is read in chunks by id, so a chunk costs the same at any backlog. Order per key holds: within a
//! window by id, and between windows because what committed earlier is in an earlier one.

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::post::AggregateId;

pub const SHARDS: i16 = 16;

/// A moment of the log: what is visible then, and an id below all that begins later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    snapshot: String,
    /// Of the sequence, read before the snapshot was taken.
    id_before: i64,
}

impl Moment {
    /// Before the first message.
    pub fn beginning() -> Moment {
        // 3 is the first transaction id that a row can have.
        Moment { snapshot: "3:3:".to_owned(), id_before: 0 }
    }

    /// This moment. Needs a connection that is not in a transaction.
    ///
    /// Three steps, in this order. Read the sequence. Begin and end a transaction W. Take the snapshot. A snapshot's
    /// xmax is not the next transaction id, but the one behind the last that ENDED: without W, transactions in progress
    /// could be above it, unlisted, with ids that the sequence has already given out. W ends before the snapshot is
    /// taken, so what is at or above xmax began after W, and took its ids after the sequence was read.
    pub async fn now(db: &mut PgConnection) -> sqlx::Result<Moment> {
        // W writes nothing, so there is nothing to wait for on disk.
        let rows = sqlx::raw_sql(
            "select last_value::text from pillarbox.log_id;
             begin; set local synchronous_commit = off; select pg_current_xact_id()::text; commit;
             select pg_current_snapshot()::text",
        )
        .fetch_all(db)
        .await?;
        let [sequence, _, snapshot] = rows.as_slice() else { return Err(sqlx::Error::RowNotFound) };
        let id_before =
            sequence.try_get::<&str, _>(0)?.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        Ok(Moment { snapshot: snapshot.try_get(0)?, id_before })
    }
}

/// A reader's place in one shard: a window, and how far it has been read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    old: Moment,
    new: Moment,
    /// Within the window; starts again with each.
    last_id: i64,
}

impl Place {
    /// Behind everything that is visible at `moment`.
    pub fn behind(moment: Moment) -> Place {
        Place { old: moment.clone(), new: moment, last_id: 0 }
    }

    /// True when the window has been read to its end; [`Place::open`] opens the next.
    pub fn is_done(&self) -> bool {
        self.old == self.new
    }

    /// Opens the window up to `now`. A window that is not done stays as it is: cutting one short breaks the order.
    pub fn open(&mut self, now: Moment) {
        if self.is_done() {
            self.new = now;
            self.last_id = 0;
        }
    }

    /// Reads the next messages of the window and moves behind them. Fewer than `limit`: the window is done.
    pub async fn read(&mut self, db: &mut PgConnection, shard: i16, limit: u32) -> sqlx::Result<Vec<Message>> {
        let rows = sqlx::query(
            "(select * from pillarbox.log
              where shard = $1 and id > greatest($4, $5)
                and xid >= pg_snapshot_xmax($2::pg_snapshot) and pg_visible_in_snapshot(xid, $3::pg_snapshot)
              order by id limit $6)
             union all
             (select late.* from pg_snapshot_xip($2::pg_snapshot) as in_progress (xid)
              cross join lateral (
                  select * from pillarbox.log
                  where xid = in_progress.xid and shard = $1 and id > $5
                    and pg_visible_in_snapshot(xid, $3::pg_snapshot)
                  order by id limit $6
              ) late)
             order by id limit $6",
        )
        .bind(shard)
        .bind(&self.old.snapshot)
        .bind(&self.new.snapshot)
        .bind(self.old.id_before)
        .bind(self.last_id)
        .bind(i64::from(limit))
        .fetch_all(db)
        .await?;
        let messages = rows.iter().map(message).collect::<sqlx::Result<Vec<Message>>>()?;
        match messages.last() {
            Some(last) if messages.len() == limit as usize => self.last_id = last.id,
            _ => self.old = self.new.clone(),
        }
        Ok(messages)
    }
}

/// A message as the log has it.
#[derive(Debug, Clone)]
pub struct Message {
    pub id: i64,
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

/// Makes partitions for today and so many days ahead; returns how many it made.
pub async fn make_partitions(db: &mut PgConnection, days: i32) -> sqlx::Result<i32> {
    sqlx::query_scalar("select pillarbox.make_log_partitions($1)").bind(days).fetch_one(db).await
}

fn message(row: &PgRow) -> sqlx::Result<Message> {
    let raw = |column| row.try_get::<Json<Box<RawValue>>, _>(column).map(|Json(text)| text);
    Ok(Message {
        id: row.try_get("id")?,
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
