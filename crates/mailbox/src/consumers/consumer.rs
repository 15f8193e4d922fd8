//! The definition of a consumer and its registration.

use sqlx::{Acquire, PgConnection, PgPool};

use super::{leases, positions};
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
    fn as_str(self) -> &'static str {
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
        let is_new = sqlx::query(insert)
            .bind(&self.name)
            .bind(self.kind.as_str())
            .bind(self.filter.included())
            .bind(self.filter.excluded())
            .execute(&mut *tx)
            .await?
            .rows_affected()
            == 1;
        if is_new {
            // Also for a start at the beginning: a dropped consumer of the same name may have left positions.
            let start = match self.start {
                StartAt::Now => now,
                StartAt::Beginning => Snapshot::beginning(&mut tx).await?,
            };
            positions::append_after(&mut tx, &self.name, &start).await?;
        }
        let changed = sqlx::query(
            "update pillarbox.cursor set kind = $2, included = $3, excluded = $4
             where consumer = $1 and (kind, included, excluded) is distinct from ($2, $3, $4)",
        )
        .bind(&self.name)
        .bind(self.kind.as_str())
        .bind(self.filter.included())
        .bind(self.filter.excluded())
        .execute(&mut *tx)
        .await?
        .rows_affected();
        leases::create(&mut tx, &self.name).await?;
        tx.commit().await?;
        if changed > 0 {
            tracing::warn!(
                consumer = self.name,
                "other messages than before are for this consumer, because of its settings or of another version; it does \
                 not read again what it has passed, unless you run `pillarbox replay --consumer {} --from TIME`",
                self.name
            );
        }
        Ok(())
    }
}

/// Returns whether the consumer has lapsed; None if there is no such consumer.
pub(super) async fn is_lapsed(db: &mut PgConnection, consumer: &str) -> sqlx::Result<Option<bool>> {
    let query = "select lapsed_at is not null from pillarbox.cursor where consumer = $1";
    sqlx::query_scalar(query).bind(consumer).fetch_optional(db).await
}
