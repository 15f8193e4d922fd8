//! Reads the messages of replays.
//!
//! A replay of run 0 repairs: messages that are in the inbox are skipped. A replay with a new run repeats all messages.
//! The owner of a shard reads a replay between its live batches, so a key is never processed in two places. A replay
//! covers the messages that the consumer has already read; it gets the others anyway. A binary search finds the bounds
//! of the time range ([`crate::log::time_search`]), so the cost depends on the range and not on the size of the log.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{FromRow, PgConnection, Row};

use crate::log::{Filter, Message, Position, time_search};

/// One shard of an unfinished replay.
#[derive(Debug, Clone)]
pub(super) struct ReplayShard {
    pub(super) replay: i64,
    pub(super) run: i32,
    pub(super) shard: i16,
    from: DateTime<Utc>,
    to: DateTime<Utc>,
    /// The last id that the replay has read in this shard; 0 before the first read.
    last_id: i64,
    /// No message of the range has this id or a higher one. None: not determined yet, or the log ends within the range.
    until_id: Option<i64>,
    /// The former filter of the consumer, if the replay skips what it matches: what it includes and what it excludes.
    former: Option<(String, Option<String>)>,
    pub(super) done: bool,
}

/// Returns the unfinished replays of these shards, oldest first.
pub(super) async fn unfinished(
    db: &mut PgConnection,
    consumer: &str,
    shards: &[i16],
) -> sqlx::Result<Vec<ReplayShard>> {
    sqlx::query_as(
        "select replay.id, run, shard, from_at, to_at, last_id, until_id, former_included, former_excluded
         from pillarbox.replay join pillarbox.replay_shard on replay_shard.replay = replay.id
         where consumer = $1 and shard = any($2) and not done order by replay.id, shard",
    )
    .bind(consumer)
    .bind(shards)
    .fetch_all(db)
    .await
}

impl FromRow<'_, PgRow> for ReplayShard {
    fn from_row(row: &PgRow) -> sqlx::Result<ReplayShard> {
        let included: Option<String> = row.try_get("former_included")?;
        let excluded = row.try_get("former_excluded")?;
        Ok(ReplayShard {
            replay: row.try_get("id")?,
            run: row.try_get("run")?,
            shard: row.try_get("shard")?,
            from: row.try_get("from_at")?,
            to: row.try_get("to_at")?,
            last_id: row.try_get("last_id")?,
            until_id: row.try_get("until_id")?,
            former: included.map(|included| (included, excluded)),
            done: false,
        })
    }
}

impl ReplayShard {
    /// Reads the next messages and advances past them. `position` is how far the consumer has read the shard live.
    pub(super) async fn read(
        &mut self,
        db: &mut PgConnection,
        filter: &Filter,
        position: &Position,
        limit: u32,
    ) -> sqlx::Result<Vec<Message>> {
        if self.last_id == 0 {
            self.last_id = (time_search::first_since(db, self.shard, self.from).await? - 1).max(0);
        }
        if self.until_id.is_none() {
            self.until_id = time_search::first_after(db, self.shard, self.to).await?;
        }
        let rows = sqlx::query(
            "select *, pillarbox.subject(source, topic, aggregate_type) ~ $6
                       and ($7::text is null or pillarbox.subject(source, topic, aggregate_type) !~ $7)
                       and ($13::text is null or pillarbox.subject(source, topic, aggregate_type) !~ $13
                            or pillarbox.subject(source, topic, aggregate_type) ~ $14) is true as matches
             from pillarbox.log
             where shard = $1 and id > $2 and id < $11 and at >= $3 and at < $4
               and exists (select from pillarbox.replay_shard as active where active.replay = $12 and active.shard = $1)
               and (id <= (select floor_id from pillarbox.cluster_identity)
                    or pg_visible_in_snapshot(xid, $5::text::pg_snapshot)
                    or (id <= $9 and pg_visible_in_snapshot(xid, $10::text::pg_snapshot)))
             order by id limit $8",
        )
        .bind(self.shard)
        .bind(self.last_id)
        .bind(self.from)
        .bind(self.to)
        .bind(&position.old.visible)
        .bind(filter.included())
        .bind(filter.excluded())
        .bind(i64::from(limit))
        // In a window that is still open, the messages up to the last id have also been read.
        .bind(position.last_id)
        .bind(&position.new.visible)
        .bind(self.until_id.unwrap_or(i64::MAX))
        // The row of the shard is deleted when an operator cancels the replay.
        .bind(self.replay)
        .bind(self.former.as_ref().map(|(included, _)| included))
        .bind(self.former.as_ref().and_then(|(_, excluded)| excluded.as_ref()))
        .fetch_all(db)
        .await?;
        let mut messages = Vec::new();
        for row in &rows {
            self.last_id = row.try_get("id")?;
            if row.try_get("matches")? {
                messages.push(Message::from_log_row(row)?);
            }
        }
        self.done = rows.len() < limit as usize;
        Ok(messages)
    }

    /// Saves the progress.
    pub(super) async fn save(&self, tx: &mut PgConnection) -> sqlx::Result<()> {
        let query =
            "update pillarbox.replay_shard set last_id = $3, until_id = $4, done = $5 where replay = $1 and shard = $2";
        sqlx::query(query)
            .bind(self.replay)
            .bind(self.shard)
            .bind(self.last_id)
            .bind(self.until_id)
            .bind(self.done)
            .execute(tx)
            .await
            .map(drop)
    }
}
