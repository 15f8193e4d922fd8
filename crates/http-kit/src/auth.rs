//! Authentication: identifies the caller of a request by a JWT (a user) or an API key (a producer or an operator).
//!
//! - [`Caller`]: a caller with its tenant and role, and the extractors that handlers use.
//! - `delegation`: which tenant a request acts for, by the header `Pillarbox-Tenant`.
//! - `jwt`: signing and verifying the tokens of users.
//! - `authenticator`: the layer that verifies `Authorization` once per request and applies the rate limit.
//!
//! A handler that needs a caller has a [`Caller`], a [`User`], an [`Admin`] or an [`Operator`] as its first argument, so
//! it cannot run without authentication, and nothing of the request is parsed for a caller who lacks the permission.

mod authenticator;
mod delegation;
mod jwt;

pub use crate::caller::{
    Admin, Caller, InvalidPrincipal, Operator, PortalAccess, Principal, Role, UnknownAccess, UnknownRole, User,
    tenant_suspended,
};

pub use self::authenticator::{Authenticator, KeyLookup, KeyStore, TenantLookup, authenticate};
pub use self::delegation::{ActsForTenant, TENANT_HEADER, TenantRoutes};
pub use self::jwt::{InvalidIssuer, Issuer, SESSION_TOKEN_TTL_MAX, TokenSigner, TokenVerifier};
