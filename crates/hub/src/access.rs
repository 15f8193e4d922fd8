//! Who may call which route: the first extractor of each handler.
//!
//! A handler for producers extracts a [`Producer`], one that shows the catalogue a [`CatalogueReader`], one that changes it a
//! [`CatalogueManager`], a management handler a [`Manager`]. Each sees only the caller's tenant: its own, or the one that a key
//! of the tenant `main` acts for.

use std::fmt::Debug;

use axum::extract::FromRequestParts;
use http::request::Parts;
use http_kit::auth::{Caller, PortalAccess, Role};
use http_kit::page::PageScope;
use http_kit::problem::Problem;

use crate::Hub;

/// A caller with the role `ingest`. Handlers extract it first, so that the role is checked before anything else of the
/// request.
pub(crate) struct Producer(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for Producer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Producer, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        caller.require(Role::Ingest)?;
        // A key of the tenant is refused earlier; this is an operator who acts for it.
        caller.require_active_tenant()?;
        Ok(Producer(caller))
    }
}

/// A caller who may read the catalogue: one with the role `ingest`, which posts what the catalogue describes, or with a portal
/// token.
pub(crate) struct CatalogueReader(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for CatalogueReader {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<CatalogueReader, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        if caller.portal.is_none() {
            caller.require(Role::Ingest)?;
        }
        Ok(CatalogueReader(caller))
    }
}

/// A caller with the role `manage`. The catalogue describes what the producer posts, so portal tokens, which are for a tenant's
/// own people, may not change it.
pub(crate) struct CatalogueManager(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for CatalogueManager {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<CatalogueManager, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        if caller.portal.is_some() {
            return Err(Problem::forbidden(
                "portal tokens may not change event types: use an API key with the role manage",
            ));
        }
        caller.require(Role::Manage)?;
        Ok(CatalogueManager(caller))
    }
}

/// A caller with the role `manage`, or with a portal token, which may be for reading only. Handlers extract it first, so that
/// the permission is checked before anything else of the request.
pub(crate) struct Manager(pub(crate) Caller);

impl<S: Send + Sync> FromRequestParts<S> for Manager {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Manager, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        match caller.portal {
            Some(PortalAccess::Manage) => Ok(Manager(caller)),
            Some(PortalAccess::Read) if parts.method.is_safe() => Ok(Manager(caller)),
            Some(PortalAccess::Read) => {
                Err(Problem::forbidden("this portal token is for reading only: create one with the access manage"))
            }
            None => {
                caller.require(Role::Manage)?;
                Ok(Manager(caller))
            }
        }
    }
}

/// The scope of a list that contains the rows of the caller's tenant.
pub(crate) fn page_scope<'a>(hub: &'a Hub, list: &str, caller: &Caller, filters: &impl Debug) -> PageScope<'a> {
    PageScope::of_owner(&hub.cursor_key, format_args!("hub {list}"), caller.tenant.as_str(), filters)
}

/// Accepts the pattern `order.*` of a subscription for the filter `order`, which matches the type and all types below
/// it.
pub(crate) fn type_prefix(event_type: Option<String>) -> Option<String> {
    event_type.map(|event_type| event_type.strip_suffix(".*").unwrap_or(&event_type).to_owned())
}
