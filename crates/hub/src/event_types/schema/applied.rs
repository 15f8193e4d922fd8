//! A schema for the tests that compare the verdicts of this validator with those of another one.

use http_kit::problem::FieldError;
use serde_json::value::RawValue;

use super::compatibility::breaking_changes;
use super::steps::Steps;
use super::work::{CHECK_STEPS, COMPARE_STEPS};
use crate::event_types::schema::Schema;

/// A schema, for the tests that compare its verdicts with those of another validator.
#[derive(Debug)]
pub struct AppliedSchema(Schema);

impl AppliedSchema {
    /// Fails with the parts of the schema that the catalogue does not accept.
    pub fn parse(schema: &RawValue) -> Result<AppliedSchema, Vec<FieldError>> {
        Schema::parse(schema).map(AppliedSchema)
    }

    /// Whether the catalogue accepts a payload. None if it is too expensive to check.
    pub fn accepts(&self, payload: &serde_json::Value) -> Option<bool> {
        self.0.accepts(self.0.root(), payload, &mut Steps::new(CHECK_STEPS)).ok()
    }

    /// Whether the catalogue accepts this schema as the version after `old` without `force`.
    pub fn is_addition_to(&self, old: &AppliedSchema) -> bool {
        let changes = breaking_changes(&old.0, &self.0, &mut Steps::new(COMPARE_STEPS));
        changes.is_ok_and(|changes| changes.is_empty())
    }
}
