//! An account, its role and its sessions.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// The role of a user.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    ToSchema,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[schema(as = UserRole)]
#[strum(serialize_all = "lowercase", const_into_str, parse_err_ty = UnknownRole, parse_err_fn = unknown_role)]
pub enum Role {
    /// Uses only their own resources.
    User,
    /// Operates the installation.
    Admin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be user or admin")]
pub struct UnknownRole;

fn unknown_role(_: &str) -> UnknownRole {
    UnknownRole
}

impl Role {
    /// The role in the tokens of the user.
    pub(crate) fn in_token(self) -> Option<http_kit::auth::Role> {
        match self {
            Role::User => None,
            Role::Admin => Some(http_kit::auth::Role::Admin),
        }
    }
}

/// The account of a user.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Account {
    pub(crate) id: Uuid,
    /// Normalised.
    pub(crate) email: String,
    pub(crate) name: String,
    pub(crate) locale: String,
    #[sqlx(try_from = "&'a str")]
    pub(crate) role: Role,
    /// A PHC string.
    pub(crate) password_hash: String,
    /// Whether no password matches the hash, because the address was registered more than once before it was verified.
    pub(crate) needs_password: bool,
    pub(crate) verified_at: Option<DateTime<Utc>>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
    pub(crate) version: i64,
}

/// A session as it is created.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct Session {
    pub(crate) id: Uuid,
    pub(crate) user_id: Uuid,
    pub(crate) user_agent: Option<String>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) expires_at: DateTime<Utc>,
}

/// A session as its user sees it.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct SessionView {
    #[sqlx(flatten)]
    pub(crate) session: Session,
    pub(crate) last_used_at: DateTime<Utc>,
}

/// The purpose of a token that is sent by e-mail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum TokenKind {
    Verification,
    PasswordReset,
}
