//! The signing keys of this installation. Each is derived from the master key and the number of its period of 30 days, so
//! processes that share the master key agree on the keys without exchanging them, and the key changes by itself.
//!
//! A token is signed with the key of its time. Verifiers trust the keys of the previous, the current and the next period:
//! a token of up to 24 hours outlives a change of keys, and clocks need not agree on the moment of the change.

use std::ops::RangeInclusive;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use chrono::{DateTime, Utc};
use ed25519_dalek::{SigningKey, VerifyingKey};

use runtime::secret::MasterKey;

/// The duration of a period, in seconds.
pub(super) const PERIOD_SECONDS: i64 = 30 * 24 * 3600;

/// Returns the number of the period that contains this time.
pub(super) fn period_of(time: DateTime<Utc>) -> i64 {
    time.timestamp().div_euclid(PERIOD_SECONDS)
}

/// Returns the periods whose keys are trusted in this period.
pub(super) fn trusted_periods(period: i64) -> RangeInclusive<i64> {
    period - 1..=period + 1
}

pub(super) fn signing_key(master: &MasterKey, period: i64) -> SigningKey {
    SigningKey::from_bytes(&master.derive(&format!("jwt signing {period}")))
}

/// Returns the `kid` of a key. Different keys have different ids.
pub(super) fn key_id(key: &VerifyingKey) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(&key.as_bytes()[..9])
}
