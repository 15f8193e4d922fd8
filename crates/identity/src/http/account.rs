//! The account of the caller.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::ETAG;
use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http_kit::etag::{self, IfMatch, IfNoneMatch};
use http_kit::extract::Json;
use http_kit::idempotency::{JsonBody, Mutation, StoredResponse};
use http_kit::problem::Problem;
use runtime::secret::Secret;
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{IDEMPOTENCY_KEY_ENDS, IDEMPOTENCY_KEY_ONCE, Member, run_ending_sessions};
use crate::Identity;
use crate::domain::Account;
use crate::error::Error;
use crate::fields::{self, Checks};
use crate::flow::ClientInfo;
use crate::flow::account::{self as flow, Changes};
use crate::flow::login::confirm_password;
use crate::view::AccountView;

pub(super) fn router() -> OpenApiRouter<Arc<Identity>> {
    OpenApiRouter::new().routes(routes!(show, update, delete))
}

/// Absent fields stay unchanged.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AccountFields, example = json!({"name": "Ada King", "locale": "en"}))]
struct Fields {
    #[schema(format = "name", max_length = 100)]
    name: Option<String>,
    /// The language of e-mails, such as `en` or `pt-BR`.
    #[schema(pattern = "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8}){0,3}$")]
    locale: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AccountDeletion, example = json!({"password": "correct horse battery staple"}))]
struct Deletion {
    /// The password, so that a copied token does not suffice.
    #[schema(value_type = String, min_length = 1, max_length = 128)]
    password: Secret<String>,
}

/// Show your account
#[utoipa::path(get, path = "/identity/v1/me", operation_id = "getMyAccount", tag = "identity",
    params(("if-none-match" = Option<String>, Header, description = "The ETag of the response that the client has cached")),
    security(("bearer" = [])),
    responses((status = 200, body = AccountView, headers(("etag" = String, description = "Changes when the account changes"))),
        (status = 304, description = "The cached response is current")))]
async fn show(Member { account, .. }: Member, if_none_match: IfNoneMatch) -> Response {
    let tag = tag(&account);
    if if_none_match.matches(&tag) {
        return (StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response();
    }
    ([(ETAG, tag)], Json(AccountView::from(account))).into_response()
}

/// Change your name or locale
#[utoipa::path(patch, path = "/identity/v1/me", operation_id = "updateMyAccount", tag = "identity", request_body = Fields,
    params(("if-match" = Option<String>, Header, description = "The ETag of the account as the client knows it; the change is refused if the account has changed since"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY_ONCE)),
    security(("bearer" = [])),
    responses((status = 200, body = AccountView, headers(("etag" = String, description = "Changes when the account changes"))),
        (status = 412, description = "The account has changed since the given ETag")))]
async fn update(
    State(identity): State<Arc<Identity>>,
    Member { account, .. }: Member,
    if_match: IfMatch,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Fields>>,
) -> Result<StoredResponse, Problem> {
    let mut checks = Checks::default();
    let name = checks.check("/name", body.name.as_deref().map(fields::name).transpose());
    let locale = checks.check("/locale", body.locale.map(fields::locale).transpose());
    let changes = || Some(Changes { name: name?, locale: locale? });
    let changes = checks.finish(changes()).map_err(Error::Invalid)?;
    let now = identity.clock.now();
    run_once(&identity.db, request.as_ref(), StoreResponse::WithoutBody, |tx| {
        Box::pin(async move {
            let changed = flow::update(tx, account.id, changes, &if_match, now).await?;
            let tag = tag(&changed);
            let response = StoredResponse::json(StatusCode::OK, &AccountView::from(changed));
            Ok(response.with_header(ETAG, tag).shown_once("get the account with GET /identity/v1/me"))
        })
    })
    .await
}

/// Delete your account
///
/// Everything that belongs to it is deleted, and all sessions end. Live subscriptions are cancelled. Other services delete
/// what they know about the user.
#[utoipa::path(delete, path = "/identity/v1/me", operation_id = "deleteMyAccount", tag = "identity", request_body = Deletion,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY_ENDS)),
    security(("bearer" = [])),
    responses((status = 204, description = "The account is deleted"), (status = 403, description = "The password is wrong")))]
async fn delete(
    State(identity): State<Arc<Identity>>,
    Member { account, .. }: Member,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Deletion>>,
) -> Result<StoredResponse, Problem> {
    let mut checks = Checks::default();
    let password = checks.check("/password", fields::password(&body.password));
    let password = checks.finish(password).map_err(Error::Invalid)?;
    confirm_password(&identity, &account, password, &client).await?;
    let (owner, request, now) = (identity.clone(), identity.digests.sealed(request), identity.clock.now());
    run_ending_sessions(&identity, request.as_ref(), StoreResponse::WithBody, |tx, ended| {
        Box::pin(async move {
            flow::delete(&owner, tx, account.id, &ended, now).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

fn tag(account: &Account) -> HeaderValue {
    etag::of(account.version, account.updated_at)
}
