//! Background tasks. Every process with the role runs them; row locks in the database distribute the e-mails.

use std::time::Duration;

use kit::worker::{Round, RoundLimits};
use mailbox::database::Database;
use mailbox::operations::maintenance::Retention;

use crate::error::SendingError;
use crate::flow;
use crate::flow::sending::{MailSender, Outgoing};
use crate::settings::MailSettings;

/// A round claims e-mails for some seconds and then waits for the last transfers.
pub(crate) fn sender_limits(outgoing: &Outgoing) -> RoundLimits {
    let slow_after = outgoing.client.send_time_max() + Duration::from_secs(15);
    RoundLimits { slow_after, time_max: slow_after * 2 }
}

/// Sends the e-mails that are due. It fails while the mail server cannot be used, so that readiness reports it.
pub(crate) async fn send(sender: &MailSender) -> Result<Round, SendingError> {
    sender.round().await
}

/// Deletes and erases e-mails after their time.
pub(crate) async fn maintain(db: &Database, settings: &MailSettings, log: Retention) -> Result<Round, sqlx::Error> {
    flow::retention::maintain(db, settings, log).await
}
