//! Authentication: identifies the caller of a request by a JWT (a user) or an API key (a producer or an operator).
//!
//! - `caller`: the [`Caller`] with its tenant and role, and the extractors that handlers use.
//! - `jwt`: signing and verifying the tokens of users.
//! - `authenticator`: the layer that verifies `Authorization` once per request and applies the rate limit.
//!
//! A handler that needs a caller has a [`Caller`], a [`User`] or an [`Operator`] among its arguments, so it cannot run
//! without authentication.

mod authenticator;
mod caller;
mod jwt;

pub use self::authenticator::{Authenticator, KeyLookup, KeyStore, authenticate};
pub use self::caller::{Caller, Operator, Principal, Role, Tenant, User};
pub use self::jwt::{InvalidIssuer, Issuer, TokenSigner, TokenVerifier};
