//! The users behind aggregates, for operators and for API keys of the tenant `main` with the role `manage`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use http_kit::extract::Path;
use http_kit::field::Parsed;
use http_kit::idempotency::{JsonBody, Mutation, RequestIdentity, StoredResponse};
use http_kit::page::{Listing, Page, PageScope};
use http_kit::problem::{FieldError, Problem};
use pillarbox::log::Tenant;
use serde::{Deserialize, Serialize};
use service::idempotency::{StoreResponse, run_once};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, RecipientManager};
use crate::Notify;
use crate::flow::recipients::{self as flow, ImportedRow};
use crate::store::recipients::{NewContact, Recipient, RecipientFilter};

/// Rows per import.
const ROWS_MAX: usize = 10_000;

pub(super) fn router() -> OpenApiRouter<Arc<Notify>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(put, delete)).routes(routes!(import))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RecipientFilters {
    /// Only recipients of this type.
    aggregate_type: Option<String>,
    /// Only recipients of this aggregate.
    aggregate_id: Option<i64>,
    /// Only this user.
    user_id: Option<Uuid>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Recipient)]
struct RecipientView {
    aggregate_type: String,
    /// Absent for a user who stands behind every aggregate of the type.
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<i64>,
    user_id: Uuid,
}

/// An import.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ImportedRecipientList, example = json!({"recipients": [{"aggregate_type": "RESTAURANT", "aggregate_id": 5,
    "user_id": "0197a1f2-7c3e-7d4a-9b1c-2f3e4d5a6b7c"}]}))]
struct NewRecipients {
    #[schema(value_type = Vec<NewRecipient>, min_items = 1, max_items = 10000)]
    recipients: Vec<Parsed<NewRecipient>>,
}

/// A row of an import.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ImportedRecipient, example = json!({"aggregate_type": "RESTAURANT", "aggregate_id": 5,
    "user_id": "0197a1f2-7c3e-7d4a-9b1c-2f3e4d5a6b7c"}))]
struct NewRecipient {
    #[schema(value_type = String, required = true)]
    aggregate_type: Option<Parsed<String>>,
    /// Null or absent: every aggregate of the type.
    #[serde(default)]
    #[schema(value_type = Option<i64>)]
    aggregate_id: Parsed<Option<i64>>,
    #[schema(value_type = Uuid, required = true)]
    user_id: Option<Parsed<Uuid>>,
    /// How to reach a user of another issuer. Of a user with an account, identity knows the address.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    email: Parsed<Option<String>>,
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    name: Parsed<Option<String>>,
    /// Such as `en` or `pt-BR`.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    locale: Parsed<Option<String>>,
    /// The tenant whose webhook subscribers get the user's notifications.
    #[serde(default)]
    #[schema(value_type = Option<http_kit::openapi::TenantName>)]
    tenant: Parsed<Option<Tenant>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ImportedRecipients)]
struct Imported {
    /// The number of rows.
    rows: usize,
    /// Of these, the recipients that were new.
    added: u64,
    /// The values that were ignored because identity knows them of users with an account; at most 100 rows are listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ignored: Vec<IgnoredRow>,
}

/// A row of which a part was ignored.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = IgnoredRecipientFields)]
struct IgnoredRow {
    #[schema(example = "/recipients/3")]
    pointer: String,
    #[schema(example = "email, name and locale come from the user's account")]
    detail: &'static str,
}

/// The aggregate in a path: its number, or `all` for every aggregate of the type.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct AggregateOrAll(Option<i64>);

impl TryFrom<String> for AggregateOrAll {
    type Error = &'static str;

    fn try_from(text: String) -> Result<AggregateOrAll, &'static str> {
        match (text.as_str(), text.parse()) {
            ("all", _) => Ok(AggregateOrAll(None)),
            (_, Ok(number)) => Ok(AggregateOrAll(Some(number))),
            (_, Err(_)) => Err("must be a number, or all for every aggregate of the type"),
        }
    }
}

/// The path of a recipient.
#[derive(Debug, Deserialize)]
struct RecipientPath {
    aggregate_type: String,
    aggregate: AggregateOrAll,
    user_id: Uuid,
}

impl From<RecipientPath> for Recipient {
    fn from(path: RecipientPath) -> Recipient {
        let RecipientPath { aggregate_type, aggregate: AggregateOrAll(aggregate_id), user_id } = path;
        Recipient { aggregate_type, aggregate_id, user_id }
    }
}

/// List recipients
///
/// For operators, and for API keys of the tenant `main` with the role `manage`.
#[utoipa::path(get, path = "/notify/v1/recipients", operation_id = "listRecipients", tag = "notify", params(Listing<RecipientFilters>),
    security(("bearer" = [])), responses((status = 200, body = Page<RecipientView>)))]
async fn list(
    State(notify): State<Arc<Notify>>,
    _: RecipientManager,
    Listing { filters, limit, cursor }: Listing<RecipientFilters>,
) -> Result<Page<RecipientView>, Problem> {
    let scope = PageScope::global(&notify.cursor_key, "notify recipients", &filters);
    let after: Option<(Uuid, String, Option<i64>)> = scope.position(cursor.as_deref())?;
    let RecipientFilters { aggregate_type, aggregate_id, user_id } = filters;
    let filter = RecipientFilter { aggregate_type, aggregate_id, user_id };
    let found = flow::list(&notify.db, &filter, after.as_ref(), limit + 1).await?;
    let position = |one: &Recipient| (one.user_id, one.aggregate_type.clone(), one.aggregate_id);
    Ok(scope.cut(found, limit, position).map(RecipientView::from))
}

/// Make a user a recipient
///
/// For operators, and for API keys of the tenant `main` with the role `manage`. `aggregate` is a number, or `all`.
#[utoipa::path(put, path = "/notify/v1/recipients/{aggregate_type}/{aggregate}/{user_id}", operation_id = "setRecipient", tag = "notify",
    params(("aggregate_type" = String, Path), ("aggregate" = String, Path), ("user_id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])), responses((status = 204, description = "The user is a recipient")))]
async fn put(
    State(notify): State<Arc<Notify>>,
    _: RecipientManager,
    Path(path): Path<RecipientPath>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let recipient = Recipient::from(path);
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::add(tx, &recipient).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Remove a recipient
///
/// For operators, and for API keys of the tenant `main` with the role `manage`. Notifications that exist remain.
#[utoipa::path(delete, path = "/notify/v1/recipients/{aggregate_type}/{aggregate}/{user_id}", operation_id = "deleteRecipient", tag = "notify",
    params(("aggregate_type" = String, Path), ("aggregate" = String, Path), ("user_id" = Uuid, Path),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])), responses((status = 204, description = "The user is not a recipient (any more)")))]
async fn delete(
    State(notify): State<Arc<Notify>>,
    _: RecipientManager,
    Path(path): Path<RecipientPath>,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let recipient = Recipient::from(path);
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            flow::remove(tx, &recipient).await?;
            Ok(StoredResponse::empty(StatusCode::NO_CONTENT))
        })
    })
    .await
}

/// Import recipients
///
/// For operators, and for API keys of the tenant `main` with the role `manage`. Up to 10,000 rows, all of them or none: the
/// errors name the rows, up to 100 of them. A repeated import changes nothing.
#[utoipa::path(post, path = "/notify/v1/recipients/import", operation_id = "importRecipients", tag = "notify",
    request_body = NewRecipients,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])), responses((status = 200, body = Imported)))]
async fn import(
    State(notify): State<Arc<Notify>>,
    _: RecipientManager,
    Mutation { body: JsonBody(NewRecipients { recipients: rows }), identity }: Mutation<JsonBody<NewRecipients>>,
) -> Result<StoredResponse, Problem> {
    if rows.is_empty() || rows.len() > ROWS_MAX {
        let detail = format!("must be a list of 1 to {ROWS_MAX} recipients");
        return Err(Problem::validation(vec![FieldError::body("/recipients", detail)]));
    }
    run_import(&notify, identity, rows.into_iter().map(imported_row).collect()).await
}

async fn run_import(
    notify: &Notify,
    identity: Option<RequestIdentity>,
    rows: Vec<ImportedRow>,
) -> Result<StoredResponse, Problem> {
    run_once(&notify.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let flow::ImportResult { added, with_account } = flow::import(tx, &rows).await?;
            let ignored = with_account.into_iter().map(IgnoredRow::at).collect();
            Ok(StoredResponse::json(StatusCode::OK, &Imported { rows: rows.len(), added, ignored }))
        })
    })
    .await
}

impl IgnoredRow {
    fn at(row: usize) -> IgnoredRow {
        let detail = "email, name and locale come from the user's account";
        IgnoredRow { pointer: format!("/recipients/{row}"), detail }
    }
}

/// A row, with all that is wrong with its types. An invalid field has an arbitrary value.
fn imported_row(row: Parsed<NewRecipient>) -> ImportedRow {
    let mut errors = Vec::new();
    let Some(new) = row.collect("", &mut errors) else { return ImportedRow::invalid(errors) };
    let aggregate_type = Parsed::collect_required(new.aggregate_type, "/aggregate_type", &mut errors);
    let aggregate_id = new.aggregate_id.collect("/aggregate_id", &mut errors).flatten();
    let user_id = Parsed::collect_required(new.user_id, "/user_id", &mut errors).unwrap_or_default();
    let email = new.email.collect("/email", &mut errors).flatten();
    let name = new.name.collect("/name", &mut errors).flatten();
    let locale = new.locale.collect("/locale", &mut errors).flatten();
    let tenant = new.tenant.collect("/tenant", &mut errors).flatten().map(String::from);
    let has_contact = email.is_some() || name.is_some() || locale.is_some() || tenant.is_some();
    let contact = has_contact.then_some(NewContact { user_id, email, name, locale, tenant, version: 0 });
    let aggregate_type = aggregate_type.unwrap_or_default();
    ImportedRow { recipient: Recipient { aggregate_type, aggregate_id, user_id }, contact, errors }
}

impl From<Recipient> for RecipientView {
    fn from(Recipient { aggregate_type, aggregate_id, user_id }: Recipient) -> RecipientView {
        RecipientView { aggregate_type, aggregate_id, user_id }
    }
}
