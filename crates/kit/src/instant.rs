//! Times as callers give them: such as every part of the house can keep, add to and show.

use chrono::{DateTime, Datelike, Utc};
use serde::{Deserialize, Deserializer};

/// What is wrong with a time, if anything: what it takes.
pub fn check(time: DateTime<Utc>) -> Result<DateTime<Utc>, &'static str> {
    // A leap second is 60 here, and the next minute in PostgreSQL.
    let is_leap_second = time.timestamp_subsec_nanos() >= 1_000_000_000;
    match (1970..=9999).contains(&time.year()) && !is_leap_second {
        true => Ok(time),
        false => Err("takes a time from 1970 to 9999, without a leap second"),
    }
}

/// In place of what a parser says, which names neither the field's form nor an example.
const TAKES: &str = "takes a time such as 2026-01-31T08:00:00Z";

/// For `#[serde(deserialize_with)]`.
pub fn required<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DateTime<Utc>, D::Error> {
    let time = DateTime::deserialize(deserializer).map_err(|_| serde::de::Error::custom(TAKES))?;
    check(time).map_err(serde::de::Error::custom)
}

/// For `#[serde(default, deserialize_with)]`.
pub fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    let time = Option::<DateTime<Utc>>::deserialize(deserializer).map_err(|_| serde::de::Error::custom(TAKES))?;
    time.map(check).transpose().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_kept_or_shown_is_refused() {
        let checked = |text: &str| check(text.parse().unwrap());
        assert!(checked("2027-01-01T00:00:59.999999Z").is_ok() && checked("9999-12-31T23:59:59Z").is_ok());
        for bad in
            ["-9999-01-01T00:00:00Z", "+262142-12-31T23:59:59Z", "2027-01-01T00:00:60Z", "9999-12-31T23:59:59-01:00"]
        {
            assert!(checked(bad).is_err(), "{bad}");
        }
    }
}
