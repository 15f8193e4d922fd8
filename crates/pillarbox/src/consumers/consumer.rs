//! The definition of a consumer and its registration.

use sqlx::{Acquire, PgConnection, PgPool};

use super::{filter_changes, leases, positions};
use crate::log::{Filter, Snapshot};

/// Where a new consumer starts to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartAt {
    /// With the oldest message that the log has.
    Beginning,
    /// With the messages that are posted from its registration on.
    Now,
}

/// What a consumer does with messages. Shown to operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsumerKind {
    /// Publishes them to an exchange.
    Relay,
    /// Acts in this database.
    Handler,
}

/// A named reader of the log.
#[derive(Debug, Clone)]
pub struct Consumer {
    /// Its progress is stored under this name.
    pub name: String,
    /// What it does with messages.
    pub kind: ConsumerKind,
    /// Which messages it reads.
    pub filter: Filter,
    /// Where it starts when it is new.
    pub start: StartAt,
}

impl ConsumerKind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            ConsumerKind::Relay => "relay",
            ConsumerKind::Handler => "handler",
        }
    }
}

impl Consumer {
    /// Creates the cursor and the leases of the consumer. An existing cursor keeps its positions; its kind and filter are
    /// updated. Fails only if the database does, and then has created nothing.
    pub async fn register(&self, db: &PgPool) -> sqlx::Result<()> {
        let mut db = db.acquire().await?;
        let now = Snapshot::now(&mut db).await?;
        let mut tx = db.begin().await?;
        let is_new = self.insert(&mut tx).await?;
        if is_new {
            let start = match self.start {
                StartAt::Now => now,
                StartAt::Beginning => Snapshot::beginning(&mut tx).await?,
            };
            self.start_at(&mut tx, &start).await?;
        }
        let has_changed = !is_new && filter_changes::record(&mut tx, self).await?;
        let update = "update pillarbox.cursor set kind = $2, included = $3, excluded = $4
                      where consumer = $1 and (kind, included, excluded) is distinct from ($2, $3, $4)";
        self.bind(sqlx::query(update)).execute(&mut *tx).await?;
        leases::create(&mut tx, &self.name).await?;
        tx.commit().await?;
        if has_changed {
            self.log_change();
        }
        Ok(())
    }

    /// Registers these consumers, and starts them now, unless the database has a consumer of their kind. Fails only if the
    /// database does, and then has created nothing.
    pub async fn register_first(db: &PgPool, kind: ConsumerKind, consumers: &[Consumer]) -> sqlx::Result<()> {
        let mut db = db.acquire().await?;
        if has_consumer_of(&mut db, kind).await? {
            return Ok(());
        }
        let now = Snapshot::now(&mut db).await?;
        let mut tx = db.begin().await?;
        // Processes may start at the same time: the second one must find all consumers of the first one.
        sqlx::query("lock table pillarbox.cursor in share row exclusive mode").execute(&mut *tx).await?;
        if has_consumer_of(&mut tx, kind).await? {
            return Ok(());
        }
        for consumer in consumers {
            consumer.insert(&mut tx).await?;
            consumer.start_at(&mut tx, &now).await?;
            leases::create(&mut tx, &consumer.name).await?;
        }
        tx.commit().await
    }

    /// Creates the cursor. Returns whether it is new.
    async fn insert(&self, db: &mut PgConnection) -> sqlx::Result<bool> {
        let insert = "insert into pillarbox.cursor (consumer, kind, included, excluded) values ($1, $2, $3, $4)
                      on conflict (consumer) do nothing";
        Ok(self.bind(sqlx::query(insert)).execute(db).await?.rows_affected() == 1)
    }

    /// Sets the positions of a new cursor. A dropped consumer of the same name may have left positions.
    async fn start_at(&self, db: &mut PgConnection, start: &Snapshot) -> sqlx::Result<()> {
        positions::append_after(db, &self.name, start).await?;
        filter_changes::delete(db, &self.name).await
    }

    fn bind<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        let query = query.bind(&self.name).bind(self.kind.as_str());
        query.bind(self.filter.included()).bind(self.filter.excluded())
    }

    fn log_change(&self) {
        match self.kind {
            ConsumerKind::Relay => tracing::warn!(
                consumer = self.name,
                "other messages than before are for this route, because of its settings or of another version; those that \
                 it has passed, and that another route may not have published, are published by a replay"
            ),
            ConsumerKind::Handler => tracing::warn!(
                consumer = self.name,
                "other messages than before are for this consumer, because of its settings or of another version; it does \
                 not read again what it has passed, unless you run `pillarbox replay --consumer {} --from TIME`",
                self.name
            ),
        }
    }
}

async fn has_consumer_of(db: &mut PgConnection, kind: ConsumerKind) -> sqlx::Result<bool> {
    let query = "select exists (select from pillarbox.cursor where kind = $1)";
    sqlx::query_scalar(query).bind(kind.as_str()).fetch_one(db).await
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

/// What a shard worker must know about the state of its consumer.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConsumerState {
    pub(super) is_lapsed: bool,
    /// Its filter has changed, and a replay is needed that is not requested yet.
    pub(super) needs_replay: bool,
}

/// Returns the state of the consumer; None if there is no such consumer.
pub(super) async fn state(db: &mut PgConnection, consumer: &str) -> sqlx::Result<Option<ConsumerState>> {
    let query = "select lapsed_at is not null,
                        exists (select from pillarbox.filter_change
                                where filter_change.consumer = cursor.consumer and replay_from is not null)
                 from pillarbox.cursor where consumer = $1";
    let found: Option<(bool, bool)> = sqlx::query_as(query).bind(consumer).fetch_optional(db).await?;
    Ok(found.map(|(is_lapsed, needs_replay)| ConsumerState { is_lapsed, needs_replay }))
}
