//! Signing in and out, refreshing, and the list of sessions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::State;
use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderValue, StatusCode};
use chrono::{DateTime, Utc};
use http_kit::auth::Caller;
use http_kit::extract::Path;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::Problem;
use runtime::secret::Secret;
use serde::Deserialize;
use service::idempotency::StoreResponse;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_ENDS, IDEMPOTENCY_KEY_ONCE, Member, run_ending_sessions};
use crate::Identity;
use crate::error::Error;
use crate::fields::{self, Checks};
use crate::flow::login::{self, Credentials};
use crate::flow::{ClientInfo, session as flow};
use crate::secrets::token_digest;
use crate::view::{SessionItem, Tokens};

/// How often a password is verified if other sign-ins hash it again at the same time. Of those after a change of the parameters,
/// one saves the new hash, and the others verify that one.
const ATTEMPTS_MAX: u32 = 3;

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

/// Verifies the credentials and starts a session. Both are repeated if another sign-in has replaced the hash in between.
async fn sign_in(
    identity: &Arc<Identity>,
    credentials: Credentials,
    client: ClientInfo,
    request: Option<RequestIdentity>,
) -> Result<StoredResponse, Problem> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let verified = login::verify(identity, credentials.clone(), client.clone()).await?;
        let (owner, now, is_replaced) = (identity.clone(), identity.clock.now(), Arc::new(AtomicBool::new(false)));
        let replaced = is_replaced.clone();
        let started = run_ending_sessions(identity, request.as_ref(), StoreResponse::WithoutBody, |tx, ended| {
            Box::pin(async move {
                let started = login::start_session(&owner, tx, verified, &ended, now).await;
                replaced.store(matches!(started, Err(Error::HashReplaced)), Ordering::Relaxed);
                let next_step = "sign in again with a new Idempotency-Key";
                Ok(StoredResponse::json(StatusCode::OK, &started?).shown_once(next_step))
            })
        });
        match started.await {
            Err(_) if is_replaced.load(Ordering::Relaxed) && attempts < ATTEMPTS_MAX => {}
            Err(problem) => return Err(problem),
            Ok(response) => {
                metrics::counter!("pillarbox_identity_logins_total", "outcome" => "success").increment(1);
                return Ok(response);
            }
        }
    }
}

/// Exchange a refresh token for new tokens
///
/// A refresh token can be used once. One that was used before ends the session, because it may have been copied; only
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
    let (owner, digest, now) = (identity.clone(), token_digest(&body.refresh_token), identity.clock.now());
    run_ending_sessions(&identity, request.as_ref(), StoreResponse::WithoutBody, |tx, ended| {
        Box::pin(async move {
            let next_step = "refresh again without the key, within the grace after the first request, or sign in again";
            match flow::exchange(&owner, tx, digest, &ended, now).await {
                Ok(tokens) => Ok(StoredResponse::json(StatusCode::OK, &tokens).shown_once(next_step)),
                // Not an error of the transaction: the end of the session must be committed.
                Err(Error::RefreshTokenReused) => Ok(refused(Error::RefreshTokenReused)),
                Err(error) => Err(error.into()),
            }
        })
    })
    .await
}

fn refused(error: Error) -> StoredResponse {
    let challenge = HeaderValue::from_static("Bearer realm=\"pillarbox\"");
    StoredResponse::problem(&error.into()).with_header(WWW_AUTHENTICATE, challenge)
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
    let sessions = flow::list(&identity, account.id, before, limit + 1).await?;
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
    run_ending_sessions(identity, request.as_ref(), StoreResponse::WithBody, |tx, ended| {
        Box::pin(async move {
            match session {
                Some(session) => flow::end(tx, user, session, &ended).await?,
                None => flow::end_all(tx, user, &ended).await?,
            }
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}
