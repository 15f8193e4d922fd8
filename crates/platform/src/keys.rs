//! API keys: who may call besides users.
//!
//! Owns `pillarbox_platform.api_key` and `.installation`. A key is shown once, when it is made; what is kept is its
//! digest. An admin of tenant `main` manages the keys of all tenants, an admin of another tenant those of its own.

pub mod flow;
pub(crate) mod http;
pub(crate) mod ring;
mod store;

use chrono::{DateTime, Utc};
use kit::auth::{Role, Tenant};
use kit::problem::Problem;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

/// A key as it can be shown: without what makes it a key.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ApiKey {
    pub id: Uuid,
    pub name: String,
    /// The first characters, to tell keys apart.
    #[schema(example = "pbx_k3J9")]
    pub hint: String,
    pub role: Role,
    pub tenant: Tenant,
    pub created_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<DateTime<Utc>>,
}

/// A key to be made.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub name: String,
    pub role: Role,
    pub tenant: Tenant,
    pub expires_at: Option<DateTime<Utc>>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no such key")]
    NotFound,
    #[error("a name has 1 to 100 characters, not all of them blank, and no control characters")]
    BadName,
    #[error("expires_at must be in the future")]
    ExpiresInThePast,
    #[error(
        "this database belongs to an installation with another secret key: give every process the same \
         PILLARBOX_SECRET_KEY (the first one's is in its data folder, secret.key); after a change, name the old key in \
         secret_keys_previous"
    )]
    OtherSecretKey,
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        use kit::problem::FieldError;
        match &error {
            Error::NotFound => Problem::not_found("key-not-found", &error),
            Error::BadName => Problem::validation(vec![FieldError::body("/name", &error)]),
            Error::ExpiresInThePast => Problem::validation(vec![FieldError::body("/expires_at", &error)]),
            Error::OtherSecretKey => Problem::internal(&error),
            Error::Database(cause) => mailbox::database::problem(cause),
        }
    }
}
