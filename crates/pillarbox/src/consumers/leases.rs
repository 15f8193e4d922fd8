//! Leases: which shard worker owns which shard.
//!
//! The shard workers of a consumer, in all processes, divide its shards evenly. A shard worker lives as long as its
//! process sends heartbeats; a process that takes over from an expired one deletes its row first. Every transaction
//! that saves an effect or a position locks the shard worker's row ([`lock`]): a former owner finds that the row is
//! gone. The rows are in an unlogged table, so that they are also gone when the database may have lost transactions. A
//! worker that is committing is not removed, because its row is locked: the next rebalance of another process tries it
//! again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use super::lease_clock::Lease;
use super::replica::Replica;
use crate::database::{Incarnation, is_connection_lost};
use crate::log::{Filter, SHARDS, Watcher};

/// The shards of a process in work that is divided by shard but does not read the log.
pub struct ShardAssignment {
    name: &'static str,
    owner: Uuid,
    replica: Arc<Replica>,
    watcher: Watcher,
    /// The watcher's count of invalidations that the owner of the shards has reacted to.
    invalidations: u64,
    /// The incarnation of the database in which this process joined. None: it has to join.
    joined_in: Option<Incarnation>,
    /// The lease of the shards that the last rebalance returned.
    lease: Lease,
}

impl ShardAssignment {
    pub(super) fn new(name: &'static str, replica: Arc<Replica>, watcher: Watcher) -> ShardAssignment {
        let invalidations = watcher.invalidations();
        let lease = replica.lease();
        ShardAssignment { name, owner: Uuid::now_v7(), replica, watcher, invalidations, joined_in: None, lease }
    }

    /// Returns whether in-memory state has become stale since the last call, because the database restarted or failed
    /// over.
    pub fn consume_invalidation(&mut self) -> bool {
        let current = self.watcher.invalidations();
        std::mem::replace(&mut self.invalidations, current) != current
    }

    /// Returns the incarnation of the database that the shards were claimed in. Nothing that belongs to another one may
    /// be combined with the state of the shards.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.joined_in
    }

    /// Drops the claim, because the database has another incarnation. The caller must drop all state of its shards; the
    /// next rebalance joins again.
    pub fn abandon(&mut self) {
        self.joined_in = None;
        self.watcher.drop_snapshot();
    }

    /// Reports a database error. If a connection was lost, the database may have failed over, and no worker follows
    /// the last snapshot any more.
    pub fn report_error(&self, error: &sqlx::Error) {
        if is_connection_lost(error) {
            self.watcher.drop_snapshot();
        }
    }

    /// Returns how often to call [`ShardAssignment::rebalance`].
    pub fn rebalance_interval(&self) -> Duration {
        self.replica.heartbeat_interval()
    }

    /// Claims or releases shards until this process has its even part, and returns its shards. None: it lost its lease
    /// to another process and must drop all state of its shards; the next call joins again.
    pub async fn rebalance(&mut self, db: &mut PgConnection) -> sqlx::Result<Option<BTreeSet<i16>>> {
        if self.joined_in.is_none() {
            create(db, self.name).await?;
            self.joined_in = Some(join(db, self.name, &mut self.owner, &self.replica, None).await?);
        }
        let lease = self.replica.lease();
        let shards = rebalance(db, self.name, self.owner, &self.replica, false).await?;
        if shards.is_none() {
            self.joined_in = None;
        }
        self.lease = lease;
        Ok(shards)
    }

    /// Returns the id of this process in the work. Each join has a new one; it is that of the row in
    /// `pillarbox.shard_worker`.
    pub fn owner(&self) -> Uuid {
        self.owner
    }

    /// Returns the lease of the shards. While it is valid, no other process sends what belongs to them.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Returns the fence with which a transaction checks that this process still has its lease.
    pub fn fence(&self) -> Fence {
        Fence { name: self.name, owner: self.owner }
    }

    /// Releases all shards at once.
    pub async fn release(&mut self, db: &mut PgConnection) -> sqlx::Result<()> {
        self.joined_in = None;
        remove(db, self.name, self.owner).await
    }
}

/// The owner of some shards at the time when the fence was created.
#[derive(Debug, Clone, Copy)]
pub struct Fence {
    name: &'static str,
    owner: Uuid,
}

impl Fence {
    /// Prevents other processes from taking over until the transaction ends. Returns false if one already has, or if the
    /// database may have lost transactions since the fence was created. The commit does not wait for the disk.
    pub async fn lock(&self, tx: &mut PgConnection) -> sqlx::Result<bool> {
        lock(tx, self.name, self.owner, false).await
    }
}

/// Creates the leases of a consumer, if they do not exist.
pub(super) async fn create(db: &mut PgConnection, consumer: &str) -> sqlx::Result<()> {
    let query = "insert into pillarbox.lease (consumer, shard) select $1, pillarbox.shards()
                 on conflict (consumer, shard) do nothing";
    sqlx::query(query).bind(consumer).execute(db).await.map(drop)
}

/// Adds a shard worker of this process to a consumer, under a new owner id, so that the fence of the old id stays invalid.
/// `filter` is what it reads with, if it reads the log.
/// Returns the incarnation of the database that the worker belongs to: its row is lost when the next one begins.
/// The row of the old id is removed, because it may have been inserted although the response was lost: it would own shards
/// without being read.
pub(super) async fn join(
    db: &mut PgConnection,
    consumer: &str,
    owner: &mut Uuid,
    replica: &Replica,
    filter: Option<&Filter>,
) -> sqlx::Result<Incarnation> {
    let incarnation = Incarnation::current(db).await?;
    replica.heartbeat_on(db).await?;
    remove(db, consumer, *owner).await?;
    *owner = Uuid::now_v7();
    let query = "insert into pillarbox.shard_worker (consumer, owner, replica, filter)
                 values ($1, $2, $3, nullif(md5(concat_ws(E'\\n', $4::text, $5::text)), md5('')))";
    sqlx::query(query)
        .bind(consumer)
        .bind(*owner)
        .bind(replica.id())
        .bind(filter.map(Filter::included))
        .bind(filter.and_then(Filter::excluded))
        .execute(db)
        .await?;
    Ok(incarnation)
}

/// Claims free shards up to the worker's part, and releases shards above it. The part is an even one, or all shards for
/// the oldest worker (`undivided`). Returns the shards that the worker owns; None if it has lost its lease.
pub(super) async fn rebalance(
    db: &mut PgConnection,
    consumer: &str,
    owner: Uuid,
    replica: &Replica,
    undivided: bool,
) -> sqlx::Result<Option<BTreeSet<i16>>> {
    remove_expired(db, consumer, replica).await?;
    let (workers, is_oldest, has_joined, owned): (i64, Option<bool>, bool, Option<Vec<i16>>) = sqlx::query_as(
        "select (select count(*) from pillarbox.shard_worker where consumer = $1) as workers,
                (select min(owner::text) from pillarbox.shard_worker where consumer = $1) = $2::text as is_oldest,
                exists (select from pillarbox.shard_worker where consumer = $1 and owner = $2) as has_joined,
                (select array_agg(shard) from pillarbox.lease where consumer = $1 and owner = $2) as shards",
    )
    .bind(consumer)
    .bind(owner)
    .fetch_one(&mut *db)
    .await?;
    if !has_joined {
        return Ok(None);
    }
    let mut owned = owned.unwrap_or_default();
    let part = if !undivided {
        (SHARDS as usize).div_ceil(workers.max(1) as usize)
    } else if is_oldest == Some(true) {
        SHARDS as usize
    } else {
        0
    };
    if owned.len() < part {
        owned.extend(claim(db, consumer, owner, replica, (part - owned.len()) as i64).await?);
    } else {
        release(db, consumer, owner, &owned.split_off(part)).await?;
    }
    Ok(Some(owned.into_iter().collect()))
}

/// Removes the shard workers of other processes that no longer send heartbeats, except those that are committing right now.
/// The workers of this process live as long as it does, however late its own heartbeat is.
async fn remove_expired(db: &mut PgConnection, consumer: &str, replica: &Replica) -> sqlx::Result<()> {
    let removed = sqlx::query(
        "delete from pillarbox.shard_worker where consumer = $1 and owner in (
             select owner from pillarbox.shard_worker as expired
             where consumer = $1 and replica <> $2
               and not exists (select from pillarbox.replica where id = expired.replica and until > now())
             for update skip locked)",
    )
    .bind(consumer)
    .bind(replica.id())
    .execute(db)
    .await?
    .rows_affected();
    if removed > 0 {
        tracing::warn!(consumer, removed, "the lease of another process expired; its shards are taken over");
    }
    Ok(())
}

/// Claims up to `count` shards without an owner.
///
/// After a crash or a failover the rows of all workers are gone, but a process that has not noticed it may still send what it
/// holds, until its lease ends. So a shard that had an owner is claimed only after the time of a lease, unless every other
/// live process has registered again for this consumer.
///
/// A worker that joins while this statement runs is not in its snapshot, but the lock of a shard finds the row as that worker
/// has just claimed it: the shard would seem to have an owner that is gone, and both workers would own it. So a shard is
/// claimed only if its epoch is still that of the snapshot.
async fn claim(
    db: &mut PgConnection,
    consumer: &str,
    owner: Uuid,
    replica: &Replica,
    count: i64,
) -> sqlx::Result<Vec<i16>> {
    sqlx::query_scalar(
        "with seen as materialized (select shard, epoch from pillarbox.lease where consumer = $1)
         update pillarbox.lease set owner = $2, epoch = epoch + 1
         where consumer = $1 and shard in (
             select shard from pillarbox.lease as free
             where consumer = $1
               and epoch = (select epoch from seen where seen.shard = free.shard)
               and not exists (select from pillarbox.shard_worker
                               where consumer = $1 and shard_worker.owner = free.owner)
               and (free.owner is null
                    or exists (select from pillarbox.incarnation where since + $4 * interval '1 millisecond' <= now())
                    or not exists (
                        select from pillarbox.replica as other
                        where other.until > now() and other.id <> $5
                          and not exists (select from pillarbox.shard_worker
                                          where consumer = $1 and shard_worker.replica = other.id)))
             order by random() limit $3 for update skip locked)
         returning shard",
    )
    .bind(consumer)
    .bind(owner)
    .bind(count)
    .bind(replica.lease_time().as_millis() as i64)
    .bind(replica.id())
    .fetch_all(db)
    .await
}

/// Whether a process may still work on shards of this consumer although it has no row: the rows of all workers are lost in a
/// crash or a failover, and a process that has not sent a heartbeat since then may not have noticed it.
pub async fn has_unknown_workers(db: &mut PgConnection, consumer: &str, lease_time: Duration) -> sqlx::Result<bool> {
    let query = "select exists (
                     select from pillarbox.replica cross join pillarbox.incarnation
                     where replica.until > now() and replica.until <= since + $2 * interval '1 millisecond'
                       and not exists (select from pillarbox.shard_worker
                                       where shard_worker.consumer = $1 and shard_worker.replica = replica.id))";
    sqlx::query_scalar(query).bind(consumer).bind(lease_time.as_millis() as i64).fetch_one(db).await
}

/// Returns which of these owners are workers of the consumer, and whether they are live: their process sends heartbeats.
pub async fn existing_workers(
    db: &mut PgConnection,
    consumer: &str,
    owners: &[Uuid],
) -> sqlx::Result<Vec<(Uuid, bool)>> {
    let query = "select owner, exists (select from pillarbox.replica where id = shard_worker.replica and until > now())
                 from pillarbox.shard_worker where consumer = $1 and owner = any($2)";
    sqlx::query_as(query).bind(consumer).bind(owners).fetch_all(db).await
}

async fn release(db: &mut PgConnection, consumer: &str, owner: Uuid, shards: &[i16]) -> sqlx::Result<()> {
    if shards.is_empty() {
        return Ok(());
    }
    let query = "update pillarbox.lease set owner = null where consumer = $1 and owner = $2 and shard = any($3)";
    sqlx::query(query).bind(consumer).bind(owner).bind(shards).execute(db).await.map(drop)
}

/// Removes a shard worker. Its shards are free at once.
pub(super) async fn remove(db: &mut PgConnection, consumer: &str, owner: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox.shard_worker where consumer = $1 and owner = $2";
    sqlx::query(query).bind(consumer).bind(owner).execute(db).await.map(drop)
}

/// Prevents other processes from taking over until the transaction ends. Returns false if one already has. A
/// transaction that saves only positions need not be `durable`: if it is lost, messages are processed again.
pub(super) async fn lock(tx: &mut PgConnection, consumer: &str, owner: Uuid, durable: bool) -> sqlx::Result<bool> {
    let query = if durable {
        "select owner from pillarbox.shard_worker where consumer = $1 and owner = $2 for key share"
    } else {
        "select owner, set_config('synchronous_commit', 'off', true) from pillarbox.shard_worker
         where consumer = $1 and owner = $2 for key share"
    };
    Ok(sqlx::query(query).bind(consumer).bind(owner).fetch_optional(tx).await?.is_some())
}
