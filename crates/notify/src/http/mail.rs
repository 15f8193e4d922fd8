//! The e-mails of the installation, for operators, under `/admin/v1/mail`.

use std::sync::Arc;

use axum::extract::State;
use http_kit::auth::Operator;
use http_kit::extract::{Json, Path};
use http_kit::idempotency::{Mutation, StoredResponse};
use http_kit::openapi;
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::Problem;
use serde::Deserialize;
use serde_json::json;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::IDEMPOTENCY_KEY;
use super::retry::{self, Retried};
use crate::Notify;
use crate::domain::Status;
use crate::error::Error;
use crate::flow::operator;
use crate::store::{DeadMails, MailFilter};
use crate::view::{BulkRetry, MailView};

pub(crate) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(retry_many))
        .routes(routes!(show))
        .routes(routes!(retry_one))
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

/// Selects the dead e-mails of a bulk retry: filters, or `all`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DeadEmailSelection)]
struct DeadMailSelection {
    /// Only e-mails to this address, in upper or lower case.
    to: Option<String>,
    /// Only e-mails of this template, such as `verification`.
    template: Option<String>,
    /// All dead e-mails, without a filter.
    #[serde(default)]
    all: bool,
}

impl DeadMailSelection {
    /// Fails unless it has either filters or `all`: an empty request must not affect every e-mail.
    fn into_dead_mails(self) -> Result<DeadMails, Error> {
        let DeadMailSelection { to, template, all } = self;
        let has_filter = to.is_some() || template.is_some();
        if all && has_filter {
            return Err(Error::AllAndFilters);
        }
        if !all && !has_filter {
            return Err(Error::NoFilter);
        }
        Ok(DeadMails::new(to, template))
    }
}

/// Describes a [`DeadMailSelection`] that is not empty.
struct DeadMailChoice;

impl PartialSchema for DeadMailChoice {
    fn schema() -> RefOr<Schema> {
        openapi::filters_or_all(DeadMailSelection::schema(), json!({"template": "verification"}))
    }
}

impl ToSchema for DeadMailChoice {
    fn name() -> std::borrow::Cow<'static, str> {
        DeadMailSelection::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        DeadMailSelection::schemas(schemas);
    }
}

/// List e-mails, newest first
///
/// `text`, `html` and `headers` are shown for captured e-mails only. Other e-mails are for their recipients, whose secrets they
/// contain.
#[utoipa::path(get, path = "/admin/v1/mail", operation_id = "listEmails", tag = "notify", params(Listing<MailFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<MailView>)))]
async fn list(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Listing { filters, limit, cursor }: Listing<MailFilters>,
) -> Result<Page<MailView>, Problem> {
    let scope = PageScope::global(&notify.cursor_key, "mail", &filters);
    let before = scope.position(cursor.as_deref())?;
    let MailFilters { to, status, template } = filters;
    let filter = MailFilter { recipient: to.map(operator::stored_address), status, template };
    let mails = operator::list(&notify.db, &filter, before, limit + 1).await?;
    Ok(scope.cut(mails, limit, |mail| mail.id).map(MailView::from))
}

/// Show an e-mail
///
/// `text`, `html` and `headers` are shown for captured e-mails only.
#[utoipa::path(get, path = "/admin/v1/mail/{id}", operation_id = "getEmail", tag = "notify", params(("id" = i64, Path)),
    security(("bearer" = [])),
    responses((status = 200, body = MailView), (status = 404, description = "The e-mail does not exist")))]
async fn show(State(notify): State<Arc<Notify>>, _: Operator, Path(id): Path<i64>) -> Result<Json<MailView>, Problem> {
    Ok(Json(operator::show(&notify.db, id).await?.into()))
}

/// Retry a dead e-mail
#[utoipa::path(post, path = "/admin/v1/mail/{id}/retry", operation_id = "retryEmail", tag = "notify",
    params(("id" = i64, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 202, description = "The e-mail is queued again and due now"),
        (status = 404, description = "The e-mail does not exist"),
        (status = 409, description = "The e-mail is not dead, or its text was erased")))]
async fn retry_one(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Path(id): Path<i64>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    retry::retry(&notify, Retried::Email(id), identity).await
}

/// Retry many dead e-mails
///
/// Queues up to 100,000 e-mails again in transactions of 1,000; `more` tells whether to repeat the request. E-mails whose text was
/// erased stay dead. It needs no Idempotency-Key: retried e-mails are no longer dead, so a repeated request continues with the
/// rest.
#[utoipa::path(post, path = "/admin/v1/mail/retry", operation_id = "retryEmails", tag = "notify", request_body = DeadMailChoice, security(("bearer" = [])),
    responses((status = 200, body = BulkRetry)))]
async fn retry_many(
    State(notify): State<Arc<Notify>>,
    _: Operator,
    Json(selection): Json<DeadMailSelection>,
) -> Result<Json<BulkRetry>, Problem> {
    let (selection, retry_time) = (selection.into_dead_mails()?, notify.recorder.retry_time);
    let retried = operator::retry_dead_mails(&notify.db, &selection, retry_time).await.map_err(Error::Database)?;
    notify.wakes.mails.wake();
    Ok(Json(retried))
}
