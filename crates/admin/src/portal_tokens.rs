//! Portal tokens: short-lived tokens with which the employees of one tenant use the hub, in a console or in the tenant's own
//! user interface.
//!
//! Owns the table `pillarbox_admin.portal_token`. A token is shown once, when it is created; only its digest is stored. It
//! is accepted by the routes of the hub only, reads or manages its tenant there, and neither posts events nor creates keys or
//! further tokens.

pub mod flow;
pub(crate) mod http;
mod store;

use chrono::{DateTime, Utc};
use http_kit::auth::PortalAccess;
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::Tenant;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

/// A portal token without its secret part.
#[derive(Debug, Clone, Serialize, ToSchema, sqlx::FromRow)]
pub struct PortalToken {
    pub id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[sqlx(try_from = "String")]
    #[schema(value_type = http_kit::openapi::TenantName)]
    pub tenant: Tenant,
    #[sqlx(try_from = "&'a str")]
    pub access: PortalAccess,
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
}

/// The properties of a token to create.
#[derive(Debug)]
pub struct NewPortalToken {
    pub name: Option<String>,
    pub access: PortalAccess,
    pub expires_in_seconds: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no such portal token (any more)")]
    NotFound,
    #[error("{}", pillarbox::log::unknown_tenant_text(.0))]
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
            Error::Database(cause) => http_kit::database::problem(&cause),
        }
    }
}
