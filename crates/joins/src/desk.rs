//! Where requests wait for each other: many orders, of many events, in one transaction, each answered when it has
//! committed.
//!
//! There are some desks, and an event always goes to the same one of a process. So orders of one event are followed in the
//! order in which they came, and one event whose lock is held elsewhere keeps only its own desk waiting.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use kit::batch::{Batcher, Failure, Handler, Limits};
use kit::clock::Clock;
use kit::idempotency::{Answer, Identity};
use kit::problem::Problem;
use mailbox::database::{lies_in_the_values, problem};
use mailbox::idempotency::{Answers, KeepError};
use mailbox::own::OwnConnection;
use mailbox::watch::Watcher;
use sqlx::{PgPool, Postgres, Transaction};
use uuid::Uuid;

use crate::domain::{Order, Outcome, Refused};
use crate::error::Error;
use crate::flow::ledger::Ledger;
use crate::view::{BanView, RegistrationView};

const DESKS: usize = 4;
/// How often a batch is tried that meets keys which others use at the same moment.
const TRIES: u32 = 3;
const LIMITS: Limits = Limits::new(500, 5_000);

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) order: Order,
    pub(crate) identity: Identity,
}

/// All of a process's.
#[derive(Clone)]
pub(crate) struct Desks(Arc<[Batcher<Desk>]>);

pub(crate) struct Desk {
    db: OwnConnection,
    clock: Clock,
    watcher: Watcher,
}

impl Desks {
    /// The desks, and the loop that works for them, which ends when the last copy of them is dropped.
    pub(crate) fn new(
        db: &PgPool,
        clock: &Clock,
        watcher: &Watcher,
    ) -> (Desks, impl Future<Output = ()> + Send + use<>) {
        let desk = || Desk { db: OwnConnection::new(db.clone()), clock: clock.clone(), watcher: watcher.clone() };
        let (desks, loops): (Vec<_>, Vec<_>) = (0..DESKS).map(|_| Batcher::new(desk(), LIMITS)).unzip();
        (Desks(desks.into()), async { drop(futures_util::future::join_all(loops).await) })
    }

    pub(crate) async fn submit(&self, request: Request) -> Result<Answer, Problem> {
        match self.at(request.order.event_id).submit(request).await {
            Ok(answered) => answered,
            Err(refused) => Err(refused.into_problem(Problem::clone)),
        }
    }

    fn at(&self, event_id: Uuid) -> &Batcher<Desk> {
        // The last bytes of an id are random, whoever made it.
        &self.0[(event_id.as_u128() % self.0.len() as u128) as usize]
    }
}

impl Handler for Desk {
    type Item = Request;
    type Answer = Result<Answer, Problem>;
    type Error = Problem;

    async fn run(&self, requests: &[Request]) -> Result<Vec<Self::Answer>, Failure<Problem>> {
        for _ in 0..TRIES {
            let whole = |error: sqlx::Error| Failure::Whole(problem(&error));
            let mut db = self.db.hold().await.map_err(whole)?;
            let settled = self.settle(db.begin().await.map_err(whole)?, requests).await;
            db.put_back(&settled).await;
            match settled {
                Ok(answered) => return Ok(answered),
                // Who took the key has committed by now, so the next look sees what it was used for.
                Err(Unsettled::KeyTaken) => {}
                Err(Unsettled::Failed(failure)) => return Err(failure),
            }
        }
        let detail = "this Idempotency-Key is used for another request at this moment";
        Err(Failure::Item(Problem::conflict("still-running", detail).retry_after(Duration::from_secs(1))))
    }
}

enum Unsettled {
    KeyTaken,
    Failed(Failure<Problem>),
}

impl From<sqlx::Error> for Unsettled {
    fn from(error: sqlx::Error) -> Unsettled {
        Unsettled::Failed(Failure::Whole(problem(&error)))
    }
}

impl Desk {
    async fn settle(
        &self,
        mut tx: Transaction<'_, Postgres>,
        requests: &[Request],
    ) -> Result<Vec<Result<Answer, Problem>>, Unsettled> {
        let now = self.clock.now();
        let mut ledger = Ledger::open(&mut tx, requests.iter().map(|request| &request.order)).await?;
        // Under the events' locks: who repeats a request that is still running waits there, and then sees its answer.
        let mut answers = Answers::look(&mut tx, requests.iter().map(|request| &request.identity), now).await?;
        let mut answered = Vec::with_capacity(requests.len());
        for Request { order, identity } in requests {
            if let Some(again) = answers.given(identity) {
                answered.push(again);
                continue;
            }
            let first = ledger.apply(order, now);
            let may_pass = first.as_ref().is_err_and(Refused::may_pass);
            let first = first.map(answer).map_err(Problem::from);
            match &first {
                // The next try is another, under the same key, too.
                Err(_) if may_pass => {}
                Ok(answer) => answers.give(identity, answer),
                Err(refused) => answers.give(identity, &Answer::refusal(refused)),
            }
            answered.push(first);
        }
        let posted = ledger.close(&mut tx).await.map_err(|error| Unsettled::Failed(failure(error)))?;
        answers.keep(&mut tx, now).await.map_err(|error| match error {
            KeepError::Taken => Unsettled::KeyTaken,
            KeepError::Database(error) => error.into(),
        })?;
        tx.commit().await?;
        if posted {
            self.watcher.nudge();
        }
        metrics::counter!("pillarbox_joins_orders_total").increment(requests.len() as u64);
        metrics::histogram!("pillarbox_joins_batch_size").record(requests.len() as f64);
        Ok(answered)
    }
}

/// What is wrong with the values is wrong with one of the orders.
fn failure(error: Error) -> Failure<Problem> {
    match matches!(&error, Error::Database(cause) if lies_in_the_values(cause)) {
        true => Failure::Item(error.into()),
        false => Failure::Whole(error.into()),
    }
}

fn answer(outcome: Outcome) -> Answer {
    match outcome {
        Outcome::Joined(entry, position) => {
            Answer::json(StatusCode::CREATED, &RegistrationView::new(entry, position.map(i64::from)))
        }
        Outcome::In(entry) | Outcome::Canceled(entry) | Outcome::Kicked(entry) => {
            Answer::json(StatusCode::OK, &RegistrationView::new(entry, None))
        }
        Outcome::Banned(ban) => Answer::json(StatusCode::OK, &BanView::from(ban)),
        Outcome::Unbanned | Outcome::Learned(_) | Outcome::Recounted(_) | Outcome::Swept => {
            Answer::empty(StatusCode::NO_CONTENT)
        }
    }
}
