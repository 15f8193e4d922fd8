//! Signing in and out, refreshing, and the list of sessions.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use http_kit::auth::Caller;
use http_kit::extract::Path;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::Problem;
use runtime::secret::Secret;
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_ENDS, IDEMPOTENCY_KEY_ONCE, Member};
use crate::Identity;
use crate::error::Error;
use crate::fields::{self, Checks};
use crate::flow::login::{Credentials, login as sign_in};
use crate::flow::{ClientInfo, EndedSessions, session as flow};
use crate::secrets::token_digest;
use crate::view::{SessionItem, Tokens};

pub(super) fn router() -> OpenApiRouter<Arc<Identity>> {
    OpenApiRouter::new()
        .routes(routes!(login))
        .routes(routes!(refresh))
        .routes(routes!(logout))
        .routes(routes!(list, end_all))
        .routes(routes!(end))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Login, example = json!({"email": "ada@example.org", "password": "correct horse battery staple"}))]
struct Login {
    #[schema(
        pattern = r"^\s*[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])\s*$",
        max_length = 254
    )]
    email: String,
    #[schema(value_type = String, min_length = 1, max_length = 128)]
    password: Secret<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = RefreshToken, example = json!({"refresh_token": "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB"}))]
struct Refresh {
    #[schema(value_type = String, pattern = "^[A-Za-z0-9_-]{43}$")]
    refresh_token: Secret<String>,
}

/// Sign in
///
/// The access token is for the header `Authorization: Bearer`. The refresh token is for `/identity/v1/refresh`, once.
#[utoipa::path(post, path = "/identity/v1/login", operation_id = "signIn", tag = "identity", request_body = Login,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY_ONCE)),
    security((), ("bearer" = [])),
    responses((status = 200, body = Tokens), (status = 401, description = "The address or the password is wrong"),
        (status = 403, description = "The address is not verified")))]
async fn login(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    client: ClientInfo,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Login>>,
) -> Result<StoredResponse, Problem> {
    let mut checks = Checks::default();
    let email = checks.check("/email", fields::email(&body.email));
    let password = checks.check("/password", fields::password(&body.password));
    let credentials = || Some(Credentials { email: email?, password: password? });
    let credentials = checks.finish(credentials()).map_err(Error::Invalid)?;
    sign_in(&identity, credentials, client, identity.digests.sealed(request)).await
}

/// Exchange a refresh token for new tokens
///
/// A refresh token can be used once. One that was used before ends the session, because somebody may have copied it; only
/// a client that lost the answer may repeat the request within some seconds.
#[utoipa::path(post, path = "/identity/v1/refresh", operation_id = "refreshSession", tag = "identity", request_body = Refresh,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY_ONCE)),
    security((), ("bearer" = [])),
    responses((status = 200, body = Tokens), (status = 401, description = "The refresh token is not valid")))]
async fn refresh(
    State(identity): State<Arc<Identity>>,
    _: Option<Caller>,
    Mutation { body: JsonBody(body), identity: request }: Mutation<JsonBody<Refresh>>,
) -> Result<StoredResponse, Problem> {
    flow::exchange(&identity, token_digest(&body.refresh_token), request).await
}

/// Sign out: end the session of this request
#[utoipa::path(post, path = "/identity/v1/logout", operation_id = "signOut", tag = "identity",
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY_ENDS)),
    security(("bearer" = [])), responses((status = 204, description = "The session has ended")))]
async fn logout(
    State(identity): State<Arc<Identity>>,
    member: Member,
    Mutation { identity: request, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    end_sessions(&identity, member.account.id, Some(member.session), request).await
}

/// List your sessions, newest first
#[utoipa::path(get, path = "/identity/v1/sessions", operation_id = "listSessions", tag = "identity", params(Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<SessionItem>)))]
async fn list(
    State(identity): State<Arc<Identity>>,
    Member { account, session }: Member,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<SessionItem>, Problem> {
    let scope = PageScope::of_owner(&identity.cursor_key, "identity sessions", account.id, &filters);
    let before: Option<(DateTime<Utc>, Uuid)> = scope.position(cursor.as_deref())?;
    let sessions = flow::list(&identity, account.id, (before, limit + 1)).await?;
    let page = scope.cut(sessions, limit, |view| (view.session.created_at, view.session.id));
    Ok(page.map(|view| SessionItem::new(view, session)))
}

/// End all your sessions, also this one
#[utoipa::path(delete, path = "/identity/v1/sessions", operation_id = "endAllSessions", tag = "identity",
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY_ENDS)),
    security(("bearer" = [])), responses((status = 204, description = "All sessions have ended")))]
async fn end_all(
    State(identity): State<Arc<Identity>>,
    member: Member,
    Mutation { identity: request, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    end_sessions(&identity, member.account.id, None, request).await
}

/// End one of your sessions
#[utoipa::path(delete, path = "/identity/v1/sessions/{id}", operation_id = "endSession", tag = "identity",
    params(("id" = Uuid, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 204, description = "The session has ended"), (status = 404, description = "The session does not exist")))]
async fn end(
    State(identity): State<Arc<Identity>>,
    member: Member,
    Path(id): Path<Uuid>,
    Mutation { identity: request, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    end_sessions(&identity, member.account.id, Some(id), request).await
}

/// Ends one session of a user, or all of them.
async fn end_sessions(
    identity: &Identity,
    user: Uuid,
    session: Option<Uuid>,
    request: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let ended = EndedSessions::default();
    let ends = ended.clone();
    let done = run_once(&identity.db, request.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            match session {
                Some(session) => flow::end(tx, user, session, &ends).await?,
                None => flow::end_all(tx, user, &ends).await?,
            }
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    });
    let response = done.await?;
    ended.apply(&identity.tokens);
    Ok(response)
}
