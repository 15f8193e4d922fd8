//! Projects, their items, and their events.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{ETAG, LOCATION};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use http::HeaderValue;
use http_kit::auth::Caller;
use http_kit::etag::{IfMatch, IfNoneMatch};
use http_kit::event_stream::EventStream;
use http_kit::extract::Json;
use http_kit::idempotency::{JsonBody, Mutation, OptionalJsonBody, StoredResponse};
use http_kit::page::{Listing, NoFilters, Page, PageScope};
use http_kit::problem::{FieldError, Problem};
use serde::Deserialize;
use service::idempotency::{StoreResponse, run_once};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::{IDEMPOTENCY_KEY, Visible};
use crate::counts::Reading;
use crate::domain::{self, Change, Items, Project, Status};
use crate::error::Error;
use crate::flow::project::Requested;
use crate::flow::repeat::{answer_in_transaction, answer_once};
use crate::flow::{items, project as flow};
use crate::state::State as Counted;
use crate::view::{self, MarkedView, ProjectItem, ProjectView};
use crate::{Progress, watch};

/// The largest number of items in one request.
const ITEMS_MAX: usize = 1_000;

pub(super) fn router() -> OpenApiRouter<Arc<Progress>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(show, change))
        .routes(routes!(mark))
        .routes(routes!(restart))
        .routes(routes!(events))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewProject, example = json!({}))]
struct NewProject {
    /// Absent: a new UUID.
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,100}$")]
    id: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ProjectChange, example = json!({"total": 1000, "status": "CRAWLING"}))]
struct ProjectChange {
    /// The number of items, at most `progress.items_max` (10,000,000 by default). 0: not known yet.
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 10_000_000_i64)]
    total: Option<http_kit::field::Whole>,
    /// CRAWLING, PROCESSING_WAIT, PROCESSING or FAILED.
    status: Option<Status>,
}

/// The body of marks: one item, or a list of them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DoneItems {
    items: Option<Vec<DoneItem>>,
    id: Option<String>,
    error: Option<bool>,
}

/// The forms that [`DoneItems`] accepts, for the OpenAPI document.
#[derive(ToSchema)]
#[serde(untagged)]
#[schema(as = DoneItems)]
#[expect(dead_code, reason = "it only describes a body")]
enum DoneItemsBody {
    List(DoneItemList),
    One(DoneItem),
}

/// Items that are done.
#[derive(ToSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "it only describes a body")]
struct DoneItemList {
    #[schema(min_items = 1, max_items = 1_000)]
    items: Vec<DoneItem>,
}

/// An item that is done.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct DoneItem {
    /// Counts once in its project.
    #[schema(min_length = 1, max_length = 200, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")]
    id: String,
    /// Whether it has failed.
    #[serde(default)]
    error: bool,
}

/// Create a project
///
/// It is INITIALIZING, and all its counts are 0.
#[utoipa::path(post, path = "/progress/v1/projects", operation_id = "createProject", tag = "progress", request_body = Option<NewProject>,
    params(("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)), security(("bearer" = [])),
    responses((status = 201, body = ProjectView, headers(("location" = String, description = "The path of the project"))),
        (status = 409, description = "The id is in use, or the caller has too many unfinished projects")))]
async fn create(
    State(progress): State<Arc<Progress>>,
    caller: Caller,
    Mutation { body: OptionalJsonBody(body), identity }: Mutation<OptionalJsonBody<NewProject>>,
) -> Result<StoredResponse, Problem> {
    if let Some(id) = &body.id {
        domain::check_project_id(id)
            .map_err(|error| Error::Invalid(vec![FieldError::body("/id", error.to_string())]))?;
    }
    // Before anything is stored.
    progress.state.check().await.map_err(Error::State)?;
    let (now, ttl, unfinished_max) = (progress.clock.now(), progress.ttl, progress.unfinished_max);
    let view_times = progress.view_times();
    let created = run_once(&progress.db, identity.as_ref(), StoreResponse::WithBody, |tx| {
        Box::pin(async move {
            let project = flow::create(tx, &caller, body.id, now, ttl, unfinished_max).await?;
            let reading = Reading::of(domain::Snapshot::INITIAL);
            Ok(StoredResponse::json(StatusCode::CREATED, &ProjectView::new(&project, &reading, view_times)))
        })
    })
    .await?;
    if !created.status().is_success() {
        return Ok(created);
    }
    #[derive(Deserialize)]
    struct Created {
        id: String,
    }
    let Created { id } = serde_json::from_slice(created.body()).map_err(|error| Problem::internal(&error))?;
    // Also after a repeat: the first request may have failed in between.
    flow::initialise(&progress, &id).await?;
    let location = HeaderValue::try_from(format!("/progress/v1/projects/{id}"));
    Ok(created.with_header(LOCATION, location.map_err(|error| Problem::internal(&error))?))
}

/// List projects, newest first
///
/// Those of the caller, or of all callers for admins of the tenant `main`.
#[utoipa::path(get, path = "/progress/v1/projects", operation_id = "listProjects", tag = "progress", params(Listing<NoFilters>), security(("bearer" = [])),
    responses((status = 200, body = Page<ProjectItem>)))]
async fn list(
    State(progress): State<Arc<Progress>>,
    caller: Caller,
    Listing { filters, limit, cursor }: Listing<NoFilters>,
) -> Result<Page<ProjectItem>, Problem> {
    let owner = if caller.is_operator() { "all".to_owned() } else { domain::owner(&caller) };
    let scope = PageScope::of_owner(&progress.cursor_key, "progress projects", owner, &filters);
    let before: Option<(DateTime<Utc>, String)> = scope.position(cursor.as_deref())?;
    let projects = flow::list(&progress, &caller, before, limit + 1).await?;
    let page = scope.cut(projects, limit, |(project, _)| (project.created_at, project.id.clone()));
    Ok(page.map(|(project, reading)| ProjectItem::new(project, reading, progress.retention)))
}

/// Show a project
#[utoipa::path(get, path = "/progress/v1/projects/{id}", operation_id = "getProject", tag = "progress",
    params(("id" = String, Path),
        ("if-none-match" = Option<String>, Header, description = "The ETag of the response that the client has cached")),
    security(("bearer" = [])),
    responses((status = 200, body = ProjectView, headers(("etag" = String, description = "Changes with the project"))),
        (status = 304, description = "The cached response is current"),
        (status = 404, description = "The project does not exist"), (status = 409, description = "The counts are lost")))]
async fn show(
    State(progress): State<Arc<Progress>>,
    Visible(project): Visible,
    if_none_match: IfNoneMatch,
) -> Result<Response, Problem> {
    let (project, reading) = flow::read(&progress, project).await?;
    let view = ProjectView::new(&project, &reading, progress.view_times());
    let tag = view::tag(&project, &reading.snapshot, &view);
    if if_none_match.matches(&tag) {
        Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response())
    } else {
        Ok(([(ETAG, tag)], Json(view)).into_response())
    }
}

/// Set the total and the status
///
/// A project completes when it has a total, as many items are done, and it is not CRAWLING. After that nothing changes.
/// `If-Match` compares the status and the total; items that are marked in between do not matter.
#[utoipa::path(patch, path = "/progress/v1/projects/{id}", operation_id = "updateProject", tag = "progress", request_body = ProjectChange,
    params(("id" = String, Path),
        ("if-match" = Option<String>, Header, description = "The ETag of the project as the client knows it"),
        ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = ProjectView, headers(("etag" = String, description = "Changes with the project"))),
        (status = 404, description = "The project does not exist"),
        (status = 409, description = "The status does not allow it, or the counts are lost"),
        (status = 412, description = "The status or the total has changed since the given ETag")))]
async fn change(
    State(progress): State<Arc<Progress>>,
    Visible(project): Visible,
    if_match: IfMatch,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<ProjectChange>>,
) -> Result<StoredResponse, Problem> {
    let total = body.total.map(|http_kit::field::Whole(total)| total);
    // A project with more items than are counted could never complete.
    let total_max = progress.items_max;
    if total.is_some_and(|total| !(0..=total_max).contains(&total)) {
        let detail = format!(
            "must be a number from 0 to {total_max}, the maximum of one project: distribute the items over several projects, or \
             raise the setting progress.items_max"
        );
        return Err(Error::Invalid(vec![FieldError::body("/total", detail)]).into());
    }
    let request = identity.as_ref().map(|identity| Uuid::from_bytes(identity.id).simple().to_string());
    let requested = Requested { change: Change { status: body.status, total }, if_match, request };
    let postgres = match &*progress.state {
        Counted::Postgres(postgres) => postgres.clone(),
        Counted::Redis(redis) => {
            let changing = async {
                let (project, reading) = flow::change(&progress, redis, project, &requested).await?;
                Ok(shown(&progress, &project, &reading))
            };
            return answer_once(&progress.db, identity.as_ref(), changing).await;
        }
    };
    let _permit = postgres.gates.enter(&project.id).await;
    let (id, service) = (project.id.clone(), progress.clone());
    let answer = answer_in_transaction(&progress.db, identity.as_ref(), |tx| {
        Box::pin(async move {
            let (project, reading) = flow::change_in(tx, &service, &postgres, &id, &requested).await?;
            Ok(shown(&service, &project, &reading))
        })
    });
    let answer = answer.await?;
    progress.projects.invalidate(&project.id).await;
    Ok(answer)
}

/// Mark items as done
///
/// One, or up to 1,000. An id counts once, however often it is marked. The items of a finished project have no effect.
#[utoipa::path(post, path = "/progress/v1/projects/{id}/items", operation_id = "markProjectItems", tag = "progress",
    request_body(content = DoneItemsBody, example = json!({"items": [{"id": "page-1"}, {"id": "page-2", "error": true}]})),
    params(("id" = String, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = MarkedView), (status = 404, description = "The project does not exist"),
        (status = 409, description = "The counts are lost")))]
async fn mark(
    State(progress): State<Arc<Progress>>,
    Visible(project): Visible,
    Mutation { body: JsonBody(body), identity }: Mutation<JsonBody<DoneItems>>,
) -> Result<StoredResponse, Problem> {
    let items = checked(body).map_err(Error::Invalid)?;
    let marking = async {
        let changed = items::mark(&progress, project, &items).await?;
        Ok(StoredResponse::json(StatusCode::OK, &MarkedView::from(changed)))
    };
    answer_once(&progress.db, identity.as_ref(), marking).await
}

/// Initialise lost counts again
///
/// Afterwards set the total and the status, and send all items again.
#[utoipa::path(post, path = "/progress/v1/projects/{id}/restart", operation_id = "restartProject", tag = "progress",
    params(("id" = String, Path), ("idempotency-key" = Option<String>, Header, description = IDEMPOTENCY_KEY)),
    security(("bearer" = [])),
    responses((status = 200, body = ProjectView), (status = 404, description = "The project does not exist"),
        (status = 409, description = "The counts are not lost")))]
async fn restart(
    State(progress): State<Arc<Progress>>,
    Visible(project): Visible,
    Mutation { identity, .. }: Mutation<()>,
) -> Result<StoredResponse, Problem> {
    let (now, ttl) = (progress.clock.now(), progress.ttl);
    let restarting = async {
        let (project, reading) = flow::restart(&progress, project, now, ttl).await?;
        Ok(shown(&progress, &project, &reading))
    };
    answer_once(&progress.db, identity.as_ref(), restarting).await
}

/// Follow a project
///
/// Server-sent events `progress`, each with the project as JSON: its state now, and whenever it changes. A client that connects
/// again with `Last-Event-ID` gets the current state if it has not seen it. The stream ends after the final state; a client that
/// has seen it gets 204.
#[utoipa::path(get, path = "/progress/v1/projects/{id}/events", operation_id = "watchProject", tag = "progress",
    params(("id" = String, Path), ("last-event-id" = Option<String>, Header, description = "The id of the last event that the client has got")),
    security(("bearer" = [])),
    responses((status = 200, body = ProjectView, content_type = "text/event-stream", description = "A stream that stays open; `data` of each event is the project"),
        (status = 204, description = "The client has seen the final state"),
        (status = 404, description = "The project does not exist"), (status = 409, description = "The counts are lost")))]
async fn events(
    State(progress): State<Arc<Progress>>,
    Visible(project): Visible,
    stream: EventStream,
) -> Result<Response, Problem> {
    match watch::events(&progress, project, stream.last_event_id.clone()).await? {
        Some(events) => Ok(stream.respond(events)),
        None => Ok(StatusCode::NO_CONTENT.into_response()),
    }
}

fn shown(progress: &Progress, project: &Project, reading: &Reading) -> StoredResponse {
    let view = ProjectView::new(project, reading, progress.view_times());
    StoredResponse::json(StatusCode::OK, &view).with_header(ETAG, view::tag(project, &reading.snapshot, &view))
}

/// Checks the items. Fails with the errors of all invalid ones.
fn checked(body: DoneItems) -> Result<Items, Vec<FieldError>> {
    let is_list = body.items.is_some();
    let marks: Vec<(String, bool)> = match (body.items, body.id, body.error) {
        (Some(items), None, None) => items.into_iter().map(|item| (item.id, item.error)).collect(),
        (None, Some(id), error) => vec![(id, error.unwrap_or_default())],
        _ => return Err(vec![FieldError::body("", "must have either `items`, or `id` and optionally `error`")]),
    };
    if marks.is_empty() || marks.len() > ITEMS_MAX {
        return Err(vec![FieldError::body("/items", format!("must have 1 to {ITEMS_MAX} items"))]);
    }
    let pointer = |at: usize| if is_list { format!("/items/{at}/id") } else { "/id".to_owned() };
    let check = |(at, (id, _)): (usize, &(String, bool))| {
        domain::check_item_id(id).err().map(|error| FieldError::body(pointer(at), error.to_string()))
    };
    let errors: Vec<FieldError> = marks.iter().enumerate().filter_map(check).collect();
    if errors.is_empty() { Ok(Items::new(marks)) } else { Err(errors) }
}
