//! The HTTP API: the routes of all features.

use std::sync::Arc;

use utoipa_axum::router::OpenApiRouter;

use crate::{Administration, audit, caller, keys, operator, overview, portal_tokens, tenants};

pub(crate) fn router() -> OpenApiRouter<Arc<Administration>> {
    keys::http::router()
        .merge(tenants::http::router())
        .merge(audit::http::router())
        .merge(operator::http::router())
        .merge(overview::router())
}

/// The routes below `/hub/v1`.
pub(crate) fn hub_router() -> OpenApiRouter<Arc<Administration>> {
    portal_tokens::http::router().merge(caller::router())
}
