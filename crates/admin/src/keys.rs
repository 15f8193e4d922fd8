//! API keys, with which producers and operators call the API.
//!
//! Owns the tables `pillarbox_admin.api_key` and `.installation`. A key is shown once, when it is created; only its digest
//! is stored. An admin of the tenant `main` manages the keys of all tenants, an admin of another tenant those of its tenant.

pub mod flow;
pub(crate) mod http;
mod store;

use std::time::Duration;

use chrono::{DateTime, Utc};
use http_kit::auth::Role;
use http_kit::problem::Problem;
use pillarbox::log::Tenant;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

/// How long a process caches the lookup of a key. A key that another process revokes, or whose tenant it suspends, is refused
/// after this time at the latest.
pub(crate) const CACHE_TIME: Duration = Duration::from_secs(2);

/// An API key without its secret part.
#[derive(Debug, Clone, Serialize, ToSchema, sqlx::FromRow)]
pub struct ApiKey {
    pub id: Uuid,
    pub name: String,
    /// The first characters of the key, to tell keys apart.
    #[schema(example = "pbx_k3J9")]
    pub hint: String,
    #[sqlx(try_from = "&'a str")]
    pub role: Role,
    #[sqlx(try_from = "String")]
    #[schema(value_type = http_kit::openapi::TenantName)]
    pub tenant: Tenant,
    pub created_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<DateTime<Utc>>,
}

/// The properties of a key to create.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub name: String,
    pub role: Role,
    pub tenant: Tenant,
    pub expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no such API key")]
    NotFound,
    #[error("name {0}")]
    InvalidName(String),
    #[error("{}", pillarbox::log::unknown_tenant_text(.0))]
    NoTenant(String),
    #[error("expires_at must be a time in the future")]
    ExpiresInThePast,
    #[error(
        "this database belongs to an installation with another secret key: give every process the same \
         PILLARBOX_SECRET_KEY (that of the first process is in the file secret.key of its data folder); after a change of \
         the key, add the former key to secret_keys_previous"
    )]
    OtherSecretKey,
    #[error("the database failed: {0}; `pillarbox status` shows whether it can be reached and is migrated")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        use http_kit::problem::FieldError;
        match &error {
            Error::NotFound => Problem::not_found("key-not-found", &error),
            // The pointer names the field, which the text of the command line has to name itself.
            Error::InvalidName(detail) => Problem::validation(vec![FieldError::body("/name", detail)]),
            Error::NoTenant(_) => Problem::validation(vec![FieldError::body("/tenant", &error)]),
            Error::ExpiresInThePast => {
                Problem::validation(vec![FieldError::body("/expires_at", "must be a time in the future")])
            }
            Error::OtherSecretKey => Problem::internal(&error),
            Error::Database(cause) => http_kit::database::problem(cause),
        }
    }
}
