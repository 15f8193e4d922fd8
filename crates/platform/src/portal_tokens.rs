//! Portal tokens: short-lived tokens with which the employees of one tenant use the hub, in a console or in the tenant's own
//! user interface.
//!
//! Owns the table `pillarbox_platform.portal_token`. A token is shown once, when it is created; only its digest is stored. It
//! is accepted by the routes of the hub only, reads or manages its tenant there, and neither posts events nor creates keys or
//! further tokens.

pub(crate) mod flow;
pub(crate) mod http;
mod store;

use chrono::{DateTime, Utc};
use kit::auth::{PortalAccess, Tenant};
use kit::problem::{FieldError, Problem};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

/// A portal token without its secret part.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct PortalToken {
    pub(crate) id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) tenant: Tenant,
    pub(crate) access: PortalAccess,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) expires_at: DateTime<Utc>,
}

/// The properties of a token to create.
#[derive(Debug)]
pub(crate) struct NewPortalToken {
    pub(crate) name: Option<String>,
    pub(crate) access: PortalAccess,
    pub(crate) expires_in_seconds: i64,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no such portal token (any more)")]
    NotFound,
    #[error("{}", mailbox::log::unknown_tenant_text(.0))]
    NoTenant(String),
    #[error("{1}")]
    Invalid(&'static str, String),
    #[error("the database failed: {0}")]
    Database(#[from] sqlx::Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Problem {
        match error {
            Error::NotFound => Problem::not_found("portal-token-not-found", &error),
            Error::NoTenant(_) => Problem::not_found("tenant-not-found", &error),
            Error::Invalid(pointer, detail) => Problem::validation(vec![FieldError::body(pointer, detail)]),
            Error::Database(cause) => mailbox::database::problem(&cause),
        }
    }
}
