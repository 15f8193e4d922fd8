//! Taking events: many requests in one transaction, each answered when it has committed.

use contracts::EventId;
use http::StatusCode;
use kit::batch::{Failure, Handler, Limits};
use kit::clock::Clock;
use kit::idempotency::{Answer, Identity};
use kit::problem::Problem;
use mailbox::database::{lies_in_the_values, problem};
use mailbox::idempotency::{Entered, enter_all};
use mailbox::own::{Held, OwnConnection};
use mailbox::post::{Post, PostError, post_all, post_alone};
use mailbox::watch::Watcher;
use serde::Serialize;
use sqlx::{Postgres, Transaction};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::fanout::SOURCE;

/// What one transaction takes, and what waits for its own: by weight, 5,000 events or 16 MB, and 64 MB.
pub(crate) const LIMITS: Limits = Limits::new(5_000, 20_000);
/// As much as an event weighs.
const BYTES: usize = 16 * 1024 * 1024 / 5_000;
/// However small it is, a request costs an answer, and a look for its idempotency key.
const REQUEST: usize = 10;

/// A request: one event, or some that belong together.
#[derive(Debug)]
pub(crate) struct Taking {
    pub(crate) events: Vec<Post>,
    pub(crate) is_batch: bool,
    pub(crate) identity: Option<Identity>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Accepted {
    #[schema(value_type = String, example = "evt_0190163d-8694-739b-aea5-966c26f8ad91")]
    pub(crate) event_id: EventId,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AllAccepted {
    /// In the order of the request.
    #[schema(value_type = Vec<String>)]
    pub(crate) event_ids: Vec<EventId>,
}

/// Posts what was gathered.
pub(crate) struct Ingest {
    pub(crate) db: OwnConnection,
    pub(crate) clock: Clock,
    pub(crate) watcher: Watcher,
}

impl Taking {
    /// The same ids each time it is tried.
    pub(crate) fn new(mut events: Vec<Post>, is_batch: bool, identity: Option<Identity>) -> Taking {
        events.iter_mut().for_each(|event| event.id = Some(Uuid::now_v7()));
        Taking { events, is_batch, identity }
    }

    fn weight(&self) -> usize {
        let bytes: usize = self.events.iter().map(|event| event.payload.get().len()).sum();
        self.events.len().max(bytes / BYTES).max(REQUEST)
    }

    fn answer(&self) -> Answer {
        let mut ids = self.events.iter().filter_map(|event| event.id).map(EventId);
        match self.is_batch {
            true => Answer::json(StatusCode::ACCEPTED, &AllAccepted { event_ids: ids.collect() }),
            false => {
                let event_id = ids.next().unwrap_or(EventId(Uuid::nil()));
                Answer::json(StatusCode::ACCEPTED, &Accepted { event_id })
            }
        }
    }
}

impl Handler for Ingest {
    type Item = Taking;
    type Answer = Result<Answer, Problem>;
    type Error = Problem;

    async fn run(&self, items: &[Taking]) -> Result<Vec<Self::Answer>, Failure<Problem>> {
        let whole = |error: sqlx::Error| Failure::Whole(problem(&error));
        let mut db = self.db.hold().await.map_err(whole)?;
        let taken = match items.iter().any(|item| item.identity.is_some()) {
            true => self.take(db.begin().await.map_err(whole)?, items).await,
            false => take_unkeyed(&mut db, items).await,
        };
        db.put_back(&taken).await;
        let (answers, posted) = taken.map_err(|Untaken(failure)| failure)?;
        if posted > 0 {
            self.watcher.nudge();
            metrics::counter!("eventhub_events_received_total").increment(posted);
        }
        Ok(answers)
    }

    fn weight(item: &Taking) -> usize {
        item.weight()
    }
}

struct Untaken(Failure<Problem>);

impl From<sqlx::Error> for Untaken {
    fn from(error: sqlx::Error) -> Untaken {
        Untaken(Failure::Whole(problem(&error)))
    }
}

impl From<PostError> for Untaken {
    fn from(error: PostError) -> Untaken {
        match error {
            PostError::Database(error) if lies_in_the_values(&error) => {
                let detail = "PostgreSQL cannot keep this as JSON";
                Untaken(Failure::Item(Problem::bad_request("unfit-event", detail)))
            }
            PostError::Database(error) => error.into(),
            refused @ (PostError::Topic | PostError::Key | PostError::Aggregate | PostError::TooLarge(_)) => {
                Untaken(Failure::Item(Problem::bad_request("unfit-event", refused.to_string())))
            }
        }
    }
}

/// The answers, and how many events were posted.
type Taken = (Vec<Result<Answer, Problem>>, u64);

/// There is nothing but the events to commit. One that is given up may have been: who sends no key accepts that.
async fn take_unkeyed(db: &mut Held<'_>, items: &[Taking]) -> Result<Taken, Untaken> {
    // Before anything is committed: a batch that fails is tried again in parts.
    let answers = items.iter().map(|item| Ok(item.answer())).collect();
    let posted = post_alone(db, &SOURCE, items.iter().flat_map(|item| &item.events)).await?;
    Ok((answers, posted.len() as u64))
}

impl Ingest {
    async fn take(&self, mut tx: Transaction<'_, Postgres>, items: &[Taking]) -> Result<Taken, Untaken> {
        let keyed: Vec<(Identity, Answer)> =
            items.iter().filter_map(|item| Some((item.identity.clone()?, item.answer()))).collect();
        let entered = enter_all(&mut tx, &keyed, self.clock.now()).await;
        let mut entered = entered.map_err(|error| Untaken(Failure::Whole(error)))?.into_iter();
        let (mut posts, mut answers) = (Vec::new(), Vec::with_capacity(items.len()));
        for item in items {
            let first = match item.identity {
                Some(_) => entered.next().unwrap_or(Entered::First),
                None => Entered::First,
            };
            answers.push(match first {
                Entered::First => {
                    posts.extend(&item.events);
                    Ok(item.answer())
                }
                Entered::Again(answer) => Ok(answer),
                Entered::Refused(refused) => Err(refused),
            });
        }
        if !posts.is_empty() {
            post_all(&mut tx, &SOURCE, posts.iter().copied()).await?;
        }
        tx.commit().await?;
        Ok((answers, posts.len() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::value::RawValue;

    #[test]
    fn a_request_weighs_by_its_events_and_its_bytes() {
        let event = |bytes: usize| {
            let payload = RawValue::from_string(format!("\"{}\"", "x".repeat(bytes - 2)));
            Post::new("t", payload.unwrap())
        };
        let weight = |events: usize, bytes: usize| {
            Taking::new((0..events).map(|_| event(bytes)).collect(), events > 1, None).weight()
        };
        assert_eq!(LIMITS.batch_max / weight(1, 100), 500, "small ones: as many as answers are worth waiting for");
        assert_eq!(weight(1_000, 100), 1_000);
        assert_eq!(LIMITS.batch_max / weight(4, 250_000), 16, "of a megabyte");
        assert_eq!(LIMITS.queue_max / weight(4, 250_000), 67);
    }
}
