//! Windows: the messages that became visible between two consecutive snapshots, loaded for all shards at once.

use futures_util::TryStreamExt;
use sqlx::PgConnection;

use super::message::Message;
use crate::database::snapshot::Snapshot;

/// How many bytes of content are loaded at a time; the rest is left for the next read.
pub(crate) const BYTES_MAX: usize = 16 * 1024 * 1024;

/// The messages that became visible between two consecutive snapshots, in the order of the log.
pub(crate) struct Window {
    pub(crate) old: Snapshot,
    pub(crate) new: Snapshot,
    pub(crate) messages: Vec<Message>,
    /// The size of all messages together.
    pub(crate) bytes: usize,
}

impl Window {
    /// Loads a window; returns None if it has more than `limit` messages or is too large. Finding the rows of all
    /// shards by transaction costs a third of searching each shard.
    pub(crate) async fn load(
        db: &mut PgConnection,
        old: Snapshot,
        new: Snapshot,
        limit: u32,
    ) -> sqlx::Result<Option<Window>> {
        let mut rows = sqlx::query(BETWEEN)
            .bind(&old.visible)
            .bind(old.id_before)
            .bind(&new.visible)
            .bind(i64::from(limit) + 1)
            .fetch(db);
        let (mut messages, mut bytes) = (Vec::new(), 0);
        while let Some(row) = rows.try_next().await? {
            let message = Message::from_log_row(&row)?;
            bytes += message.bytes();
            messages.push(message);
            if messages.len() > limit as usize || bytes > BYTES_MAX {
                return Ok(None);
            }
        }
        drop(rows);
        messages.sort_by_key(|message: &Message| message.id);
        Ok(Some(Window { old, new, messages, bytes }))
    }
}

/// Finds the same rows as the reader's query does for all shards. Restored rows have ids up to `floor_id` of the cluster
/// identity, and xids of another cluster, so they are excluded from the search by xid.
const BETWEEN: &str = "
select * from pillarbox.log
where xid >= pg_snapshot_xmax($1::pg_snapshot) and xid < pg_snapshot_xmax($3::pg_snapshot) and id > $2
  and pg_visible_in_snapshot(xid, $3::pg_snapshot)
union all
select late.* from pg_snapshot_xip($1::pg_snapshot) as in_progress (xid)
cross join lateral (
    -- Not `xid = in_progress.xid`: with an equality, the planner assumes many matches and scans a whole day.
    select * from pillarbox.log
    where xid >= in_progress.xid and xid <= in_progress.xid and id > (select floor_id from pillarbox.cluster_identity)
    limit $4
) late
where pg_visible_in_snapshot(in_progress.xid, $3::pg_snapshot)
limit $4";
