//! Notifications to users whose contact is not known yet. The message with the contact of a new user may arrive after the first
//! event about the user, and then it makes them due; those that wait cost nothing until then.

use chrono::TimeDelta;
use sqlx::PgConnection;

use crate::error::DeliveryError;
use crate::store::delivery::NotNowCounts;
use crate::store::unreachable::{self as store, ContactTimes};

/// When they are read again, after their creation: once, and then not before they are skipped.
const TIMES: ContactTimes = ContactTimes { second: TimeDelta::minutes(1), last: TimeDelta::hours(1) };
const REASON: &str = "nothing is known about how to reach the user";
/// If there are many of them, so many notifications that are due are searched for others, with one statement: those that can
/// be delivered must not wait for thousands of batches.
const SEARCHED_MAX: i64 = 5_000;

/// Postpones or skips these notifications, whose users had no contact when they were read, and others like them if
/// `are_many`.
pub(super) async fn put_off(
    db: &mut PgConnection,
    unreachable: &[i64],
    are_many: bool,
) -> Result<NotNowCounts, DeliveryError> {
    let locked =
        if are_many { store::lock_first(db, SEARCHED_MAX).await? } else { store::lock(db, unreachable).await? };
    if locked.is_empty() {
        return Ok(NotNowCounts::default());
    }
    Ok(store::put_off(db, &locked, TIMES, REASON).await?)
}
