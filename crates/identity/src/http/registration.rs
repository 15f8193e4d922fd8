//! Registration and the verification of addresses.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use kit::auth::Caller;
use kit::idempotency::{JsonBody, Mutation, StoredResponse};
use kit::problem::Problem;
use kit::secret::Secret;
use mailbox::idempotency::{StoreResponse, run_once};
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use crate::Identity;
use crate::error::Error;
use crate::fields::{self, Checks, LOCALE_DEFAULT};
use crate::flow::{ClientInfo, request as flow};
use crate::secrets::token_digest;
use crate::store::accepted_request::Requested;
use crate::view::Accepted;

pub(super) fn router() -> OpenApiRouter<Arc<Identity>> {
    OpenApiRouter::new().routes(routes!(register)).routes(routes!(verify)).routes(routes!(resend))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewAccount, example = json!({"email": "ada@example.org", "password": "correct horse battery staple", "name": "Ada Lovelace"}))]
struct Registration {
    #[schema(
        pattern = r"^\s*[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])\s*$",
        max_length = 254
    )]
    email: String,
    /// Any characters. Common passwords, and those that contain the address or are the name, are refused.
    #[schema(value_type = String, min_length = 8, max_length = 128)]
    password: Secret<String>,
    #[schema(format = "line", max_length = 100)]
    name: String,
    /// The language of e-mails, such as `en` or `pt-BR`.
    #[schema(pattern = "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}$")]
    locale: Option<String>,
}

/// An address.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = EmailAddress, example = json!({"email": "ada@example.org"}))]
pub(super) struct Address {
    #[schema(
        pattern = r"^\s*[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])\s*$",
        max_length = 254
    )]
    email: String,
}

impl Address {
    /// Returns the normalised address. Fails if it is none.
    pub(super) fn checked(&self) -> Result<String, Error> {
        let mut checks = Checks::default();
        let email = checks.check("/email", fields::email(&self.email));
        checks.finish(email).map_err(Error::Invalid)
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = EmailToken, example = json!({"token": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}))]
struct Token {
    /// The token of the e-mail.
    #[schema(value_type = String, pattern = "^[A-Za-z0-9_-]{43}$")]
    token: Secret<String>,
}

/// Register an account
///
/// The answer is the same whether or not the address has an account. A new account gets an e-mail with a token for
/// `/identity/v1/verify`; the owner of an existing account is told by e-mail. Until an address is verified, the latest
/// registration counts.
#[utoipa::path(post, path = "/identity/v1/register", tag = "identity", request_body = Registration,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security((), ("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn register(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Registration>>,
) -> Result<StoredResponse, Problem> {
    let mut checks = Checks::default();
    let email = checks.check("/email", fields::email(&body.email));
    let name = checks.check("/name", fields::name(&body.name));
    let locale = body.locale.unwrap_or_else(|| LOCALE_DEFAULT.to_owned());
    let locale = checks.check("/locale", fields::locale(locale));
    let (known_email, known_name) = (email.as_deref().unwrap_or_default(), name.as_deref().unwrap_or_default());
    let password = checks.check("/password", fields::new_password(&body.password, known_email, known_name));
    let all = || Some((email?, name?, locale?, password?));
    let (email, name, locale, password) = checks.finish(all()).map_err(Error::Invalid)?;
    // Always, and before anything is known about the address.
    let password_hash = identity.hashes.hash(password).await.map_err(Error::from)?;
    let request = identity.digests.sealed(request);
    flow::accept(&identity, (email, Requested::Registration { name, locale, password_hash }), &client, request).await
}

/// Verify an address
///
/// With the token of the e-mail, which can be used once.
#[utoipa::path(post, path = "/identity/v1/verify", tag = "identity", request_body = Token,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security((), ("bearer" = [])),
    responses((status = 204, description = "The address is verified: the user can sign in"), (status = 404, description = "The token is not valid")))]
async fn verify(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Token>>,
) -> Result<StoredResponse, Problem> {
    let (digest, now) = (token_digest(&body.token), identity.clock.now());
    run_once(&identity.db, request.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::verify(tx, digest, now).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Request another e-mail with a token for the verification
///
/// The answer is the same for every address. The previous token is no longer valid.
#[utoipa::path(post, path = "/identity/v1/verify/resend", tag = "identity", request_body = Address,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security((), ("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn resend(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Address>>,
) -> Result<StoredResponse, Problem> {
    flow::accept(&identity, (body.checked()?, Requested::Verification), &client, identity.digests.sealed(request)).await
}
