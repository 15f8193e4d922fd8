//! Limits on sign-ins and e-mails.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;

use crate::Identity;
use crate::error::Error;
use crate::store::throttle::{self as store, Subject};

/// The subjects of a sign-in: the account, whether it exists or not, and the network. A network from which the user has
/// signed in before has a count of its own, so that failures elsewhere do not lock the user out there.
pub(super) fn login_subjects(identity: &Identity, email: &str, network: &[u8; 32], is_known: bool) -> [Subject; 2] {
    let [account, of_network] = identity.settings.login_limits();
    let digest = match is_known {
        true => identity.digests.of_email_in(email, network),
        false => identity.digests.of_email(email),
    };
    [
        Subject { kind: "login.account", digest, limit: account },
        Subject { kind: "login.network", digest: *network, limit: of_network },
    ]
}

/// The subjects of a request that may cause an e-mail: the address, whether it has an account or not, and the network.
pub(super) fn email_subjects(identity: &Identity, email: &str, network: &[u8; 32]) -> [Subject; 2] {
    let [account, of_network] = identity.settings.email_limits();
    [
        Subject { kind: "email.account", digest: identity.digests.of_email(email), limit: account },
        Subject { kind: "email.network", digest: *network, limit: of_network },
    ]
}

/// Fails if one of the limits is reached.
pub(super) async fn check(db: &mut PgConnection, subjects: &[Subject; 2], now: DateTime<Utc>) -> Result<(), Error> {
    let attempts = store::read(db, subjects, now).await?;
    let waits = subjects.iter().zip(attempts).filter_map(|(subject, attempts)| subject.limit.wait(attempts, now));
    match waits.max() {
        None => Ok(()),
        Some(wait) => {
            metrics::counter!("pillarbox_identity_throttled_total", "limit" => subjects[0].kind).increment(1);
            Err(Error::TooManyAttempts(wait))
        }
    }
}

/// Counts an attempt. Always in the order of the subjects, so that two transactions cannot deadlock.
async fn count(db: &mut PgConnection, subjects: &[Subject; 2], now: DateTime<Utc>) -> Result<(), Error> {
    for subject in subjects.iter().filter(|subject| subject.limit.attempts_max > 0) {
        store::count(db, subject, now).await?;
    }
    Ok(())
}

/// Counts an attempt, unless one of the limits is reached. Attempts of one subject are counted one after the other, so no
/// number of concurrent requests exceeds the limit.
pub(super) async fn count_if_allowed(
    db: &mut PgConnection,
    subjects: &[Subject; 2],
    now: DateTime<Utc>,
) -> Result<(), Error> {
    check(&mut *db, subjects, now).await?;
    count(&mut *db, subjects, now).await?;
    // Another request may have been counted between the check and the count, which waited for it.
    let attempts = store::read(db, subjects, now).await?;
    for (subject, mut attempts) in subjects.iter().zip(attempts) {
        attempts.current = attempts.current.saturating_sub(1);
        if let Some(wait) = subject.limit.wait(attempts, now) {
            return Err(Error::TooManyAttempts(wait));
        }
    }
    Ok(())
}
