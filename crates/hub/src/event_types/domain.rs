//! Event types, their versions, and the settings of a catalogue.

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, sqlx::FromRow)]
pub(crate) struct CatalogueSettings {
    #[sqlx(try_from = "&'a str")]
    pub(crate) unknown_types: UnknownTypes,
    /// Tenants without a catalogue use it.
    pub(crate) is_shared: bool,
}

/// An entry of the catalogue, without its versions.
#[derive(Debug, Clone, sqlx::FromRow)]
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
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct TypeVersion {
    pub(crate) version: i32,
    /// As it was posted, byte for byte.
    #[sqlx(json)]
    pub(crate) schema: Box<RawValue>,
    #[sqlx(json)]
    pub(crate) examples: Vec<Box<RawValue>>,
    pub(crate) created_at: DateTime<Utc>,
}
