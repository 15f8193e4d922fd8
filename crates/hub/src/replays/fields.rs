//! The fields with which a caller requests a replay or a backfill. All of them are checked, and every invalid one is
//! reported.

use std::ops::RangeInclusive;

use chrono::{DateTime, Utc};
use http_kit::field::Whole;
use http_kit::problem::FieldError;
use serde::Deserialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::directory::domain::{EventTypes, Filter};
use crate::directory::fields::{check_event_types, check_filter};
use crate::error::Error;
use crate::events::view::message::EventIdParam;
use crate::replays::domain::{ReplayMode, ReplaySelection};

/// Events that a request can name.
pub(crate) const EVENT_IDS_MAX: usize = 100;
const RATE: RangeInclusive<i64> = 1..=100_000;

/// What to send again: named events, or those of a time range.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewReplay, example = json!({"from": "2026-01-31T08:00:00Z", "event_types": ["order.*"], "rate_per_second": 100}))]
pub(crate) struct ReplayFields {
    /// The subscriber to send to. Absent: all subscribers of the tenant.
    subscriber_id: Option<Uuid>,
    /// The events to send. Not together with `from` and `to`.
    #[schema(value_type = Option<Vec<String>>, min_items = 1, max_items = 100)]
    event_ids: Option<Vec<EventIdParam>>,
    /// Events that were posted at this time or later. Required without `event_ids`.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Events that were posted before this time. Absent: all until now.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Only events of these types, in addition to the types of each subscriber. Absent: all.
    #[schema(value_type = Option<Vec<EventTypes>>, min_items = 1, max_items = 100)]
    event_types: Option<Vec<String>>,
    /// Only events that meet these conditions, in addition to the filter of each subscriber.
    #[schema(value_type = Option<Filter>)]
    filter: Option<Filter>,
    /// `resend` sends each event, also if the subscriber has it; `missed` only events of which the subscriber has no
    /// message.
    #[schema(default = "resend")]
    mode: Option<ReplayMode>,
    /// The number of messages per second. Absent: as fast as the subscribers accept them.
    #[schema(value_type = Option<i64>, minimum = 1, maximum = 100000)]
    rate_per_second: Option<Whole>,
    /// Counts the messages and creates none.
    #[serde(default)]
    pub(crate) dry_run: bool,
}

/// A request for a replay that was checked.
#[derive(Debug)]
pub(crate) struct ReplayRequest {
    pub(crate) subscriber: Option<Uuid>,
    pub(crate) event_ids: Option<Vec<Uuid>>,
    pub(crate) selection: ReplaySelection,
    pub(crate) rate: Option<u32>,
}

/// What a new subscriber gets before the events that are posted from now on.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewBackfill)]
pub(crate) struct BackfillFields {
    /// Events that were posted at this time or later.
    #[serde(deserialize_with = "http_kit::instant::required")]
    pub(crate) from: DateTime<Utc>,
}

impl ReplayFields {
    /// Fails with every invalid field.
    pub(crate) fn check(self) -> Result<ReplayRequest, Error> {
        let mut errors = Vec::new();
        let mut refuse = |pointer: &str, detail: String| errors.push(FieldError::body(pointer, detail));
        match (&self.event_ids, self.from) {
            (None, None) => refuse("", "must contain `from`, or `event_ids`".to_owned()),
            (Some(_), Some(_)) => refuse("/from", "cannot be combined with `event_ids`: omit one of them".to_owned()),
            (Some(ids), None) if !(1..=EVENT_IDS_MAX).contains(&ids.len()) => {
                refuse("/event_ids", format!("must be a list of 1 to {EVENT_IDS_MAX} events; use `from` for more"));
            }
            (Some(_), None) | (None, Some(_)) => {}
        }
        match (self.to, self.from) {
            (Some(to), Some(from)) if to <= from => refuse("/to", "must be a time after `from`".to_owned()),
            (Some(_), None) => refuse("/to", "requires `from`".to_owned()),
            (Some(_), Some(_)) | (None, _) => {}
        }
        let rate = self.rate_per_second.map(|Whole(rate)| rate);
        if rate.is_some_and(|rate| !RATE.contains(&rate)) {
            refuse("/rate_per_second", format!("must be a number from {} to {}", RATE.start(), RATE.end()));
        }
        let mut collect = |pointer: &str, found: Vec<(String, String)>| {
            errors
                .extend(found.into_iter().map(|(below, detail)| FieldError::body(format!("{pointer}{below}"), detail)));
        };
        let event_types = match self.event_types.map(check_event_types).transpose() {
            Ok(event_types) => event_types.unwrap_or_default(),
            Err(found) => {
                collect("/event_types", found);
                Vec::<EventTypes>::new()
            }
        };
        let filter = self.filter.map(check_filter).transpose().unwrap_or_else(|found| {
            collect("/filter", found);
            None
        });
        if !errors.is_empty() {
            return Err(Error::Invalid(errors));
        }
        Ok(ReplayRequest {
            subscriber: self.subscriber_id,
            event_ids: self.event_ids.map(|ids| ids.into_iter().map(|EventIdParam(id)| id).collect()),
            selection: ReplaySelection {
                mode: self.mode.unwrap_or(ReplayMode::Resend),
                from: self.from.unwrap_or_default(),
                to: self.to,
                event_types,
                filter: filter.flatten(),
            },
            rate: rate.map(|rate| rate as u32),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn errors(body: serde_json::Value) -> Vec<String> {
        let fields: ReplayFields = serde_json::from_value(body).unwrap();
        match fields.check() {
            Err(Error::Invalid(errors)) => errors.iter().map(|error| error.pointer.clone()).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_invalid_field_of_a_request_is_named() {
        let (from, to) = ("2026-01-31T08:00:00Z", "2026-01-31T07:00:00Z");
        assert_eq!(errors(json!({})), [""]);
        assert_eq!(errors(json!({"event_ids": []})), ["/event_ids"]);
        assert_eq!(errors(json!({"from": from, "to": to, "rate_per_second": 0})), ["/to", "/rate_per_second"]);
        let bad_filter = json!([{"pointer": "x", "op": "eq", "value": 1}]);
        let found = errors(json!({"from": from, "event_types": ["a b"], "filter": bad_filter}));
        assert_eq!(found, ["/event_types/0", "/filter/0/pointer"]);
        let id = Uuid::now_v7();
        assert_eq!(errors(json!({"event_ids": [id], "from": from})), ["/from"]);
    }
}
