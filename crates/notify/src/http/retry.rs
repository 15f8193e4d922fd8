//! The retry of one e-mail, notification or announcement by an operator.

use axum::http::StatusCode;
use chrono::TimeDelta;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use runtime::worker::Wake;
use service::idempotency::{StoreResponse, run_once};
use sqlx::{Postgres, Transaction};

use crate::Notify;
use crate::error::Error;
use crate::flow::{announcements, notifications, operator};

/// The row that an operator retries, by its id.
#[derive(Debug, Clone, Copy)]
pub(super) enum Retried {
    Email(i64),
    Notification(i64),
    Announcement(i64),
}

/// Makes it due again, once for each idempotency key, and wakes the worker of this process that processes it. Fails if it does
/// not exist or was not given up.
pub(super) async fn retry(
    notify: &Notify,
    retried: Retried,
    identity: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let retry_time = notify.recorder.retry_time;
    let response = run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            retried.make_due(tx, retry_time).await?;
            Ok(StoredResponse::empty(StatusCode::ACCEPTED))
        })
    })
    .await?;
    if let Some(wake) = retried.wake(notify) {
        wake.wake();
    }
    Ok(response)
}

impl Retried {
    async fn make_due(self, tx: &mut Transaction<'_, Postgres>, retry_time: TimeDelta) -> Result<(), Error> {
        match self {
            Retried::Email(id) => operator::retry(tx, id, retry_time).await,
            Retried::Notification(id) => notifications::retry(tx, id).await,
            Retried::Announcement(id) => announcements::retry(tx, id).await,
        }
    }

    /// None: the worker polls once a second, and continues in steps.
    fn wake(self, notify: &Notify) -> Option<&Wake> {
        match self {
            Retried::Email(_) => Some(&notify.wakes.mails),
            Retried::Notification(_) => Some(&notify.wakes.deliveries),
            Retried::Announcement(_) => None,
        }
    }
}
