//! The sender: claims due e-mails, sends them, and saves the results.
//!
//! No transaction is open during a transfer. A claim is a lease: the e-mails of a process that ends become due again when
//! it expires. So an e-mail is sent again if its process ends after the server has accepted it and before that is saved.
//!
//! A transfer is a separate task. If a round is given up, because the database does not respond, its transfers end
//! normally, and the next round saves their results.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use pillarbox::database::{Database, cluster_identity};
use runtime::backoff::Backoff;
use runtime::boot_time::BootTime;
use runtime::worker::Round;
use tokio::sync::{Mutex, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::compose::Sender;
use crate::domain::{Attempt, AttemptResult, ClaimedMail, Status};
use crate::error::SendingError;
use crate::smtp::SmtpClient;
use crate::store;

/// A round claims no more e-mails after this time, so that the worker can stop.
const CLAIM_TIME_MAX: Duration = Duration::from_secs(2);
/// How long a process that stops waits for a transfer. The e-mail of an abandoned one is sent again by another process,
/// with the same Message-ID.
const STOP_TIME_MAX: Duration = Duration::from_secs(3);

/// No process sends an e-mail that is due for longer: its sender would have claimed it.
const OVERDUE_TIME: TimeDelta = TimeDelta::minutes(1);

/// Whether e-mails wait that no process sends. In a copy of the database, nothing is sent anyway.
pub(crate) async fn has_overdue(db: &Database) -> Result<bool, SendingError> {
    let mut db = db.acquire().await?;
    Ok(!cluster_identity::is_restored(&mut db).await? && store::is_overdue(&mut db, OVERDUE_TIME).await?)
}

/// The sender of one process.
pub(crate) struct MailSender {
    db: Database,
    outgoing: Outgoing,
    stop: CancellationToken,
    work: Mutex<Work>,
}

/// How e-mails are sent.
#[derive(Clone)]
pub(crate) struct Outgoing {
    pub(crate) client: Arc<SmtpClient>,
    pub(crate) sender: Sender,
    pub(crate) backoff: Backoff,
    /// The room for concurrent transfers.
    pub(crate) slots: Arc<Semaphore>,
    /// The number of claimed e-mails: more than there are slots, so that no slot waits for the database.
    pub(crate) claimed_max: usize,
    /// A transfer that has not begun within this time after its claim is left to the next owner of the claim.
    pub(crate) lease_time: Duration,
}

#[derive(Default)]
struct Work {
    in_flight: JoinSet<Option<FinishedAttempt>>,
    unsaved: Vec<FinishedAttempt>,
    /// Why the server cannot be used, without personal data; None if it accepted the sender of the last attempt.
    server_failure: Option<String>,
}

struct FinishedAttempt {
    result: AttemptResult,
    template: String,
    kind: AttemptKind,
    /// Why the server cannot be used, without personal data.
    server_failure: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
enum AttemptKind {
    Accepted,
    Deferred,
    Refused,
    Server,
    Expired,
}

impl MailSender {
    pub(crate) fn new(db: Database, outgoing: Outgoing, stop: CancellationToken) -> MailSender {
        MailSender { db, outgoing, stop, work: Mutex::default() }
    }

    /// Sends the e-mails that are due, many at a time. Fails if the server cannot be used; then only one e-mail was tried.
    pub(crate) async fn round(&self) -> Result<Round, SendingError> {
        // A copy of the database must not send what the original sends.
        if cluster_identity::is_restored(&mut *self.db.acquire().await?).await? {
            return Ok(Round::Idle);
        }
        let work = &mut *self.work.lock().await;
        let (started, mut has_claimed, mut may_be_more) = (Instant::now(), false, true);
        loop {
            self.save(work).await?;
            // A server that failed is tried with one e-mail at a time.
            let limit = if work.server_failure.is_some() { 1 } else { self.outgoing.claimed_max };
            let free = limit.saturating_sub(work.in_flight.len());
            // Many at a time, while enough of those that were claimed before wait for a slot.
            let is_worthwhile = free * 4 >= limit;
            if may_be_more
                && free > 0
                && is_worthwhile
                && started.elapsed() < CLAIM_TIME_MAX
                && !self.stop.is_cancelled()
            {
                let claimed = self.claim(work, free).await?;
                may_be_more = claimed == free;
                has_claimed |= claimed > 0;
            }
            let first = tokio::select! {
                finished = work.in_flight.join_next() => finished,
                () = self.stopped_for_long() => None,
            };
            let Some(first) = first else { break };
            let mut finished = vec![first];
            while let Some(next) = work.in_flight.try_join_next() {
                finished.push(next);
            }
            for attempt in finished {
                work.finish(attempt);
            }
            may_be_more &= work.server_failure.is_none();
        }
        self.save(work).await?;
        if !has_claimed {
            self.outgoing.client.close_idle();
            return Ok(Round::Idle);
        }
        match &work.server_failure {
            Some(error) => Err(SendingError::Server(error.clone())),
            None => Ok(Round::Busy),
        }
    }

    /// Waits until the process has been stopping for some time.
    async fn stopped_for_long(&self) {
        self.stop.cancelled().await;
        tokio::time::sleep(STOP_TIME_MAX).await;
    }

    /// Claims e-mails and begins their transfers. Returns how many were claimed.
    async fn claim(&self, work: &mut Work, limit: usize) -> Result<usize, SendingError> {
        let latest_start = BootTime::now() + self.outgoing.lease_time;
        let lease = self.outgoing.lease_time + self.outgoing.client.send_time_max();
        let claimed = store::claim(&mut *self.db.acquire().await?, limit, lease).await?;
        let count = claimed.len();
        for mail in claimed {
            let outgoing = self.outgoing.clone();
            work.in_flight.spawn(async move { outgoing.attempt(&mail, latest_start).await });
        }
        Ok(count)
    }

    /// Saves the results of attempts. If that fails, they are saved by the next round.
    async fn save(&self, work: &mut Work) -> Result<(), SendingError> {
        if work.unsaved.is_empty() {
            return Ok(());
        }
        let results: Vec<AttemptResult> = work.unsaved.iter().map(|attempt| attempt.result.clone()).collect();
        let changed = store::save_results(&mut *self.db.acquire().await?, &results).await?;
        let changed: HashSet<i64> = changed.into_iter().collect();
        for attempt in work.unsaved.drain(..).filter(|attempt| changed.contains(&attempt.result.id)) {
            attempt.report();
        }
        Ok(())
    }
}

impl Outgoing {
    /// Tries to send an e-mail when there is room. Returns None if its lease may have expired by then: transfers take very
    /// long, or the process was suspended.
    async fn attempt(&self, mail: &ClaimedMail, latest_start: BootTime) -> Option<FinishedAttempt> {
        let _slot = self.slots.acquire().await.ok()?;
        let attempt = if mail.is_expired() {
            Attempt::Expired
        } else {
            match self.sender.compose(mail) {
                Err(error) => Attempt::Refused(error.to_string()),
                Ok(_) if BootTime::now() >= latest_start => return None,
                Ok(composed) => self.client.send(&composed).await,
            }
        };
        let kind = AttemptKind::from(&attempt);
        let server_failure = match &attempt {
            Attempt::ServerFailed(failure) => Some(failure.summary.clone()),
            Attempt::Accepted(_) | Attempt::Deferred(_) | Attempt::Refused(_) | Attempt::Expired => None,
        };
        let result = mail.after(attempt, self.backoff, rand::random());
        Some(FinishedAttempt { result, template: mail.template.clone(), kind, server_failure })
    }
}

impl Work {
    fn finish(&mut self, attempt: Result<Option<FinishedAttempt>, tokio::task::JoinError>) {
        match attempt {
            Ok(Some(attempt)) => {
                match attempt.kind {
                    AttemptKind::Server => self.server_failure.clone_from(&attempt.server_failure),
                    AttemptKind::Accepted | AttemptKind::Deferred | AttemptKind::Refused => self.server_failure = None,
                    AttemptKind::Expired => {}
                }
                self.unsaved.push(attempt);
            }
            Ok(None) => tracing::debug!("the lease of an e-mail expired before it was sent; it is sent later"),
            Err(error) => tracing::error!(%error, "sending an e-mail failed; it is sent again when its lease expires"),
        }
    }
}

impl From<&Attempt> for AttemptKind {
    fn from(attempt: &Attempt) -> AttemptKind {
        match attempt {
            Attempt::Accepted(_) => AttemptKind::Accepted,
            Attempt::Deferred(_) => AttemptKind::Deferred,
            Attempt::Refused(_) => AttemptKind::Refused,
            Attempt::ServerFailed(_) => AttemptKind::Server,
            Attempt::Expired => AttemptKind::Expired,
        }
    }
}

impl FinishedAttempt {
    /// Counts the attempt. Neither the address nor the server's reply is logged: both are personal data.
    fn report(self) {
        match self.kind {
            AttemptKind::Accepted => metrics::counter!("pillarbox_mail_sent_total").increment(1),
            AttemptKind::Deferred | AttemptKind::Refused | AttemptKind::Server => {
                let kind = <&str>::from(self.kind);
                metrics::counter!("pillarbox_mail_failures_total", "kind" => kind).increment(1);
            }
            AttemptKind::Expired => {}
        }
        if self.result.status == Status::Dead {
            metrics::counter!("pillarbox_mail_dead_total").increment(1);
            let kind = <&str>::from(self.kind);
            tracing::warn!(
                mail = self.result.id,
                template = self.template,
                kind,
                "an e-mail is dead; GET /admin/v1/mail?status=dead shows the reason"
            );
        }
    }
}
