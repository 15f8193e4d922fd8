//! A shard worker and the watcher across a failover: each protection alone. There is no database here.

use sqlx::postgres::PgPoolOptions;

use super::*;
use crate::consumers::{ConsumerKind, StartAt};
use crate::log::{Filter, Snapshot};
use runtime::backoff::Backoff;

struct Nothing;

impl Processor for Nothing {
    async fn process(&mut self, _: &WorkerContext, items: &[&Delivery]) -> Result<BatchResult, ConsumerError> {
        Ok(BatchResult { outcomes: vec![Outcome::Done; items.len()], tx: None })
    }
}

/// A worker whose pool fails with every use, and its watcher, which has a snapshot of this incarnation.
async fn worker(incarnation: Uuid) -> (ShardWorker<Nothing>, Watcher) {
    let pool = PgPoolOptions::new().connect_lazy("postgres://role@127.0.0.1:1/nothing").unwrap();
    pool.close().await;
    let db = Database::new(pool);
    let watcher = Watcher::new(db.readers().clone(), db.invalidations().clone());
    let (at, incarnation) = (chrono::DateTime::UNIX_EPOCH, incarnation.into());
    watcher.assume_newest(Snapshot { id_before: 9, visible: "9:9:".to_owned(), at, incarnation });
    let consumer = Consumer {
        name: "test".to_owned(),
        kind: ConsumerKind::Handler,
        filter: Filter::everything(),
        start: StartAt::Beginning,
    };
    let retry = RetryPolicy { retries: None, backoff: Backoff::new(Duration::ZERO, Duration::ZERO) };
    let options = ShardWorkerOptions { batch: 1, retry, in_log_order: false };
    let replica = Arc::new(Replica::new("test", Duration::from_secs(60)));
    let worker = ShardWorker::new(&db, consumer, options, replica, watcher.clone(), Clock::system(), Nothing);
    (worker, watcher)
}

#[tokio::test]
async fn a_worker_follows_no_snapshot_of_another_incarnation_than_that_in_which_it_is_registered() {
    for (registered_in, is_followed) in [(Some(Uuid::max()), true), (Some(Uuid::nil()), false), (None, false)] {
        let (mut worker, watcher) = worker(Uuid::max()).await;
        worker.registered_in = registered_in.map(Incarnation::from);
        let before = watcher.invalidations();
        let processed = worker.process_live().await;
        if is_followed {
            assert!(matches!(processed, Ok(false)), "it has no shards, so there is nothing to read");
        } else {
            assert!(matches!(processed, Err(ConsumerError::Invalidated)), "{registered_in:?}");
            assert!(worker.registered_in.is_none() && watcher.newest().is_none(), "it joins again");
        }
        assert_eq!(watcher.invalidations() - before, u64::from(!is_followed));
    }
}

#[tokio::test]
async fn after_a_lost_connection_no_worker_follows_the_last_snapshot_and_nothing_else_is_dropped() {
    let (mut worker, watcher) = worker(Uuid::max()).await;
    let before = watcher.invalidations();
    assert!(matches!(worker.round().await, Err(ConsumerError::Database(sqlx::Error::PoolClosed))));
    assert!(watcher.newest().is_none(), "the watcher's own connection may fail much later");
    assert_eq!(watcher.invalidations(), before, "only another incarnation means that transactions may be lost");
}

#[tokio::test]
async fn an_error_of_a_statement_drops_no_snapshot() {
    let (_, watcher) = worker(Uuid::max()).await;
    let replica = Arc::new(Replica::new("test", Duration::from_secs(60)));
    let assignment = leases::ShardAssignment::new("test", replica, watcher.clone());
    assignment.report_error(&sqlx::Error::RowNotFound);
    assert!(watcher.newest().is_some());
    assignment.report_error(&sqlx::Error::PoolTimedOut);
    assert!(watcher.newest().is_none());
}
