//! The fields with which a caller selects events: those of subscribers, streams and replays.

use http_kit::field::{FieldErrors, check_each, error};

use crate::directory::domain::{EventTypes, Filter, check_pointer};

/// Patterns in `event_types`.
const EVENT_TYPES_MAX: usize = 100;
/// Bytes of a filter as JSON.
const FILTER_BYTES_MAX: usize = 16 * 1024;

pub(crate) fn check_event_types(patterns: Vec<String>) -> Result<Vec<EventTypes>, FieldErrors> {
    if !(1..=EVENT_TYPES_MAX).contains(&patterns.len()) {
        return Err(error(format!("must be a list of 1 to {EVENT_TYPES_MAX} types")));
    }
    check_each(patterns, |pattern| EventTypes::try_from(pattern).map_err(|error| error.to_string()))
}

pub(crate) fn check_filter(filter: Filter) -> Result<Option<Filter>, FieldErrors> {
    filter.check().map_err(|error| vec![error])?;
    let bytes = serde_json::to_vec(&filter).map_or(usize::MAX, |text| text.len());
    if bytes > FILTER_BYTES_MAX {
        return Err(error(format!("must be at most {FILTER_BYTES_MAX} bytes of JSON")));
    }
    Ok(Some(filter).filter(|Filter(conditions)| !conditions.is_empty()))
}

pub(crate) fn check_ordering_key(pointer: String) -> Result<Option<String>, FieldErrors> {
    check_pointer(&pointer).map_err(|invalid| error(invalid.to_string()))?;
    Ok(Some(pointer))
}
