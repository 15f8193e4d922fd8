//! Parses times as an operator enters them on the command line.

use chrono::{DateTime, TimeDelta, Utc};
use runtime::duration;

/// Parses an RFC 3339 time, or a duration before now. Fails with the accepted formats.
pub fn parse(text: &str) -> Result<DateTime<Utc>, &'static str> {
    parse_relative_to(text, Utc::now())
}

fn parse_relative_to(text: &str, now: DateTime<Utc>) -> Result<DateTime<Utc>, &'static str> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Ok(time.to_utc());
    }
    let duration = duration::parse(text).and_then(|duration| TimeDelta::from_std(duration).ok());
    duration
        .and_then(|duration| now.checked_sub_signed(duration))
        .ok_or("must be a time such as 2026-01-31T08:00:00Z, or a duration before now such as 30m, 2h or 7d")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_absolute_or_a_duration_before_now() {
        let now = "2026-02-01T12:00:00Z".parse().unwrap();
        for (text, expected) in [
            ("2026-01-31T08:00:00Z", "2026-01-31T08:00:00Z"),
            ("2026-01-31T08:00:00+02:00", "2026-01-31T06:00:00Z"),
            ("90s", "2026-02-01T11:58:30Z"),
            ("30m", "2026-02-01T11:30:00Z"),
            ("2h", "2026-02-01T10:00:00Z"),
            ("7d", "2026-01-25T12:00:00Z"),
        ] {
            assert_eq!(parse_relative_to(text, now), Ok(expected.parse().unwrap()), "{text}");
        }
        for text in ["", "h", "2", "2w", "-2h", "yesterday", "2026-01-31", "2é", "99999999999999999d"] {
            assert!(parse_relative_to(text, now).unwrap_err().contains("2h"), "{text}");
        }
    }
}
