//! The stored positions of consumers: appended, and the newest row wins.

use std::collections::BTreeMap;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{PgConnection, PgExecutor, Postgres, Row};
use uuid::Uuid;

use crate::database::Incarnation;
use crate::log::{LogRef, Position, SHARDS, Snapshot};

/// Loads the newest positions of these shards. A shard without one starts at the beginning.
pub(super) async fn load(
    db: &mut PgConnection,
    consumer: &str,
    shards: &[i16],
) -> sqlx::Result<BTreeMap<i16, Position>> {
    let rows = sqlx::query(
        "select shard, old_id, old::text as old, old_at, new_id, new::text as new, new_at, last_id
         from unnest($2::smallint[]) as shard cross join lateral pillarbox.latest_position($1, shard)",
    )
    .bind(consumer)
    .bind(shards)
    .fetch_all(&mut *db)
    .await?;
    let beginning = Snapshot::beginning(db).await?;
    // The rows have survived whatever has happened to the database, so they are valid in its current incarnation.
    let incarnation = beginning.incarnation;
    let mut positions: BTreeMap<i16, Position> =
        shards.iter().map(|shard| (*shard, Position::after(beginning.clone()))).collect();
    for row in rows {
        let old = snapshot_of(&row, ["old_id", "old", "old_at"], incarnation)?;
        let new = snapshot_of(&row, ["new_id", "new", "new_at"], incarnation)?;
        positions.insert(row.try_get("shard")?, Position { old, new, last_id: row.try_get("last_id")? });
    }
    Ok(positions)
}

fn snapshot_of(row: &PgRow, [id, visible, at]: [&str; 3], incarnation: Incarnation) -> sqlx::Result<Snapshot> {
    Ok(Snapshot { id_before: row.try_get(id)?, visible: row.try_get(visible)?, at: row.try_get(at)?, incarnation })
}

/// Saves new positions: one row for each window, which most often is one row for all shards. Returns false if a position is
/// ahead of the database; then the caller must roll back, because other positions may be saved already.
///
/// A database that crashed may have lost the transactions of a snapshot and assigns their ids again: a position with that
/// snapshot would skip the messages of the new transactions. The fence of the worker is lost with them; a writer
/// without a fence is refused by the database itself.
pub(super) async fn append(
    db: &mut PgConnection,
    consumer: &str,
    positions: &BTreeMap<i16, Position>,
) -> sqlx::Result<bool> {
    for ((old, new), (shards, last_ids)) in by_window(positions) {
        let query =
            "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
             select $1, $2, $3, $4::pg_snapshot, $5, $6, $7::pg_snapshot, $8, $9
             where pg_snapshot_xmax($7::pg_snapshot) <= pg_snapshot_xmax(pg_current_snapshot())";
        let saved = bind(sqlx::query(query).bind(consumer), old, new, shards, last_ids).execute(&mut *db).await?;
        if saved.rows_affected() == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Saves positions after a snapshot that was just taken, for all shards. Fails if it was taken from a database that has
/// lost transactions since.
pub(crate) async fn append_after(db: &mut PgConnection, consumer: &str, snapshot: &Snapshot) -> sqlx::Result<()> {
    let positions = (0..SHARDS).map(|shard| (shard, Position::after(snapshot.clone()))).collect();
    if !append(db, consumer, &positions).await? {
        return Err(sqlx::Error::Protocol("the database has lost transactions since the snapshot; try again".into()));
    }
    Ok(())
}

/// The result of [`lock_and_append`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SingleSave {
    Saved,
    /// Nothing was saved: the worker has lost its lease, or the positions are ahead of the database.
    Refused,
    /// Nothing was saved, because the positions are not in a single window.
    SeveralWindows,
}

/// Locks the shard worker's row and saves new positions of a single window, in one statement. Positions without effects
/// need not be `durable`: if they are lost, messages are processed again.
pub(super) async fn lock_and_append(
    db: impl PgExecutor<'_>,
    consumer: &str,
    owner: Uuid,
    positions: &BTreeMap<i16, Position>,
    durable: bool,
) -> sqlx::Result<SingleSave> {
    let mut windows = by_window(positions).into_iter();
    let (Some(((old, new), (shards, last_ids))), None) = (windows.next(), windows.next()) else {
        return Ok(SingleSave::SeveralWindows);
    };
    let query = "with locked as (
                     select case when not $11 then set_config('synchronous_commit', 'off', true) end
                     from pillarbox.shard_worker where consumer = $1 and owner = $10 for key share)
                 insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
                 select $1, $2, $3, $4::pg_snapshot, $5, $6, $7::pg_snapshot, $8, $9 from locked
                 where pg_snapshot_xmax($7::pg_snapshot) <= pg_snapshot_xmax(pg_current_snapshot())";
    let query = bind(sqlx::query(query).bind(consumer), old, new, shards, last_ids).bind(owner).bind(durable);
    Ok(match query.execute(db).await?.rows_affected() {
        0 => SingleSave::Refused,
        _ => SingleSave::Saved,
    })
}

/// The two snapshots of a window.
type Bounds<'a> = (&'a Snapshot, &'a Snapshot);
/// A window with its shards and the last id that was read in each.
type WindowShards<'a> = (Bounds<'a>, (Vec<i16>, Vec<i64>));

fn by_window(positions: &BTreeMap<i16, Position>) -> Vec<WindowShards<'_>> {
    let mut windows = BTreeMap::<Bounds<'_>, (Vec<i16>, Vec<i64>)>::new();
    for (shard, position) in positions {
        let (shards, last_ids) = windows.entry((&position.old, &position.new)).or_default();
        shards.push(*shard);
        last_ids.push(position.last_id);
    }
    windows.into_iter().collect()
}

type Query<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

fn bind<'q>(query: Query<'q>, old: &'q Snapshot, new: &'q Snapshot, shards: Vec<i16>, last_ids: Vec<i64>) -> Query<'q> {
    let query = query.bind(shards).bind(last_ids);
    let query = query.bind(&old.visible).bind(old.id_before).bind(old.at);
    query.bind(&new.visible).bind(new.id_before).bind(new.at)
}

/// Whether all of these consumers have passed these messages. Lapsed consumers have given their messages up, so they do not
/// count. False if none of the consumers exists.
pub async fn have_passed(db: &mut PgConnection, consumers: &[String], messages: &[LogRef]) -> sqlx::Result<bool> {
    let query = "with latest as materialized (
            select shard, latest.* from pillarbox.cursor
            cross join (select distinct shard from unnest($2::smallint[]) as shard) as shards
            cross join lateral pillarbox.latest_position(cursor.consumer, shard) as latest
            where cursor.consumer = any ($1) and lapsed_at is null
        )
        select coalesce(bool_and(pg_visible_in_snapshot(log.xid, latest.old)
                                 or (pg_visible_in_snapshot(log.xid, latest.new) and log.id <= latest.last_id)), false)
        from unnest($2::smallint[], $3::bigint[], $4::timestamptz[]) as message (shard, id, at)
        join pillarbox.log on log.shard = message.shard and log.id = message.id and log.at = message.at
        join latest on latest.shard = log.shard";
    sqlx::query_scalar(query)
        .bind(consumers)
        .bind(messages.iter().map(|message| message.shard).collect::<Vec<_>>())
        .bind(messages.iter().map(|message| message.id).collect::<Vec<_>>())
        .bind(messages.iter().map(|message| message.at).collect::<Vec<_>>())
        .fetch_one(db)
        .await
}
