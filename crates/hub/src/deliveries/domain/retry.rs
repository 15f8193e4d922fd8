//! The meaning of a response, and when a failed message is retried: named schedules, and the rules of a subscriber by status.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use runtime::backoff::lengthen;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The classes of statuses that have rules. A delivered message (2xx) is not retried, and a 1xx status precedes the response.
const CLASSES: std::ops::RangeInclusive<u16> = 3..=5;

/// A list of pauses that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RetrySchedule {
    /// 5 s, 30 s, 5 min: the default.
    Short,
    /// 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 10 h: for receivers that may be down for a night.
    Patient,
}

impl RetrySchedule {
    /// The pauses before the retries, in seconds.
    pub(crate) fn seconds(self) -> &'static [u32] {
        match self {
            RetrySchedule::Short => &[5, 30, 300],
            RetrySchedule::Patient => &[5, 300, 1_800, 7_200, 18_000, 36_000, 36_000],
        }
    }

    /// The schedule with exactly these pauses. None if they have no name.
    pub(crate) fn of(seconds: &[u32]) -> Option<RetrySchedule> {
        [RetrySchedule::Short, RetrySchedule::Patient].into_iter().find(|schedule| schedule.seconds() == seconds)
    }
}

/// The fate of a message after a response that is not 2xx.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RetryAction {
    /// The message is retried by the backoff of its subscriber.
    Retry,
    /// The message becomes a dead letter at once.
    DeadLetter,
    /// The message becomes a dead letter, and its subscriber is switched off.
    Disable,
}

/// A rule names neither a status nor a class of statuses that can have rules.
#[derive(Debug, thiserror::Error)]
#[error("must be a status from 300 to 599, or a class: 3xx, 4xx or 5xx")]
pub(crate) struct InvalidStatusPattern;

/// The statuses that a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) enum StatusPattern {
    /// One status, such as `404`.
    Status(u16),
    /// All statuses with this first digit, such as `4xx`.
    Class(u16),
}

/// The rules of a subscriber. A status has its default if neither it nor its class has a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct RetryRules(BTreeMap<StatusPattern, RetryAction>);

impl RetryRules {
    pub(crate) fn insert(&mut self, pattern: StatusPattern, action: RetryAction) {
        self.0.insert(pattern, action);
    }

    /// The rule of the status itself, or else that of its class.
    fn action(&self, status: u16) -> Option<RetryAction> {
        let class = StatusPattern::Class(status / 100);
        self.0.get(&StatusPattern::Status(status)).or_else(|| self.0.get(&class)).copied()
    }
}

impl StatusPattern {
    /// Whether a rule for it may switch the subscriber off. A whole class may not: one invalid payload would be enough.
    pub(crate) fn may_disable(self) -> bool {
        matches!(self, StatusPattern::Status(400..=499))
    }
}

impl FromStr for StatusPattern {
    type Err = InvalidStatusPattern;

    fn from_str(text: &str) -> Result<StatusPattern, InvalidStatusPattern> {
        let number =
            |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<u16>().ok())?;
        let pattern = match (text.len(), text.strip_suffix("xx")) {
            (3, Some(class)) => number(class).map(StatusPattern::Class),
            (3, None) => number(text).map(StatusPattern::Status),
            _ => None,
        };
        let is_known = |pattern: &StatusPattern| match pattern {
            StatusPattern::Status(status) => CLASSES.contains(&(status / 100)),
            StatusPattern::Class(class) => CLASSES.contains(class),
        };
        pattern.filter(is_known).ok_or(InvalidStatusPattern)
    }
}

impl TryFrom<String> for StatusPattern {
    type Error = InvalidStatusPattern;

    fn try_from(text: String) -> Result<StatusPattern, InvalidStatusPattern> {
        text.parse()
    }
}

impl From<StatusPattern> for String {
    fn from(pattern: StatusPattern) -> String {
        pattern.to_string()
    }
}

impl fmt::Display for StatusPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatusPattern::Status(status) => write!(f, "{status}"),
            StatusPattern::Class(class) => write!(f, "{class}xx"),
        }
    }
}

/// The meaning of the result of an attempt for the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Delivered,
    /// A later attempt may succeed.
    Retry,
    /// A later attempt would also fail.
    Refused,
    /// 410, or another status that switches the subscriber off: the endpoint does not exist any more.
    Gone,
}

/// The verdict for a response; `status` is None if there was none.
pub(crate) fn verdict(status: Option<u16>, rules: &RetryRules) -> Verdict {
    let Some(status) = status else { return Verdict::Retry };
    if (200..=299).contains(&status) {
        return Verdict::Delivered;
    }
    match (rules.action(status), status) {
        (Some(RetryAction::Retry), _) => Verdict::Retry,
        (Some(RetryAction::DeadLetter), _) => Verdict::Refused,
        (Some(RetryAction::Disable), _) => Verdict::Gone,
        (None, 410) => Verdict::Gone,
        (None, 429 | 500..=599) => Verdict::Retry,
        (None, _) => Verdict::Refused,
    }
}

/// Returns the time to wait after this many failures, or None after the last attempt. `schedule` is in seconds.
/// `random`, from 0 to 1, makes the time up to 20 % longer, so that messages that failed together are not retried
/// together.
pub(crate) fn backoff(schedule: &[u32], failures: u32, random: f64) -> Option<Duration> {
    let seconds = *schedule.get(failures.checked_sub(1)? as usize)?;
    Some(lengthen(Duration::from_secs(u64::from(seconds)), random))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> RetryRules {
        serde_json::from_str(text).unwrap()
    }

    fn default_verdict(status: u16) -> Verdict {
        match status {
            200..=299 => Verdict::Delivered,
            410 => Verdict::Gone,
            429 | 500..=599 => Verdict::Retry,
            _ => Verdict::Refused,
        }
    }

    #[test]
    fn every_status_has_its_verdict() {
        for status in 100..=999 {
            assert_eq!(verdict(Some(status), &RetryRules::default()), default_verdict(status), "{status}");
        }
        assert_eq!(verdict(None, &RetryRules::default()), Verdict::Retry);
    }

    #[test]
    fn a_rule_of_a_status_precedes_that_of_its_class_and_both_precede_the_default() {
        let actions = [
            (None, None),
            (Some("retry"), Some(Verdict::Retry)),
            (Some("dead_letter"), Some(Verdict::Refused)),
            (Some("disable"), Some(Verdict::Gone)),
        ];
        // Every status, with every combination of a rule for it and one for its class.
        for status in 100..=999_u16 {
            for (own, own_verdict) in actions {
                for (class, class_verdict) in actions {
                    let mut all = RetryRules::default();
                    for (text, action) in [(status.to_string(), own), (format!("{}xx", status / 100), class)] {
                        if let (Ok(pattern), Some(action)) = (text.parse(), action) {
                            all.insert(pattern, serde_json::from_str(&format!("\"{action}\"")).unwrap());
                        }
                    }
                    let has_rules = (300..=599).contains(&status);
                    let expected = own_verdict.or(class_verdict).filter(|_| has_rules);
                    let expected = expected.unwrap_or(default_verdict(status));
                    assert_eq!(verdict(Some(status), &all), expected, "{status} {own:?} {class:?}");
                }
            }
        }
        let other = rules(r#"{"404":"retry","5xx":"dead_letter"}"#);
        assert_eq!(
            [404, 403, 200, 429].map(|status| verdict(Some(status), &other)),
            [Verdict::Retry, Verdict::Refused, Verdict::Delivered, Verdict::Retry]
        );
        assert_eq!(verdict(None, &other), Verdict::Retry, "no rule is about a missing response");
    }

    #[test]
    fn a_rule_names_a_status_that_is_not_a_delivery_or_its_class() {
        for text in ["300", "404", "599", "3xx", "4xx", "5xx"] {
            assert_eq!(text.parse::<StatusPattern>().unwrap().to_string(), text);
        }
        for text in ["", "200", "2xx", "1xx", "600", "6xx", "4XX", "40x", "xxx", "+40", "0404", "4x", "404 "] {
            assert!(text.parse::<StatusPattern>().is_err(), "{text:?}");
        }
        let disabling = ["400", "410", "499", "399", "503", "4xx"].map(|text| text.parse::<StatusPattern>().unwrap());
        assert_eq!(disabling.map(StatusPattern::may_disable), [true, true, true, false, false, false]);
    }

    #[test]
    fn a_schedule_is_recognised_by_its_pauses() {
        for schedule in [RetrySchedule::Short, RetrySchedule::Patient] {
            assert_eq!(RetrySchedule::of(schedule.seconds()), Some(schedule));
        }
        assert_eq!(RetrySchedule::of(&[5, 30]), None);
        let hours = RetrySchedule::Patient.seconds().iter().sum::<u32>() / 3_600;
        assert_eq!(hours, 27, "longer than a night");
    }

    #[test]
    fn the_fourth_failure_is_the_last() {
        let seconds = |failures| backoff(&[5, 30, 300], failures, 0.0).map(|pause| pause.as_secs());
        assert_eq!([1, 2, 3, 4].map(seconds), [Some(5), Some(30), Some(300), None]);
        assert_eq!(backoff(&[10], 1, 1.0), Some(Duration::from_secs(12)));
        assert_eq!(backoff(&[], 1, 0.0), None);
    }
}
