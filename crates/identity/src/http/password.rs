//! Changing and resetting passwords.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::auth::Caller;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::Problem;
use runtime::secret::Secret;
use serde::Deserialize;
use service::idempotency::StoreResponse;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::registration::{Address, accept};
use super::{IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_ENDS, Member, run_ending_sessions};
use crate::Identity;
use crate::error::Error;
use crate::fields::{self, Checks};
use crate::flow::ClientInfo;
use crate::flow::password::{self as flow, PasswordChange};
use crate::flow::request::ReceivedRequest;
use crate::secrets::token_digest;
use crate::store::accepted_request::Requested;
use crate::view::{Accepted, Tokens};

pub(super) fn router() -> OpenApiRouter<Arc<Identity>> {
    OpenApiRouter::new().routes(routes!(change)).routes(routes!(forgot)).routes(routes!(reset))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = PasswordChange, example = json!({"current_password": "correct horse battery staple", "new_password": "four other random words"}))]
struct Change {
    #[schema(value_type = String, min_length = 1, max_length = 128)]
    current_password: Secret<String>,
    /// Any characters. Common passwords, and those that contain the address or are the name, are refused.
    #[schema(value_type = String, min_length = 8, max_length = 128)]
    new_password: Secret<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = PasswordReset, example = json!({"token": "CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCC", "new_password": "four other random words"}))]
struct Reset {
    /// The token of the e-mail.
    #[schema(value_type = String, pattern = "^[A-Za-z0-9_-]{43}$")]
    token: Secret<String>,
    /// Any characters. Common passwords, and those that contain the address or are the name, are refused.
    #[schema(value_type = String, min_length = 8, max_length = 128)]
    new_password: Secret<String>,
}

/// Change your password
///
/// All sessions end, and a new one begins: use the tokens of the answer. If the answer is lost, sign in with the new password.
#[utoipa::path(post, path = "/identity/v1/password/change", operation_id = "changePassword", tag = "identity", request_body = Change,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY_ENDS)),
    security(("bearer" = [])),
    responses((status = 200, body = Tokens), (status = 403, description = "The current password is wrong")))]
async fn change(
    State(identity): State<Arc<Identity>>,
    Member { account, .. }: Member,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Change>>,
) -> Result<StoredResponse, Problem> {
    let mut checks = Checks::default();
    let current = checks.check("/current_password", fields::password(&body.current_password));
    let new = checks.check("/new_password", fields::new_password(&body.new_password, &account.email, &account.name));
    let change = || Some(PasswordChange { current: current?, new: new? });
    let change = checks.finish(change()).map_err(Error::Invalid)?;
    let verified = flow::verify_change(&identity, account, change, client).await?;
    let (owner, request, now) = (identity.clone(), identity.digests.sealed(request), identity.clock.now());
    run_ending_sessions(&identity, request.as_ref(), StoreResponse::WithoutBody, |tx, ended| {
        Box::pin(async move {
            let tokens = flow::change(&owner, tx, verified, &ended, now).await?;
            Ok(StoredResponse::json(StatusCode::OK, &tokens).shown_once("sign in with the new password"))
        })
    })
    .await
}

/// Request an e-mail with a token for a new password
///
/// The answer is the same for every address. The previous token is no longer valid.
#[utoipa::path(post, path = "/identity/v1/password/forgot", operation_id = "requestPasswordReset", tag = "identity", request_body = Address,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security((), ("bearer" = [])), responses((status = 202, body = Accepted)))]
async fn forgot(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: key }: Mutation<JsonBody<Address>>,
) -> Result<StoredResponse, Problem> {
    let received = ReceivedRequest::new(body.checked()?, Requested::PasswordReset, client);
    accept(&identity, received, key).await
}

/// Set a new password
///
/// With the token of the e-mail, which can be used once. All sessions of the user end.
#[utoipa::path(post, path = "/identity/v1/password/reset", operation_id = "resetPassword", tag = "identity", request_body = Reset,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security((), ("bearer" = [])),
    responses((status = 204, description = "The password is changed: the user can sign in with it"), (status = 404, description = "The token is not valid")))]
async fn reset(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Reset>>,
) -> Result<StoredResponse, Problem> {
    let prepared = flow::prepare_reset(&identity, token_digest(&body.token), body.new_password, &client).await?;
    let (owner, request, now) = (identity.clone(), identity.digests.sealed(request), identity.clock.now());
    run_ending_sessions(&identity, request.as_ref(), StoreResponse::WithBody, |tx, ended| {
        Box::pin(async move {
            flow::reset(&owner, tx, prepared, &ended, now).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}
