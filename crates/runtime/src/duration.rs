//! Durations as text: a number with its unit, such as `90s`, `30m`, `2h` or `7d`. Settings, options and commands read them
//! in the same way. Where a plain number is accepted as well, its unit is the one that the setting or option names.

use std::time::Duration;

/// The unit of a duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Millisecond,
    Second,
    Minute,
    Hour,
    Day,
}

impl Unit {
    /// Returns the unit in the name of a setting, such as `lease_ms` or `token_hours_max`; None if the setting is not a
    /// duration.
    #[cfg(any(feature = "settings", test))]
    pub(crate) fn in_name(setting: &str) -> Option<Unit> {
        setting.split('_').skip(1).find_map(|word| match word {
            "ms" => Some(Unit::Millisecond),
            "seconds" => Some(Unit::Second),
            "minutes" => Some(Unit::Minute),
            "hours" => Some(Unit::Hour),
            "days" => Some(Unit::Day),
            _ => None,
        })
    }

    fn millis(self) -> u64 {
        match self {
            Unit::Millisecond => 1,
            Unit::Second => 1_000,
            Unit::Minute => 60 * 1_000,
            Unit::Hour => 60 * 60 * 1_000,
            Unit::Day => 24 * 60 * 60 * 1_000,
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Unit::Millisecond => "milliseconds",
            Unit::Second => "seconds",
            Unit::Minute => "minutes",
            Unit::Hour => "hours",
            Unit::Day => "days",
        }
    }
}

/// Parses a number with its unit: `ms`, `s`, `m`, `h` or `d`. Returns None for any other text.
pub fn parse(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (count, unit) = text.split_at(digits);
    let unit = match unit {
        "ms" => Unit::Millisecond,
        "s" => Unit::Second,
        "m" => Unit::Minute,
        "h" => Unit::Hour,
        "d" => Unit::Day,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(unit.millis()).map(Duration::from_millis)
}

/// A text that is not a duration in whole units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a whole number of {}, or a duration such as {}", .unit.plural(), example(*.unit))]
pub struct InvalidDuration {
    unit: Unit,
}

/// Parses a duration and returns it as a number of `unit`. A number without a unit is one already. Fails with the
/// accepted values, also for a duration that is not a whole number of `unit`.
pub fn in_unit(text: &str, unit: Unit) -> Result<u64, InvalidDuration> {
    let text = text.trim();
    if let Ok(count) = text.parse() {
        return Ok(count);
    }
    let whole = parse(text).and_then(|duration| {
        let millis = u64::try_from(duration.as_millis()).ok()?;
        millis.is_multiple_of(unit.millis()).then_some(millis / unit.millis())
    });
    whole.ok_or(InvalidDuration { unit })
}

fn example(unit: Unit) -> &'static str {
    match unit {
        Unit::Millisecond => "500ms, 15s or 2m",
        Unit::Second => "90s, 30m or 1h",
        Unit::Minute => "30m, 2h or 1d",
        Unit::Hour => "12h or 2d",
        Unit::Day => "7d",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_number_and_a_unit() {
        for (text, millis) in [("500ms", 500), ("90s", 90_000), ("30m", 1_800_000), ("2h", 7_200_000), ("0d", 0)] {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "2", "2w", "-2h", "1.5h", "2 h", "2H", "2é", "99999999999999999d"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_plain_number_has_the_unit_of_its_setting() {
        assert_eq!(in_unit("15000", Unit::Millisecond), Ok(15_000));
        assert_eq!(in_unit(" 15s ", Unit::Millisecond), Ok(15_000));
        assert_eq!(in_unit("1h", Unit::Second), Ok(3_600));
        assert_eq!(in_unit("2d", Unit::Hour), Ok(48));
        for (text, unit) in [("soon", Unit::Second), ("1500ms", Unit::Second), ("12h", Unit::Day), ("-1", Unit::Day)] {
            assert!(in_unit(text, unit).unwrap_err().to_string().starts_with("must be a whole number of "), "{text}");
        }
    }

    #[test]
    fn the_name_of_a_setting_contains_its_unit() {
        for (name, unit) in [
            ("lease_ms", Some(Unit::Millisecond)),
            ("trending_seconds", Some(Unit::Second)),
            ("reconcile_minutes", Some(Unit::Minute)),
            ("token_hours_max", Some(Unit::Hour)),
            ("log_days", Some(Unit::Day)),
            ("pool_max", None),
            ("days", None),
        ] {
            assert_eq!(Unit::in_name(name), unit, "{name}");
        }
    }
}
