//! The HTTP API, under `/progress/v1/projects`: for users, for API keys, and for operators. To a caller, the
//! project of another owner does not exist.

mod projects;

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use http_kit::auth::Caller;
use http_kit::extract::Path;
use http_kit::openapi::{self, RouteProblem};
use http_kit::problem::Problem;
use utoipa_axum::router::OpenApiRouter;

use crate::Progress;
use crate::domain::Project;
use crate::error::Error;
use crate::flow;

/// The description of the header `Idempotency-Key` in the OpenAPI document.
const IDEMPOTENCY_KEY: &str = "A repeated request with the same key has no further effect and gets the same response";

const NO_PROJECT: &str = "this project does not exist";
const LOST: &str = "the counts of this project are lost: the server that had them was restarted or emptied, or has evicted them. \
                    Initialise them with POST /progress/v1/projects/crawl-42/restart, set the total and the status, and send \
                    all items again; an item still counts once";
const FINISHED: &str = "the project is DONE, which is final: create another project for further items";

/// The problems of the service's own errors, for the OpenAPI document.
const PROBLEMS: &[RouteProblem] = &[
    (
        "POST /progress/v1/projects",
        409,
        "project-exists",
        "there is a project with this id already: choose another id, or none to get a new one",
    ),
    (
        "POST /progress/v1/projects",
        409,
        "too-many-projects",
        "you have 10000 unfinished projects, which is the maximum: finish some of them, set them to FAILED, or wait until they expire",
    ),
    (
        "POST /progress/v1/projects/{id}/items",
        409,
        "too-many-items",
        "the project would have more than 10000000 items, which is the maximum of one project",
    ),
    ("* /progress/v1/projects/{id}*", 404, "project-not-found", NO_PROJECT),
    ("GET /progress/v1/projects/{id}*", 409, "progress-lost", LOST),
    ("PATCH /progress/v1/projects/{id}", 409, "progress-lost", LOST),
    ("PATCH /progress/v1/projects/{id}", 409, "project-finished", FINISHED),
    (
        "PATCH /progress/v1/projects/{id}",
        409,
        "transition-refused",
        "a project that is PROCESSING cannot be set to INITIALIZING: set CRAWLING, PROCESSING_WAIT, PROCESSING or FAILED",
    ),
    ("POST /progress/v1/projects/{id}/items", 409, "progress-lost", LOST),
    ("POST /progress/v1/projects/{id}/restart", 409, "progress-lost", LOST),
    (
        "POST /progress/v1/projects/{id}/restart",
        409,
        "progress-not-lost",
        "the counts of this project are complete, so there is no reason to initialise them again",
    ),
];

pub(crate) fn router() -> OpenApiRouter<Arc<Progress>> {
    let mut router = projects::router();
    openapi::document(router.get_openapi_mut(), PROBLEMS);
    router
}

/// The project of the path, if the caller may see it. As the first extractor of a handler it rejects strangers before anything
/// else of the request is read.
struct Visible(Arc<Project>);

impl FromRequestParts<Arc<Progress>> for Visible {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, progress: &Arc<Progress>) -> Result<Visible, Problem> {
        let caller = <Caller as FromRequestParts<Arc<Progress>>>::from_request_parts(parts, progress).await?;
        let Path(id) = Path::<String>::from_request_parts(parts, progress).await?;
        let project = flow::find(progress, &id).await?;
        if project.is_visible_to(&caller) { Ok(Visible(project)) } else { Err(Error::NotFound.into()) }
    }
}
