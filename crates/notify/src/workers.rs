//! Background tasks. Every process with the role runs them; row locks in the database distribute the e-mails.

use std::sync::Arc;
use std::time::Duration;

use pillarbox::database::Database;
use runtime::worker::{Round, RoundLimits, Wake, Worker};
use tokio::sync::Mutex;

use crate::domain::policy::Policy;
use crate::error::{DeliveryError, EventError, SendingError};
use crate::flow;
use crate::flow::delivery::{Deliverer, DeliveryRound};
use crate::flow::inbox::{InboxStreams, WatchState};
use crate::flow::sending::{MailSender, Outgoing};

/// The wake-ups of the workers of this process. They also poll, for what other processes have committed.
#[derive(Clone, Default)]
pub(crate) struct Wakes {
    pub(crate) mails: Wake,
    pub(crate) deliveries: Wake,
    pub(crate) streams: Wake,
}

impl Wakes {
    /// The wake-ups after new notifications.
    pub(crate) fn of_notifications(&self) -> [Wake; 2] {
        [self.deliveries.clone(), self.streams.clone()]
    }
}

/// A round claims e-mails for some seconds and then waits for the last transfers.
pub(crate) fn sender_limits(outgoing: &Outgoing) -> RoundLimits {
    let slow_after = outgoing.client.send_time_max() + Duration::from_secs(15);
    RoundLimits { slow_after, time_max: slow_after * 2 }
}

/// Sends the e-mails that are due. It fails while the mail server cannot be used, so that readiness reports it.
pub(crate) async fn send(sender: &MailSender) -> Result<Round, SendingError> {
    sender.round().await
}

/// Fails while e-mails are queued that no process sends, so that readiness reports them.
pub(crate) async fn check_overdue(db: &Database, is_shadow: bool) -> Result<Round, SendingError> {
    if !flow::sending::has_overdue(db).await? {
        return Ok(Round::Idle);
    }
    Err(if is_shadow { SendingError::Shadow } else { SendingError::NoServer })
}

/// Notifies people of registrations that have waited for their event, and of announcements, in steps.
pub(crate) async fn announce(db: &Database, policy: &Policy, wakes: &Wakes) -> Result<Round, EventError> {
    // Each of them also runs if the other one fails.
    let (waited, announced) =
        (flow::participants::notify_of_waiting(db, policy).await, flow::announcements::announce_next(db, policy).await);
    let is_busy = [&waited, &announced].iter().any(|round| matches!(round, Ok(Round::Busy)));
    if is_busy {
        wakes.of_notifications().iter().for_each(Wake::wake);
    }
    waited.and(announced).map(|round| if is_busy { Round::Busy } else { round })
}

/// Delivers notifications that are due, and wakes the sender of the e-mails.
pub(crate) async fn deliver(deliverer: &Deliverer, wakes: &Wakes) -> Result<Round, DeliveryError> {
    let DeliveryRound { round, has_mails } = deliverer.round().await?;
    if has_mails {
        wakes.mails.wake();
    }
    Ok(round)
}

/// Notices new notifications for the streams of this process.
pub(crate) async fn watch_streams(worker: Worker, streams: Arc<InboxStreams>) {
    let watched = Mutex::new(WatchState::default());
    worker.run(async || streams.watch(&mut *watched.lock().await).await).await;
}
