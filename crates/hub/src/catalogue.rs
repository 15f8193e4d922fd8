//! The catalogue of event types of a tenant: descriptions, schemas in versions, and examples. A tenant without one uses that of
//! the tenant `main`, if it is shared.
//!
//! | module | responsibility |
//! |---|---|
//! | [`schema`] | which schemas are accepted, and the forms in which they are applied |
//! | [`pattern`] | regular expressions that mean the same over HTTP and in SQL |
//! | [`validator`] | checks a payload against a schema |
//! | [`compatibility`] | whether a version only adds to the previous one |
//! | [`cache`] | the catalogues of a process, as ingest uses them |
//! | [`page`] | the catalogue as a page to read |
//!
//! A change is answered when it holds everywhere: posts in SQL read the tables, and processes use what they have loaded for at
//! most [`cache::VALID_TIME`] without asking the database, which is how long the response to a change waits.

pub(crate) mod cache;
pub(crate) mod compatibility;
pub(crate) mod page;
mod pattern;
pub(crate) mod schema;
pub(crate) mod validator;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;

/// What happens to an event whose type is not in the catalogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(crate) enum UnknownTypes {
    #[default]
    Accept,
    Refuse,
}

/// The settings of a catalogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CatalogueSettings {
    pub(crate) unknown_types: UnknownTypes,
    /// Tenants without a catalogue use it.
    pub(crate) is_shared: bool,
}

/// An entry of the catalogue, without its versions.
#[derive(Debug, Clone)]
pub(crate) struct EventType {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) is_deprecated: bool,
    pub(crate) is_enforced: bool,
    /// The number of the newest version; 0 if there is none.
    pub(crate) newest: i32,
    /// Counts the changes of this entry.
    pub(crate) version: i64,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
}

/// A version of an event type.
#[derive(Debug, Clone)]
pub(crate) struct TypeVersion {
    pub(crate) version: i32,
    /// As it was posted, byte for byte.
    pub(crate) schema: Box<RawValue>,
    pub(crate) examples: Vec<Box<RawValue>>,
    pub(crate) created_at: DateTime<Utc>,
}

/// A schema in the forms in which the two validators apply it. Public for the tests that compare their verdicts.
#[derive(Debug)]
pub struct AppliedSchema {
    validator: validator::Validator,
    sql: serde_json::Value,
    plain: serde_json::Value,
}

impl AppliedSchema {
    /// Fails with what the catalogue does not accept.
    pub fn parse(schema: &RawValue) -> Result<AppliedSchema, String> {
        let schema = schema::Schema::parse(schema).map_err(|errors| format!("{errors:?}"))?;
        let validator = validator::Validator::new(&schema.rust)?;
        Ok(AppliedSchema { validator, sql: schema.sql, plain: schema.plain })
    }

    /// The verdict about an event that is posted over HTTP.
    pub fn accepts(&self, payload: &serde_json::Value) -> bool {
        self.validator.accepts(payload)
    }

    /// Whether the catalogue accepts this schema as the version after `old` without `force`.
    pub fn is_addition_to(&self, old: &AppliedSchema) -> bool {
        compatibility::breaking_changes(&old.plain, &self.plain).is_empty()
    }

    /// The schema for `pillarbox.schema_error`, which decides about posts in SQL.
    pub fn for_sql(&self) -> &serde_json::Value {
        &self.sql
    }
}
