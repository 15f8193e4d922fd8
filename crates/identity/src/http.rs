//! The HTTP API, under `/identity/v1`. A request about an account requires a [`Member`]; registration, sign-in and requests
//! for e-mails require no caller.

mod account;
mod discovery;
mod password;
mod registration;
mod sessions;
mod subscriptions;
mod users;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::middleware::map_response;
use axum::response::Response;
use http::StatusCode;
use http::header::USER_AGENT;
use http_kit::auth::{Caller, Operator};
use http_kit::client_address::ClientAddress;
use http_kit::idempotency::{RequestIdentity, StoredResponse};
use http_kit::openapi::{self, RouteProblem};
use http_kit::problem::Problem;
use service::idempotency::{Effect, StoreResponse, run_once};
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::Identity;
use crate::domain::{Account, Role};
use crate::error::Error;
use crate::flow::{ClientInfo, EndedSessions, Tx, session};

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";
/// The same for responses that are not stored, because they contain a secret or personal data.
const IDEMPOTENCY_KEY_ONCE: &str = "A repeated request with the same key has no further effect; its response is 409, because the first one is not stored";
/// The same for requests that end the session that they are made with.
const IDEMPOTENCY_KEY_ENDS: &str = "A repeated request with the same key has no further effect; its response is 401, because the first one has ended the session";
const USER_AGENT_CHARS_MAX: usize = 200;
/// The delay of an answer that refuses an attempt above a limit. A client that repeats the request at once instead of waiting as
/// long as the header `Retry-After` says sends four per second over a connection, and not thousands.
const REFUSAL_DELAY: Duration = Duration::from_millis(250);

const ONCE: &str = "the first request succeeded, and the secret in its response is shown only once: sign in again";
const LATER: &str = "too many attempts: try again later";
const NO_TOKEN: &str = "this token is unknown, was used or has expired: request a new one with POST /identity/v1/verify/resend, or with POST /identity/v1/password/forgot";
const BUSY: &str = "too many sign-ins and registrations at once";

/// The problems of the service's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("POST /identity/v1/register", 429, "too-many-attempts", LATER),
    ("POST /identity/v1/verify/resend", 429, "too-many-attempts", LATER),
    ("POST /identity/v1/verify", 404, "token-not-found", NO_TOKEN),
    ("POST /identity/v1/login", 401, "wrong-credentials", "the e-mail address or the password is wrong"),
    (
        "POST /identity/v1/login",
        403,
        "email-not-verified",
        "the e-mail address is not verified yet: open the link in the e-mail",
    ),
    ("POST /identity/v1/login", 409, "already-answered", ONCE),
    ("POST /identity/v1/login", 429, "too-many-attempts", LATER),
    ("POST /identity/v1/login", 503, "overloaded", BUSY),
    (
        "POST /identity/v1/refresh",
        401,
        "invalid-refresh-token",
        "this refresh token is unknown or has expired: sign in again",
    ),
    (
        "POST /identity/v1/refresh",
        401,
        "refresh-token-reused",
        "this refresh token was used before, so the session has ended: sign in again",
    ),
    ("POST /identity/v1/refresh", 409, "already-answered", ONCE),
    ("PATCH /identity/v1/me", 409, "already-answered", ONCE),
    ("DELETE /identity/v1/me", 403, "wrong-password", "the password is wrong"),
    ("DELETE /identity/v1/me", 429, "too-many-attempts", LATER),
    ("DELETE /identity/v1/sessions/{id}", 404, "session-not-found", "this session does not exist"),
    ("POST /identity/v1/password/change", 403, "wrong-password", "the password is wrong"),
    ("POST /identity/v1/password/change", 409, "already-answered", ONCE),
    ("POST /identity/v1/password/change", 429, "too-many-attempts", LATER),
    ("POST /identity/v1/password/forgot", 429, "too-many-attempts", LATER),
    ("POST /identity/v1/password/reset", 404, "token-not-found", NO_TOKEN),
    ("PUT /identity/v1/users/{id}/role", 404, "user-not-found", "this user does not exist"),
    (
        "POST /identity/v1/subscriptions",
        409,
        "subscription-exists",
        "there is a subscription to this plan already: cancel it first",
    ),
    (
        "POST /identity/v1/subscriptions",
        409,
        "too-many-subscriptions",
        "a user has at most 20 subscriptions that have not ended",
    ),
    ("* /identity/v1/subscriptions/{id}*", 404, "subscription-not-found", "this subscription does not exist"),
    (
        "POST /identity/v1/subscriptions/{id}/*",
        409,
        "transition-refused",
        "a subscription that is expired cannot become active: it has ended",
    ),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Identity>> {
    let mut router = OpenApiRouter::new()
        .merge(registration::router())
        .merge(sessions::router())
        .merge(account::router())
        .merge(password::router())
        .merge(users::router())
        .merge(subscriptions::router())
        .merge(discovery::router());
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router.layer(map_response(delay_refusal))
}

/// During the delay, a request occupies its connection and nothing else.
async fn delay_refusal(response: Response) -> Response {
    if response.status() == StatusCode::TOO_MANY_REQUESTS {
        tokio::time::sleep(REFUSAL_DELAY).await;
    }
    response
}

/// A user with an account and a live session. As the first extractor of a handler it rejects other callers before anything
/// else of the request is read. It checks in the database, so a session that was ended in any process is refused at once.
struct Member {
    account: Account,
    session: Uuid,
}

impl FromRequestParts<Arc<Identity>> for Member {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, identity: &Arc<Identity>) -> Result<Member, Problem> {
        let caller = <Caller as FromRequestParts<Arc<Identity>>>::from_request_parts(parts, identity).await?;
        let (Some(user), Some(session)) = (caller.user_id(), caller.session) else {
            return Err(Error::NoAccount.into());
        };
        Ok(Member { account: session::find_account(identity, user, session).await?, session })
    }
}

/// An operator. The account of one who has signed in must still be an admin, and the session must live, according to the
/// database: a token outlives the role that it was signed with, and must not serve to restore it.
struct CurrentOperator(Caller);

impl FromRequestParts<Arc<Identity>> for CurrentOperator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, identity: &Arc<Identity>) -> Result<CurrentOperator, Problem> {
        let Operator(caller) = Operator::from_request_parts(parts, identity).await?;
        if caller.session.is_some() {
            let Member { account, .. } = Member::from_request_parts(parts, identity).await?;
            if account.role != Role::Admin {
                return Err(Problem::forbidden("only operators may do this: admins of the tenant main"));
            }
        }
        Ok(CurrentOperator(caller))
    }
}

/// Runs an effect that may end sessions, once for each `Idempotency-Key`. This process refuses the tokens of those sessions after
/// the commit.
async fn run_ending_sessions<F>(
    identity: &Identity,
    request: Option<&RequestIdentity>,
    store: StoreResponse,
    effect: F,
) -> Result<StoredResponse, Problem>
where
    F: for<'t> FnOnce(&'t mut Tx<'_>, EndedSessions) -> Effect<'t> + Send,
{
    let ended = EndedSessions::default();
    let ends = ended.clone();
    let response = run_once(&identity.db, request, store, |tx| effect(tx, ends)).await?;
    ended.apply(&identity.tokens);
    Ok(response)
}

impl FromRequestParts<Arc<Identity>> for ClientInfo {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Identity>) -> Result<ClientInfo, Infallible> {
        let client = parts.extensions.get::<ClientAddress>();
        let user_agent = parts.headers.get(USER_AGENT).and_then(|value| value.to_str().ok());
        let shown = |text: &str| text.chars().take(USER_AGENT_CHARS_MAX).collect::<String>();
        Ok(ClientInfo { network: client.map(|client| client.network()), user_agent: user_agent.map(shown) })
    }
}
