//! Limits on passwords and e-mails.

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::Identity;
use crate::error::Error;
use crate::store::throttle::{self as store, Subject};

/// Failed sign-ins for an address.
pub(super) const LOGIN_ACCOUNT: &str = "login.account";
/// Requests for e-mails to an address.
pub(super) const EMAIL_ACCOUNT: &str = "email.account";
/// Wrong passwords of a user who is signed in.
pub(super) const CONFIRM_USER: &str = "confirm.user";

/// The subjects of a sign-in: the account, whether it exists or not, and the network. A network from which the user has
/// signed in before has a separate count, so that failures elsewhere do not lock the user out there.
pub(super) fn login_subjects(identity: &Identity, email: &str, network: &[u8; 32], is_known: bool) -> [Subject; 2] {
    let [account, of_network] = identity.settings.login_limits();
    let digest = if is_known { identity.digests.of_email_in(email, network) } else { identity.digests.of_email(email) };
    [
        Subject { kind: LOGIN_ACCOUNT, digest, limit: account },
        Subject { kind: "login.network", digest: *network, limit: of_network },
    ]
}

/// The subject of a password that a signed-in user confirms: the user alone. A thief with a copied token can change networks,
/// and a user who mistypes must not lock out others in the same network.
pub(super) fn confirmation_subject(identity: &Identity, user: Uuid) -> [Subject; 1] {
    let [limit, _] = identity.settings.login_limits();
    [Subject { kind: CONFIRM_USER, digest: identity.digests.of_user(user), limit }]
}

/// The subjects of a request that may cause an e-mail: the address, whether it has an account or not, and the network. As for
/// sign-ins, a known network has a separate count, so that requests elsewhere do not keep the user from resetting a password.
pub(super) fn email_subjects(identity: &Identity, email: &str, network: &[u8; 32], is_known: bool) -> [Subject; 2] {
    let [account, of_network] = identity.settings.email_limits();
    let digest = if is_known { identity.digests.of_email_in(email, network) } else { identity.digests.of_email(email) };
    [
        Subject { kind: EMAIL_ACCOUNT, digest, limit: account },
        Subject { kind: "email.network", digest: *network, limit: of_network },
    ]
}

/// Fails if one of the limits is reached.
pub(super) async fn check<const COUNT: usize>(
    db: &mut PgConnection,
    subjects: &[Subject; COUNT],
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let attempts = store::read(db, subjects, now).await?;
    let waits = subjects.iter().zip(attempts).filter_map(|(subject, attempts)| subject.limit.wait(attempts, now));
    match waits.max() {
        None => Ok(()),
        Some(wait) => {
            let limit = subjects.first().map_or("", |subject| subject.kind);
            metrics::counter!("pillarbox_identity_throttled_total", "limit" => limit).increment(1);
            Err(Error::TooManyAttempts(wait))
        }
    }
}

/// Counts an attempt. Always in the order of the subjects, so that two transactions cannot deadlock.
async fn count(db: &mut PgConnection, subjects: &[Subject], now: DateTime<Utc>) -> Result<(), Error> {
    for subject in subjects.iter().filter(|subject| subject.limit.attempts_max > 0) {
        store::count(db, subject, now).await?;
    }
    Ok(())
}

/// Counts an attempt, unless one of the limits is reached. Attempts of one subject are counted one after the other, so no
/// number of concurrent requests exceeds the limit.
pub(super) async fn count_if_allowed<const COUNT: usize>(
    db: &mut PgConnection,
    subjects: &[Subject; COUNT],
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
