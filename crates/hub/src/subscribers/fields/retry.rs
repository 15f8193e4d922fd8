//! The fields that decide what happens after a failed attempt.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use http_kit::extract::escape_pointer;
use http_kit::field::{Field, FieldChecks, FieldErrors, Whole, check_each, error};
use serde_json::json;
use utoipa::openapi::schema::{AdditionalProperties, Object, Schema, Type};
use utoipa::openapi::{ObjectBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::check_number;
use crate::deliveries::domain::{RetryAction, RetryRules, RetrySchedule, StatusPattern};
use crate::subscribers::domain::SubscriberSettings;

/// Entries in `retry_backoff_seconds`, and so retries of a message.
const RETRIES_MAX: usize = 20;
const BACKOFF_SECONDS: RangeInclusive<i64> = 1..=86_400;
/// Entries in `retry_rules`.
const RULES_MAX: usize = 100;

/// The seconds before a retry.
#[derive(ToSchema)]
#[schema(value_type = i64, minimum = 1, maximum = 86400)]
#[expect(dead_code, reason = "it only describes the items of a list")]
pub(super) struct BackoffSeconds(i64);

/// What happens after a response, by its status (`404`) or its class (`4xx`).
pub(crate) struct RetryRuleMap;

fn check_backoff(list: Vec<Whole>) -> Result<Vec<u32>, FieldErrors> {
    check_numbers(&list, RETRIES_MAX, BACKOFF_SECONDS)
}

/// The pauses by their list or by their name.
pub(super) fn check_backoff_fields(
    checks: &mut FieldChecks<'_, SubscriberSettings>,
    list: Field<Vec<Whole>>,
    name: Field<RetrySchedule>,
) -> Option<Vec<u32>> {
    let old = |old: &SubscriberSettings| old.retry_backoff_seconds.clone();
    let default = Some(RetrySchedule::Short.seconds().to_vec());
    match (list, name) {
        (Field::Given(_), Field::Given(_)) => {
            let detail = "must not be given together with `retry_backoff_seconds`: give the name or the list";
            checks.check("/retry_schedule", Field::Given(()), old, default, |()| Err(error(detail)))
        }
        (Field::Absent | Field::Null, name @ (Field::Given(_) | Field::Null)) => {
            checks.check("/retry_schedule", name, old, default, |name| Ok(name.seconds().to_vec()))
        }
        (list, Field::Absent | Field::Null) => {
            checks.check("/retry_backoff_seconds", list, old, default, check_backoff)
        }
    }
}

pub(super) fn check_rules(given: BTreeMap<String, RetryAction>) -> Result<RetryRules, FieldErrors> {
    if given.len() > RULES_MAX {
        return Err(error(format!("must be at most {RULES_MAX} rules")));
    }
    let (mut rules, mut errors) = (RetryRules::default(), Vec::new());
    for (name, action) in given {
        let pointer = format!("/{}", escape_pointer(&name));
        match name.parse::<StatusPattern>() {
            Ok(pattern) if action == RetryAction::Disable && !pattern.may_disable() => {
                errors.push((pointer, "must be retry or dead_letter: only a single 4xx status can disable".to_owned()));
            }
            Ok(pattern) => rules.insert(pattern, action),
            Err(error) => errors.push((pointer, error.to_string())),
        }
    }
    if errors.is_empty() { Ok(rules) } else { Err(errors) }
}

fn check_numbers(list: &[Whole], count_max: usize, range: RangeInclusive<i64>) -> Result<Vec<u32>, FieldErrors> {
    if list.len() > count_max {
        return Err(error(format!("must be a list of at most {count_max} numbers")));
    }
    check_each(list.to_vec(), |number| {
        check_number(number, range.clone())
            .map_err(|errors| errors.into_iter().map(|(_, detail)| detail).collect::<String>())
    })
}

impl PartialSchema for RetryRuleMap {
    fn schema() -> RefOr<Schema> {
        let mut rules = Object::with_type(Type::Object);
        let name = ObjectBuilder::new().schema_type(Type::String).pattern(Some("^([345]xx|[345][0-9]{2})$")).build();
        rules.property_names = Some(Box::new(name.into()));
        rules.additional_properties = Some(Box::new(AdditionalProperties::RefOr(RetryAction::schema())));
        rules.max_properties = Some(RULES_MAX);
        rules.example = Some(json!({"404": "retry", "503": "dead_letter"}));
        rules.into()
    }
}

impl ToSchema for RetryRuleMap {}
