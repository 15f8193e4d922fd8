//! Checks times that callers send: all parts of the system can store, add to and display the accepted ones.

use chrono::{DateTime, Datelike, Utc};
use runtime::parse_error::EXPECTED_TIME;
use serde::{Deserialize, Deserializer};

/// A time outside of the accepted range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a time from 1970 to 9999, without a leap second")]
pub struct TimeOutOfRange;

/// Returns the time if it is accepted.
pub fn check(time: DateTime<Utc>) -> Result<DateTime<Utc>, TimeOutOfRange> {
    // chrono represents a leap second as second 60, PostgreSQL as the next minute.
    let is_leap_second = time.timestamp_subsec_nanos() >= 1_000_000_000;
    let is_accepted = (1970..=9999).contains(&time.year()) && !is_leap_second;
    is_accepted.then_some(time).ok_or(TimeOutOfRange)
}

/// For `#[serde(deserialize_with)]`.
pub fn required<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DateTime<Utc>, D::Error> {
    let time = DateTime::deserialize(deserializer).map_err(|_| serde::de::Error::custom(EXPECTED_TIME))?;
    check(time).map_err(serde::de::Error::custom)
}

/// For `#[serde(default, deserialize_with)]`.
pub fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let time =
        Option::<DateTime<Utc>>::deserialize(deserializer).map_err(|_| serde::de::Error::custom(EXPECTED_TIME))?;
    time.map(check).transpose().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_cannot_be_stored_or_displayed_are_rejected() {
        let checked = |text: &str| check(text.parse().unwrap());
        assert!(checked("2027-01-01T00:00:59.999999Z").is_ok() && checked("9999-12-31T23:59:59Z").is_ok());
        for bad in
            ["-9999-01-01T00:00:00Z", "+262142-12-31T23:59:59Z", "2027-01-01T00:00:60Z", "9999-12-31T23:59:59-01:00"]
        {
            assert!(checked(bad).is_err(), "{bad}");
        }
    }
}
