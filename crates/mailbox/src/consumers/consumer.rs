//! The definition of a consumer and its registration.

use sqlx::{Acquire, PgConnection, PgPool};

use super::{filter_changes, leases, positions};
use crate::log::{Filter, Snapshot};

/// Where a new consumer starts to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartAt {
    Beginning,
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
    pub name: String,
    pub kind: ConsumerKind,
    pub filter: Filter,
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
        let insert = "insert into pillarbox.cursor (consumer, kind, included, excluded) values ($1, $2, $3, $4)
                      on conflict (consumer) do nothing";
        let is_new = self.bind(sqlx::query(insert)).execute(&mut *tx).await?.rows_affected() == 1;
        if is_new {
            // Also for a start at the beginning: a dropped consumer of the same name may have left positions.
            let start = match self.start {
                StartAt::Now => now,
                StartAt::Beginning => Snapshot::beginning(&mut tx).await?,
            };
            positions::append_after(&mut tx, &self.name, &start).await?;
            filter_changes::delete(&mut tx, &self.name).await?;
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
