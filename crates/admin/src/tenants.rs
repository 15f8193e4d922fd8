//! Tenants: the customers of an installation. Operators create, limit, suspend, resume and delete them.
//!
//! Works on the table `pillarbox.tenant`, which is in the schema of the log because every post is checked against it. A tenant
//! that is deleted loses its keys, portal tokens, subscribers, streams, replays and event types in the same transaction, and
//! everything else soon after (`Service::delete_tenant_rows`). Its row stays until the log has none
//! of its messages any more, and so long the name is not free: a new tenant of the same name would see them.

pub mod flow;
pub(crate) mod http;
mod store;

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use http_kit::field::{Field, FieldChecks, Whole, error, printable};
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::Tenant;
use serde::Serialize;
use utoipa::ToSchema;

const DISPLAY_NAME_CHARS_MAX: usize = 100;
/// The largest metadata, in bytes of JSON.
const METADATA_BYTES_MAX: usize = 8_192;

/// A tenant as the API shows it.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema, sqlx::FromRow)]
#[schema(as = TenantDetails)]
pub struct TenantRecord {
    #[sqlx(try_from = "String")]
    #[schema(value_type = http_kit::openapi::TenantName)]
    pub name: Tenant,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// What the operator wants to know about the tenant.
    #[sqlx(json)]
    pub metadata: BTreeMap<String, String>,
    /// Subscribers. Absent: `hub.subscribers_max` applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subscribers_max: Option<i32>,
    /// Events per second over HTTP, in all processes together. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events_per_second_max: Option<i32>,
    /// Bytes of a payload. Absent: 262,144.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_bytes_max: Option<i32>,
    /// Since when the tenant is suspended: its requests are refused, and messages to its subscribers wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspended_at: Option<DateTime<Utc>>,
    /// Grows with each change. The `ETag` is made of it.
    pub version: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// Selects tenants. None matches any.
#[derive(Debug, Clone, Default)]
pub struct TenantFilter {
    pub is_suspended: Option<bool>,
    /// Tenants whose name or display name contains this text, in upper or lower case.
    pub name: Option<String>,
}

/// The fields that an operator sets.
#[derive(Debug, Default)]
pub struct TenantFields {
    pub display_name: Field<String>,
    pub metadata: Field<BTreeMap<String, String>>,
    pub subscribers_max: Field<Whole>,
    pub events_per_second_max: Field<Whole>,
    pub payload_bytes_max: Field<Whole>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no such tenant; GET /admin/v1/tenants and `pillarbox tenants list` show all")]
    NotFound,
    #[error("the tenant {0} exists already")]
    Exists(String),
    #[error(
        "the tenant {0} was deleted, and its messages are in the log until their retention ends (log_days): choose another \
         name, or wait until then"
    )]
    NameInUse(String),
    #[error("the tenant main belongs to the operator and can be neither suspended nor deleted")]
    Main,
    #[error("only a suspended tenant can be deleted: suspend it first")]
    NotSuspended,
    #[error("{}", describe(.0))]
    Invalid(Vec<FieldError>),
    #[error("the tenant was changed by another request")]
    Stale(Problem),
    #[error("the database failed: {0}; `pillarbox status` shows whether it can be reached and is migrated")]
    Database(#[from] sqlx::Error),
}

fn describe(errors: &[FieldError]) -> String {
    let fields = errors.iter().map(|error| format!("{} {}", error.pointer.trim_start_matches('/'), error.detail));
    fields.collect::<Vec<_>>().join("; ")
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        match error {
            Error::NotFound => Problem::not_found("tenant-not-found", &error),
            Error::Exists(_) => Problem::conflict("tenant-exists", &error),
            Error::NameInUse(_) => Problem::conflict("tenant-name-in-use", &error),
            Error::Main => Problem::conflict("tenant-main", &error),
            Error::NotSuspended => Problem::conflict("tenant-active", &error),
            Error::Invalid(errors) => Problem::validation(errors),
            Error::Stale(problem) => problem,
            Error::Database(cause) => http_kit::database::problem(&cause),
        }
    }
}

impl TenantFields {
    /// Applies the fields to a tenant; `is_new` if it has only its defaults. Fails with all invalid fields.
    fn apply(self, tenant: &mut TenantRecord, is_new: bool) -> Result<(), Error> {
        let old = tenant.clone();
        let mut checks = FieldChecks::new((!is_new).then_some(&old));
        let display_name = checks.check(
            "/display_name",
            self.display_name,
            |old| old.display_name.clone(),
            Some(None),
            |text| {
                printable(&text, DISPLAY_NAME_CHARS_MAX).map_err(error)?;
                Ok(Some(text))
            },
        );
        let metadata =
            checks.check("/metadata", self.metadata, |old| old.metadata.clone(), Some(BTreeMap::new()), check_metadata);
        let mut limit = |pointer: &str, field, of: fn(&TenantRecord) -> Option<i32>, min: i64, max: i64| {
            checks.check(pointer, field, of, Some(None), |Whole(number)| match i32::try_from(number) {
                Ok(number) if (min..=max).contains(&i64::from(number)) => Ok(Some(number)),
                _ => Err(error(format!("must be a number from {min} to {max}, or null for the default"))),
            })
        };
        let subscribers_max = limit("/subscribers_max", self.subscribers_max, |old| old.subscribers_max, 0, 100_000);
        let rate =
            limit("/events_per_second_max", self.events_per_second_max, |old| old.events_per_second_max, 1, 1_000_000);
        let bytes = limit("/payload_bytes_max", self.payload_bytes_max, |old| old.payload_bytes_max, 1, 262_144);
        match (display_name, metadata, subscribers_max, rate, bytes) {
            (Some(display_name), Some(metadata), Some(subscribers_max), Some(rate), Some(bytes)) => {
                (tenant.display_name, tenant.metadata, tenant.subscribers_max) =
                    (display_name, metadata, subscribers_max);
                (tenant.events_per_second_max, tenant.payload_bytes_max) = (rate, bytes);
                Ok(())
            }
            _ => Err(Error::Invalid(checks.into_errors())),
        }
    }
}

fn check_metadata(
    metadata: BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, http_kit::field::FieldErrors> {
    let is_plain = |text: &str| !text.chars().any(char::is_control);
    let bytes: usize = metadata.iter().map(|(name, value)| name.len() + value.len() + 8).sum();
    if bytes <= METADATA_BYTES_MAX && metadata.iter().all(|(name, value)| is_plain(name) && is_plain(value)) {
        return Ok(metadata);
    }
    Err(error(format!(
        "must be an object with texts as values, without control characters and of at most {METADATA_BYTES_MAX} bytes"
    )))
}
