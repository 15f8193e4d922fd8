//! Registration and the verification of addresses.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::auth::Caller;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::problem::Problem;
use runtime::secret::Secret;
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use crate::Identity;
use crate::error::Error;
use crate::fields::{self, Checks, LOCALE_DEFAULT};
use crate::flow::ClientInfo;
use crate::flow::request::{self as flow, NewUser, ReceivedRequest};
use crate::secrets::token_digest;
use crate::store::accepted_request::Requested;
use crate::view::{Accepted, Verification};

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
    #[schema(format = "name", max_length = 100)]
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
    /// Returns the normalised address. Fails if it is not valid.
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
/// `/identity/v1/verify`; the owner of an existing account gets an e-mail about it. If an address is registered again before it is
/// verified, no registration decides the password: the user sets one after the verification.
#[utoipa::path(post, path = "/identity/v1/register", operation_id = "registerAccount", tag = "identity", request_body = Registration,
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
    let new = || Some(NewUser { email: email?, name: name?, locale: locale?, password: password? });
    let new = checks.finish(new()).map_err(Error::Invalid)?;
    accept(&identity, ReceivedRequest::registration(&identity, new, client).await?, request).await
}

/// Accepts a request, once for each `Idempotency-Key`. It is processed after the response.
pub(super) async fn accept(
    identity: &Arc<Identity>,
    received: ReceivedRequest,
    request: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let (owner, id, now) = (identity.clone(), received.id, identity.clock.now());
    let request = identity.digests.sealed(request);
    let accepted = run_once(&identity.db, request.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::accept(&owner, tx, received, now).await?;
            Ok(StoredResponse::json(StatusCode::ACCEPTED, &Accepted::default()))
        })
    });
    let response = accepted.await?;
    if !response.is_replayed() {
        flow::spawn_processing(identity, id);
    }
    Ok(response)
}

/// Verify an address
///
/// With the token of the e-mail, which can be used once. If the address was registered more than once, no password is valid
/// yet: `password_reset_required` is true, and an e-mail with a token for `/identity/v1/password/reset` is on its way.
#[utoipa::path(post, path = "/identity/v1/verify", operation_id = "verifyAddress", tag = "identity", request_body = Token,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security((), ("bearer" = [])),
    responses((status = 200, body = Verification), (status = 404, description = "The token is not valid")))]
async fn verify(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Token>>,
) -> Result<StoredResponse, Problem> {
    let (owner, digest, now) = (identity.clone(), token_digest(&body.token), identity.clock.now());
    run_once(&identity.db, request.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let password_reset_required = flow::verify(&owner, tx, digest, now).await?;
            Ok(StoredResponse::json(StatusCode::OK, &Verification { password_reset_required }))
        })
    })
    .await
}

/// Request another e-mail with a token for the verification
///
/// The answer is the same for every address. The previous token is no longer valid.
#[utoipa::path(post, path = "/identity/v1/verify/resend", operation_id = "resendVerification", tag = "identity", request_body = Address,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security((), ("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn resend(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Address>>,
) -> Result<StoredResponse, Problem> {
    accept(&identity, ReceivedRequest::new(body.checked()?, Requested::Verification, client), request).await
}
