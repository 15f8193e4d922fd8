//! Projects: their statuses, what may change, and the finish line.

use chrono::{DateTime, TimeDelta, Utc};
use http_kit::auth::{Caller, Principal};
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use strum::{Display, EnumString, IntoStaticStr};
use utoipa::ToSchema;
use uuid::Uuid;

/// The longest id of a project, in characters.
const PROJECT_ID_CHARS_MAX: usize = 100;
/// The longest id of an item, in characters.
const ITEM_ID_CHARS_MAX: usize = 200;
/// The time after which an item counts for a third in the rate.
pub(crate) const RATE_SECONDS: f64 = 30.0;

/// The status of a project.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, Display, EnumString, IntoStaticStr)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
#[schema(as = ProjectStatus)]
pub(crate) enum Status {
    Initializing,
    /// Items are still being discovered, so the project does not complete.
    Crawling,
    /// All items are known, and some are not done.
    ProcessingWait,
    Processing,
    Done,
    Failed,
}

impl Status {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }

    pub(crate) fn is_final(self) -> bool {
        matches!(self, Status::Done | Status::Failed)
    }
}

/// The counts of a project.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Snapshot {
    #[sqlx(try_from = "&'a str")]
    pub(crate) status: Status,
    /// 0: not known yet.
    pub(crate) total: i64,
    pub(crate) done: i64,
    /// How many of the done items have failed.
    pub(crate) errors: i64,
}

impl Snapshot {
    pub(crate) const INITIAL: Snapshot = Snapshot { status: Status::Initializing, total: 0, done: 0, errors: 0 };

    /// Whether the project is complete. The scripts of Redis and the statements of the store repeat this rule, because it must be
    /// decided together with the change that reaches it.
    #[cfg(test)]
    pub(crate) fn is_at_finish_line(&self) -> bool {
        let may_complete = !matches!(self.status, Status::Crawling | Status::Done | Status::Failed);
        self.total > 0 && self.done >= self.total && may_complete
    }

    pub(crate) fn target(&self) -> Target {
        Target { status: self.status, total: self.total }
    }

    /// The status and the total after a change. Fails if the status does not allow it.
    pub(crate) fn change(&self, change: Change) -> Result<Target, Refused> {
        let status = change.status.unwrap_or(self.status);
        let total = change.total.unwrap_or(self.total);
        let target = Target { status, total };
        if target == self.target() {
            return Ok(target);
        }
        match (self.status, status) {
            // A repeat of the request that has completed the project.
            (Status::Done, Status::Processing | Status::ProcessingWait) if total == self.total => Ok(self.target()),
            (Status::Done | Status::Failed, _) => Err(Refused::Finished(self.status)),
            (from, to) if from == to => Ok(target),
            (_, Status::Crawling | Status::ProcessingWait | Status::Processing | Status::Failed) => Ok(target),
            // A project begins as INITIALIZING, and becomes DONE by its items.
            (from, to @ (Status::Initializing | Status::Done)) => Err(Refused::Transition { from, to }),
        }
    }
}

/// The status and the total that a change leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) status: Status,
    pub(crate) total: i64,
}

/// The change that a caller asks for. `None`: as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) status: Option<Status>,
    pub(crate) total: Option<i64>,
}

/// The reason why a change is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("the project is {0}, which is final: create another project for further items")]
    Finished(Status),
    #[error(
        "a project that is {from} cannot be set to {to}: set CRAWLING, PROCESSING_WAIT, PROCESSING or FAILED; it becomes DONE \
         when all its items are done"
    )]
    Transition { from: Status, to: Status },
}

/// The rate at which items are counted, as an exponentially decaying average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rate {
    /// Items per second at `at`, as if the project had always existed.
    pub(crate) value: f64,
    pub(crate) at: DateTime<Utc>,
    /// When the first item was counted.
    pub(crate) since: DateTime<Utc>,
}

#[derive(sqlx::FromRow)]
pub(crate) struct RateColumns {
    rate: Option<f64>,
    rate_at: Option<DateTime<Utc>>,
    rate_since: Option<DateTime<Utc>>,
}

impl From<RateColumns> for Option<Rate> {
    fn from(columns: RateColumns) -> Option<Rate> {
        Some(Rate { value: columns.rate?, at: columns.rate_at?, since: columns.rate_since? })
    }
}

impl Rate {
    /// Items per second.
    pub(crate) fn per_second(&self, now: DateTime<Utc>) -> f64 {
        let seconds = |from: DateTime<Utc>| (now - from).as_seconds_f64().max(0.0);
        let decayed = self.value * (-seconds(self.at) / RATE_SECONDS).exp();
        // The share of the average that the time since the first item covers.
        let covered = 1.0 - (-seconds(self.since).max(1.0) / RATE_SECONDS).exp();
        decayed / covered
    }
}

/// The estimated time of completion; `None` if it is not known.
pub(crate) fn estimated_end(snapshot: &Snapshot, per_second: f64, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
    let rest = snapshot.total - snapshot.done;
    if snapshot.status.is_final() || rest <= 0 || per_second < 0.001 {
        return None;
    }
    // Bounded, so that the time can be represented.
    let seconds = (rest as f64 / per_second).min(1e10);
    now.checked_add_signed(TimeDelta::milliseconds((seconds * 1e3) as i64))
}

/// A project as PostgreSQL has it. The counts of an unfinished one are elsewhere.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct Project {
    pub(crate) id: String,
    #[sqlx(try_from = "String")]
    pub(crate) tenant: Tenant,
    pub(crate) owner: String,
    /// Identifies the initialisation of the counts.
    pub(crate) token: Uuid,
    /// The server on which the counts were initialised; `None` before that.
    pub(crate) run: Option<String>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) expires_at: DateTime<Utc>,
    #[sqlx(flatten, try_from = "FinishedColumns")]
    pub(crate) finished: Option<Finished>,
}

/// The end of a project.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    /// The final counts.
    pub(crate) snapshot: Snapshot,
    /// Since when they are final.
    pub(crate) at: DateTime<Utc>,
}

/// The columns of [`Finished`]. Either all are null or none is.
#[derive(sqlx::FromRow)]
struct FinishedColumns {
    finished_at: Option<DateTime<Utc>>,
    status: Option<String>,
    total: Option<i64>,
    done: Option<i64>,
    errors: Option<i64>,
}

impl TryFrom<FinishedColumns> for Option<Finished> {
    type Error = strum::ParseError;

    fn try_from(columns: FinishedColumns) -> Result<Option<Finished>, strum::ParseError> {
        let FinishedColumns { finished_at: Some(at), status: Some(status), total, done, errors } = columns else {
            return Ok(None);
        };
        let [total, done, errors] = [total, done, errors].map(Option::unwrap_or_default);
        Ok(Some(Finished { snapshot: Snapshot { status: status.parse()?, total, done, errors }, at }))
    }
}

impl Project {
    /// When the counts expire, or, of a finished project, when it is deleted. `retention`: for how long a finished one is read.
    pub(crate) fn readable_until(&self, retention: TimeDelta) -> DateTime<Utc> {
        self.finished.map_or(self.expires_at, |finished| finished.at + retention)
    }

    /// Strangers do not see a project.
    pub(crate) fn is_visible_to(&self, caller: &Caller) -> bool {
        caller.is_operator() || self.owner == owner(caller)
    }
}

/// The owner of what the caller creates: the user, or the tenant of the API key, so that a project outlives a key that is
/// replaced, and each worker may have its own key.
pub(crate) fn owner(caller: &Caller) -> String {
    match caller.principal {
        Principal::User(id) => format!("user:{id}"),
        Principal::Key(_) => tenant_owner(&caller.tenant),
        Principal::Portal(id) => format!("portal:{id}"),
    }
}

/// The owner of what the API keys of a tenant create.
pub(crate) fn tenant_owner(tenant: &Tenant) -> String {
    format!("tenant:{}", tenant.as_str())
}

/// An id that is not valid, with what is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidId {
    #[error("must have 1 to {PROJECT_ID_CHARS_MAX} characters of A-Z, a-z, 0-9, _, - and .")]
    Project,
    #[error("must have 1 to {ITEM_ID_CHARS_MAX} characters, without control characters")]
    Item,
}

pub(crate) fn check_project_id(id: &str) -> Result<(), InvalidId> {
    let is_plain = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'));
    if is_plain && (1..=PROJECT_ID_CHARS_MAX).contains(&id.len()) { Ok(()) } else { Err(InvalidId::Project) }
}

pub(crate) fn check_item_id(id: &str) -> Result<(), InvalidId> {
    // A token is stored among the ids of items, and begins with a control character.
    let is_printable = !id.is_empty() && !id.chars().any(char::is_control);
    if is_printable && (id.len() <= ITEM_ID_CHARS_MAX || id.chars().count() <= ITEM_ID_CHARS_MAX) {
        Ok(())
    } else {
        Err(InvalidId::Item)
    }
}

/// The items of one request. Each id is in one of the lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Items {
    pub(crate) succeeded: Vec<String>,
    pub(crate) failed: Vec<String>,
}

impl Items {
    /// Of an id that is repeated, the first mark counts.
    pub(crate) fn new(marks: Vec<(String, bool)>) -> Items {
        let mut items = Items::default();
        if marks.iter().all(|(_, has_failed)| !has_failed) {
            items.succeeded = marks.into_iter().map(|(id, _)| id).collect();
            return items;
        }
        let mut seen = std::collections::HashSet::with_capacity(marks.len());
        for (id, has_failed) in marks {
            if seen.insert(id.clone()) {
                if has_failed { items.failed.push(id) } else { items.succeeded.push(id) }
            }
        }
        items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Status; 6] = [
        Status::Initializing,
        Status::Crawling,
        Status::ProcessingWait,
        Status::Processing,
        Status::Done,
        Status::Failed,
    ];

    fn at(status: Status, total: i64, done: i64) -> Snapshot {
        Snapshot { status, total, done, errors: 0 }
    }

    #[test]
    fn the_finish_line_needs_a_total_and_is_never_reached_while_crawling_or_after_the_end() {
        for status in ALL {
            let may_complete = !matches!(status, Status::Crawling | Status::Done | Status::Failed);
            for (total, done, is_reached) in [(0, 0, false), (0, 5, false), (5, 4, false), (5, 5, true), (5, 6, true)] {
                assert_eq!(at(status, total, done).is_at_finish_line(), is_reached && may_complete, "{status}");
            }
        }
    }

    #[test]
    fn a_final_status_and_its_total_do_not_change_and_done_cannot_be_set() {
        for from in ALL {
            for to in ALL {
                let changed = at(from, 5, 1).change(Change { status: Some(to), total: None });
                let is_repeat = from == Status::Done && matches!(to, Status::Processing | Status::ProcessingWait);
                let is_allowed =
                    from == to || is_repeat || (!from.is_final() && !matches!(to, Status::Initializing | Status::Done));
                assert!(
                    !is_repeat || changed == Ok(Target { status: Status::Done, total: 5 }),
                    "a repeat changes nothing"
                );
                assert_eq!(changed.is_ok(), is_allowed, "{from} to {to}");
            }
            let raised = at(from, 5, 1).change(Change { status: None, total: Some(6) });
            assert_eq!(raised.is_ok(), !from.is_final(), "{from}");
            let same = at(from, 5, 1).change(Change { status: Some(from), total: Some(5) });
            assert_eq!(same, Ok(Target { status: from, total: 5 }), "a repeated request changes nothing");
        }
    }

    #[test]
    fn the_rate_decays_and_a_young_project_is_not_underestimated() {
        let now = DateTime::from_timestamp(1_000_000, 0).unwrap();
        let rate = Rate { value: 300.0 / RATE_SECONDS, at: now, since: now - TimeDelta::seconds(3) };
        let measured = rate.per_second(now);
        assert!((95.0..125.0).contains(&measured), "300 items in 3 s: {measured}");
        assert!(rate.per_second(now + TimeDelta::seconds(300)) < 0.01);
        let end = estimated_end(&at(Status::Processing, 1_000, 500), 100.0, now);
        assert_eq!(end, Some(now + TimeDelta::seconds(5)));
        assert_eq!(estimated_end(&at(Status::Processing, 0, 500), 100.0, now), None);
        assert_eq!(estimated_end(&at(Status::Processing, 1_000, 500), 0.0, now), None);
        assert!(estimated_end(&at(Status::Processing, 1_000_000_000, 0), 0.001, now).is_some());
    }

    #[test]
    fn of_an_id_that_is_repeated_the_first_mark_counts() {
        let marks = [("a", true), ("a", false), ("b", false), ("b", true), ("c", false)];
        let items = Items::new(marks.map(|(id, has_failed)| (id.to_owned(), has_failed)).to_vec());
        assert_eq!((items.succeeded, items.failed), (vec!["b".to_owned(), "c".to_owned()], vec!["a".to_owned()]));
    }

    #[test]
    fn ids_that_would_break_a_key_are_refused() {
        for id in ["a", "A-Z_0.9", &"a".repeat(100)] {
            assert!(check_project_id(id).is_ok(), "{id}");
        }
        for id in ["", "a:b", "a/b", "ä", "a b", &"a".repeat(101)] {
            assert!(check_project_id(id).is_err(), "{id}");
        }
        assert!(check_item_id("https://example.org/a?b=c#d e").is_ok());
        for id in ["", "a\nb", "\u{1}a", &"ä".repeat(201)] {
            assert!(check_item_id(id).is_err(), "{id}");
        }
    }
}
