//! Event types in API responses, and the file of a catalogue.

use chrono::{DateTime, Utc};
use http_kit::problem::FieldError;
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::event_types::domain::{EventType, TypeVersion, UnknownTypes};

/// An event type.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EventType)]
pub(crate) struct EventTypeView {
    #[schema(example = "order.paid")]
    name: String,
    description: String,
    deprecated: bool,
    /// Whether payloads are checked against the newest schema.
    enforce: bool,
    /// The number of the newest version; 0 if there is none.
    version: i32,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

/// An event type with its versions, oldest first.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EventTypeWithVersions)]
pub(crate) struct EventTypeWithVersions {
    #[serde(flatten)]
    event_type: EventTypeView,
    versions: Vec<VersionView>,
}

/// A version of an event type.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EventTypeVersion)]
pub(crate) struct VersionView {
    version: i32,
    /// A JSON Schema (draft 2020-12).
    #[schema(value_type = Value)]
    schema: Box<RawValue>,
    #[schema(value_type = Vec<Value>)]
    examples: Vec<Box<RawValue>>,
    created_at: DateTime<Utc>,
}

/// The settings of a catalogue.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Catalogue)]
pub(crate) struct CatalogueView {
    /// The tenant whose catalogue it is: `main` if the tenant has none and uses the shared one.
    #[schema(value_type = http_kit::openapi::TenantName)]
    pub(crate) tenant: Tenant,
    pub(crate) unknown_types: UnknownTypes,
    /// Whether tenants without a catalogue use it.
    pub(crate) shared: bool,
    /// How many event types the catalogue has.
    pub(crate) types: i64,
}

/// A whole catalogue, or a part of it, as one file.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"event_types": [{"name": "invoice.sent", "description": "An invoice was sent.", "versions": [
    {"version": 1, "schema": {"type": "object", "required": ["id"]}, "examples": [{"id": 17}]}]}]}))]
pub(crate) struct CatalogueFile {
    /// Absent: the setting of the catalogue does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unknown_types: Option<UnknownTypes>,
    #[schema(max_items = 1000)]
    pub(crate) event_types: Vec<FileType>,
}

/// An event type in a file.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CatalogueFileType)]
pub(crate) struct FileType {
    #[schema(pattern = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length = 200, example = "invoice.sent")]
    pub(crate) name: String,
    #[serde(default)]
    #[schema(max_length = 10000)]
    pub(crate) description: String,
    #[serde(default)]
    pub(crate) deprecated: bool,
    #[serde(default = "yes")]
    #[schema(default = true)]
    pub(crate) enforce: bool,
    /// Oldest first, with the numbers 1, 2, 3 and so on.
    #[serde(default)]
    #[schema(max_items = 100)]
    pub(crate) versions: Vec<FileVersion>,
}

/// A version in a file.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CatalogueFileVersion)]
pub(crate) struct FileVersion {
    #[schema(minimum = 1, maximum = 100)]
    pub(crate) version: i32,
    #[schema(value_type = Value)]
    pub(crate) schema: Box<RawValue>,
    #[serde(default)]
    #[schema(value_type = Vec<Value>, max_items = 10)]
    pub(crate) examples: Vec<Box<RawValue>>,
    /// Absent: the time of the import.
    #[serde(default, deserialize_with = "http_kit::instant::optional", skip_serializing_if = "Option::is_none")]
    pub(crate) created_at: Option<DateTime<Utc>>,
}

/// What an import changes, or would change.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = CatalogueImport)]
pub(crate) struct ImportResult {
    /// True if nothing was changed.
    pub(crate) dry_run: bool,
    pub(crate) created: Vec<String>,
    pub(crate) changed: Vec<String>,
    pub(crate) removed: Vec<String>,
    pub(crate) unchanged: usize,
    /// What breaks and was accepted because of `force`. The pointers are into the file.
    pub(crate) forced: Vec<FieldError>,
}

fn yes() -> bool {
    true
}

impl From<EventType> for EventTypeView {
    fn from(event_type: EventType) -> EventTypeView {
        EventTypeView {
            name: event_type.name,
            description: event_type.description,
            deprecated: event_type.is_deprecated,
            enforce: event_type.is_enforced,
            version: event_type.newest,
            created_at: event_type.created_at,
            updated_at: event_type.updated_at,
        }
    }
}

impl EventTypeWithVersions {
    pub(crate) fn new(event_type: EventType, versions: Vec<TypeVersion>) -> EventTypeWithVersions {
        let version = |version: TypeVersion| VersionView {
            version: version.version,
            schema: version.schema,
            examples: version.examples,
            created_at: version.created_at,
        };
        EventTypeWithVersions { event_type: event_type.into(), versions: versions.into_iter().map(version).collect() }
    }
}

impl From<TypeVersion> for FileVersion {
    fn from(version: TypeVersion) -> FileVersion {
        FileVersion {
            version: version.version,
            schema: version.schema,
            examples: version.examples,
            created_at: Some(version.created_at),
        }
    }
}

impl FileType {
    pub(crate) fn new(event_type: EventType, versions: Vec<TypeVersion>) -> FileType {
        FileType {
            name: event_type.name,
            description: event_type.description,
            deprecated: event_type.is_deprecated,
            enforce: event_type.is_enforced,
            versions: versions.into_iter().map(FileVersion::from).collect(),
        }
    }
}
