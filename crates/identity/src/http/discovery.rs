//! The information with which other programs verify the tokens of this installation.

use std::sync::Arc;

use axum::extract::State;
use http_kit::auth::Caller;
use http_kit::extract::Json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Identity;
use crate::view::{KeySet, OpenIdConfiguration};

const KEYS_PATH: &str = "/identity/v1/jwks.json";

pub(super) fn router() -> OpenApiRouter<Arc<Identity>> {
    OpenApiRouter::new().routes(routes!(keys)).routes(routes!(configuration))
}

/// Show the public keys of this installation
///
/// A JWK set (RFC 7517): the keys that tokens are signed with now, and the next one. Keys change every 30 days.
#[utoipa::path(get, path = "/identity/v1/jwks.json", operation_id = "getJsonWebKeySet", tag = "identity", security((), ("bearer" = [])),
    responses((status = 200, body = KeySet)))]
async fn keys(State(identity): State<Arc<Identity>>, _: Option<Caller>) -> Json<serde_json::Value> {
    Json(identity.tokens.public_keys())
}

/// Show the configuration for verifying tokens
///
/// The part of OpenID Connect Discovery that this installation supports: issuer and keys. It is not a provider of OpenID
/// Connect.
#[utoipa::path(get, path = "/.well-known/openid-configuration", operation_id = "getOpenIdConfiguration", tag = "identity", security((), ("bearer" = [])),
    responses((status = 200, body = OpenIdConfiguration)))]
async fn configuration(State(identity): State<Arc<Identity>>, _: Option<Caller>) -> Json<OpenIdConfiguration> {
    Json(OpenIdConfiguration {
        issuer: identity.signer.issuer().to_owned(),
        jwks_uri: format!("{}{KEYS_PATH}", identity.public_url.as_deref().unwrap_or_default()),
        subject_types_supported: ["public"],
        claims_supported: ["iss", "aud", "sub", "iat", "exp", "jti", "sid", "role"],
    })
}
