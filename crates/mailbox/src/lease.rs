//! Who works on which shard.
//!
//! The lanes of a consumer, in all processes, share its shards evenly. A lane lasts while its process beats; whoever takes
//! over from a silent one deletes its row first. Every effect and every position is kept in a transaction that holds the
//! lane's row ([`hold`]): a late owner finds that it is gone, and a taker waits for what is being kept.

use std::collections::BTreeSet;
use std::sync::Arc;

use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::log::SHARDS;
use crate::replica::Replica;

/// A process's part in work that is shared out by shard, but does not read the log.
pub struct Share {
    name: &'static str,
    owner: Uuid,
    replica: Arc<Replica>,
    is_in: bool,
}

impl Share {
    pub(crate) fn new(name: &'static str, replica: Arc<Replica>) -> Share {
        Share { name, owner: Uuid::now_v7(), replica, is_in: false }
    }

    /// How often to look.
    pub fn pause(&self) -> std::time::Duration {
        self.replica.pause()
    }

    /// The shards that are this process's now. None: others have taken over, and it joins again with the next look; what
    /// it held it must forget.
    pub async fn look(&mut self, db: &mut PgConnection) -> sqlx::Result<Option<BTreeSet<i16>>> {
        if !self.is_in {
            self.join(db).await?;
        }
        let held = share_out(db, self.name, self.owner, false).await?;
        self.is_in = held.is_some();
        Ok(held)
    }

    /// What tells a transaction whether it is still this process's turn.
    pub fn fence(&self) -> Fence {
        Fence { name: self.name, owner: self.owner }
    }

    pub async fn leave(&mut self, db: &mut PgConnection) -> sqlx::Result<()> {
        self.is_in = false;
        leave(db, self.name, self.owner).await
    }

    async fn join(&mut self, db: &mut PgConnection) -> sqlx::Result<()> {
        prepare(db, self.name).await?;
        self.replica.beat_on(db).await?;
        leave(db, self.name, self.owner).await?;
        self.owner = Uuid::now_v7();
        join(db, self.name, self.owner, self.replica.id()).await
    }
}

/// Who was in the share-out when it was made.
#[derive(Debug, Clone, Copy)]
pub struct Fence {
    name: &'static str,
    owner: Uuid,
}

impl Fence {
    /// Keeps others from taking over until the transaction ends, which need not wait for the disk; false if they have.
    pub async fn hold(&self, tx: &mut PgConnection) -> sqlx::Result<bool> {
        hold(tx, self.name, self.owner, false).await
    }
}

/// Makes sure that there is something to share out.
pub(crate) async fn prepare(db: &mut PgConnection, consumer: &str) -> sqlx::Result<()> {
    let query = "insert into pillarbox.lease (consumer, shard) select $1, pillarbox.shards()
                 on conflict (consumer, shard) do nothing";
    sqlx::query(query).bind(consumer).execute(db).await.map(drop)
}

/// A lane enters the share-out.
pub(crate) async fn join(db: &mut PgConnection, consumer: &str, owner: Uuid, replica: Uuid) -> sqlx::Result<()> {
    let query = "insert into pillarbox.lane (consumer, owner, replica) values ($1, $2, $3)";
    sqlx::query(query).bind(consumer).bind(owner).bind(replica).execute(db).await.map(drop)
}

/// Takes what is free up to the lane's share and gives up what is above it: an even share, or all for the oldest lane
/// (`undivided`). Returns what it holds; None if the lane is no longer in the share-out.
pub(crate) async fn share_out(
    db: &mut PgConnection,
    consumer: &str,
    owner: Uuid,
    undivided: bool,
) -> sqlx::Result<Option<BTreeSet<i16>>> {
    end_silent(db, consumer, owner).await?;
    let row = sqlx::query(
        "select (select count(*) from pillarbox.lane where consumer = $1) as lanes,
                (select min(owner::text) from pillarbox.lane where consumer = $1) = $2::text as is_oldest,
                exists (select from pillarbox.lane where consumer = $1 and owner = $2) as is_in,
                (select array_agg(shard) from pillarbox.lease where consumer = $1 and owner = $2) as shards",
    )
    .bind(consumer)
    .bind(owner)
    .fetch_one(&mut *db)
    .await?;
    if !row.try_get("is_in")? {
        return Ok(None);
    }
    let lanes = row.try_get::<i64, _>("lanes")?.max(1) as usize;
    let mut mine: Vec<i16> = row.try_get::<Option<Vec<i16>>, _>("shards")?.unwrap_or_default();
    let share = match (undivided, row.try_get::<Option<bool>, _>("is_oldest")?) {
        (false, _) => (SHARDS as usize).div_ceil(lanes),
        (true, Some(true)) => SHARDS as usize,
        (true, Some(false) | None) => 0,
    };
    if mine.len() < share {
        mine.extend(take(db, consumer, owner, (share - mine.len()) as i64).await?);
    } else {
        release(db, consumer, owner, &mine.split_off(share)).await?;
    }
    Ok(Some(mine.into_iter().collect()))
}

/// Ends the other lanes whose process no longer beats. One that is keeping something right now is not silent.
async fn end_silent(db: &mut PgConnection, consumer: &str, owner: Uuid) -> sqlx::Result<()> {
    let ended = sqlx::query(
        "delete from pillarbox.lane where consumer = $1 and owner in (
             select owner from pillarbox.lane as silent
             where consumer = $1 and owner <> $2
               and not exists (select from pillarbox.replica where id = silent.replica and until > now())
             for update skip locked)",
    )
    .bind(consumer)
    .bind(owner)
    .execute(db)
    .await?
    .rows_affected();
    if ended > 0 {
        tracing::warn!(consumer, ended, "a process is silent: others take over what it held");
    }
    Ok(())
}

async fn take(db: &mut PgConnection, consumer: &str, owner: Uuid, count: i64) -> sqlx::Result<Vec<i16>> {
    sqlx::query_scalar(
        "update pillarbox.lease set owner = $2, epoch = epoch + 1
         where consumer = $1 and shard in (
             select shard from pillarbox.lease as free
             where consumer = $1
               and not exists (select from pillarbox.lane where consumer = $1 and lane.owner = free.owner)
             order by random() limit $3 for update skip locked)
         returning shard",
    )
    .bind(consumer)
    .bind(owner)
    .bind(count)
    .fetch_all(db)
    .await
}

async fn release(db: &mut PgConnection, consumer: &str, owner: Uuid, shards: &[i16]) -> sqlx::Result<()> {
    if shards.is_empty() {
        return Ok(());
    }
    let query = "update pillarbox.lease set owner = null where consumer = $1 and owner = $2 and shard = any($3)";
    sqlx::query(query).bind(consumer).bind(owner).bind(shards).execute(db).await.map(drop)
}

/// Leaves the share-out: others take over at once.
pub(crate) async fn leave(db: &mut PgConnection, consumer: &str, owner: Uuid) -> sqlx::Result<()> {
    let query = "delete from pillarbox.lane where consumer = $1 and owner = $2";
    sqlx::query(query).bind(consumer).bind(owner).execute(db).await.map(drop)
}

/// Keeps others from taking over until the transaction ends; false if they already have. A transaction that says only
/// where a reader is need not wait for the disk: if it is lost, something is done again.
pub(crate) async fn hold(tx: &mut PgConnection, consumer: &str, owner: Uuid, durably: bool) -> sqlx::Result<bool> {
    let query = match durably {
        true => "select owner from pillarbox.lane where consumer = $1 and owner = $2 for key share",
        false => {
            "select owner, set_config('synchronous_commit', 'off', true) from pillarbox.lane
             where consumer = $1 and owner = $2 for key share"
        }
    };
    Ok(sqlx::query(query).bind(consumer).bind(owner).fetch_optional(tx).await?.is_some())
}
