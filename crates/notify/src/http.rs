//! The HTTP API for operators, under `/admin/v1/mail`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use kit::auth::Operator;
use kit::extract::Path;
use kit::idempotency::{Mutation, StoredResponse};
use kit::openapi::{self, RouteProblem};
use kit::page::{Listing, Page, PageScope};
use kit::problem::Problem;
use mailbox::idempotency::{StoreResponse, run_once};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Notify;
use crate::address;
use crate::domain::Status;
use crate::flow::operator;
use crate::store::MailFilter;
use crate::view::MailView;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";

/// The problems of the service's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    ("POST /admin/v1/mail/{id}/retry", 404, "mail-not-found", "there is no such e-mail (any more)"),
    ("POST /admin/v1/mail/{id}/retry", 409, "mail-not-dead", "only a dead e-mail can be retried"),
    ("POST /admin/v1/mail/{id}/retry", 409, "mail-erased", "this e-mail has expired, and its text was erased"),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Notify>> {
    let mut router = OpenApiRouter::new().routes(routes!(list)).routes(routes!(retry));
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MailFilters {
    /// Only e-mails to this address, in upper or lower case.
    to: Option<String>,
    /// Only e-mails with this status.
    #[param(inline)]
    status: Option<Status>,
    /// Only e-mails of this template, such as `verification`.
    template: Option<String>,
}

/// List e-mails, newest first
///
/// `text` and `html` are shown for captured e-mails only. Other e-mails are for their recipients, whose secrets they
/// contain.
#[utoipa::path(get, path = "/admin/v1/mail", tag = "notify", params(Listing<MailFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<MailView>)))]
async fn list(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<MailFilters>,
) -> Result<Page<MailView>, Problem> {
    let scope = PageScope::global(&notify.cursor_key, "mail", &filters);
    let before = scope.position(cursor.as_deref())?;
    let MailFilters { to, status, template } = filters;
    // Stored addresses have an ASCII domain.
    let recipient = to.map(|to| address::parse(&to).map_or(to, |address| address.to_string()));
    let filter = MailFilter { recipient, status, template };
    let mails = operator::list(&notify.db, &filter, before, limit + 1).await?;
    Ok(scope.cut(mails, limit, |mail| mail.id).map(MailView::from))
}

/// Retry a dead e-mail
#[utoipa::path(post, path = "/admin/v1/mail/{id}/retry", tag = "notify",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, description = "The e-mail is queued again and due now"),
        (status = 404, description = "The e-mail does not exist"),
        (status = 409, description = "The e-mail is not dead, or its text was erased")))]
async fn retry(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let retry_time = notify.recorder.retry_time;
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            operator::retry(tx, id, retry_time).await?;
            Ok(StoredResponse::empty(StatusCode::ACCEPTED))
        })
    })
    .await
}
