//! The layer that authenticates every API request, applies the rate limit, and decides which tenant the request acts for.

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;

use axum::extract::Request;
use axum::response::Response;
use http::{HeaderMap, header};

use pillarbox::log::{Tenant, TenantStanding};

use super::delegation::{ActsForTenant, TenantRoutes, requested_tenant};
use super::jwt::TokenVerifier;
use crate::admission::caller_id::{CallerId, Subject};
use crate::admission::caller_share;
use crate::admission::limit::RateLimits;
use crate::caller::Caller;
use crate::client_address::ClientAddress;
use crate::header::single_header;
use crate::problem::Problem;
use runtime::secret::digest;

/// The future of [`KeyStore::find`].
pub type KeyLookup<'a> = Pin<Box<dyn Future<Output = Result<Option<Caller>, Problem>> + Send + 'a>>;
/// The future of [`KeyStore::standing`].
pub type TenantLookup<'a> = Pin<Box<dyn Future<Output = Result<Option<TenantStanding>, Problem>> + Send + 'a>>;

/// Finds callers by their API keys and portal tokens, and tenants by their names.
pub trait KeyStore: Send + Sync + 'static {
    /// Returns the caller whose API key or portal token has this SHA-256 digest; None if it is unknown, expired or revoked.
    fn find(&self, digest: [u8; 32]) -> KeyLookup<'_>;

    /// Returns true if `find` can answer from memory.
    fn is_cached(&self, digest: &[u8; 32]) -> bool;

    /// Returns what the operator has decided about a tenant; None if there is no such tenant.
    fn standing<'a>(&'a self, tenant: &'a Tenant) -> TenantLookup<'a>;
}

/// Authenticates requests and counts them against the rate limit.
pub struct Authenticator {
    pub keys: Arc<dyn KeyStore>,
    pub tokens: Arc<TokenVerifier>,
    pub limits: RateLimits,
    /// Requests per second of each caller. None: no limit.
    pub rate: Option<NonZeroU32>,
    pub tenant_routes: TenantRoutes,
}

impl Authenticator {
    /// Returns None for a request without the header `Authorization`. Fails with 400, 401 or 429.
    async fn caller(&self, headers: &HeaderMap, client: Option<ClientAddress>) -> Result<Option<Caller>, Problem> {
        let Some(value) = single_header(headers, &header::AUTHORIZATION)? else { return Ok(None) };
        let credential =
            bearer(value).ok_or_else(|| Problem::unauthorized("send `Authorization: Bearer <JWT or API key>`"))?;
        // A JWT has three parts between dots; an API key has no dot.
        if credential.contains('.') {
            return self.tokens.verify(credential).map(Some);
        }
        let digest = digest(credential);
        // An address that guesses keys too fast causes no more lookups. Cached keys from the same address still work.
        if let Some(rate) = self.rate
            && !self.keys.is_cached(&digest)
        {
            let network = Subject::of_network(client);
            if self.limits.is_exhausted(network) {
                self.limits.check(network, rate, 1)?;
            }
        }
        match self.keys.find(digest).await? {
            Some(caller) => Ok(Some(caller)),
            None => Err(Problem::unauthorized("this API key is unknown, expired or revoked")),
        }
    }

    /// Returns the caller with the tenant that the request acts for, and what to record about it. Fails with 400, 403 or 404.
    async fn effective(
        &self,
        mut caller: Caller,
        headers: &HeaderMap,
        is_tenant_route: bool,
    ) -> Result<(Caller, Option<ActsForTenant>), Problem> {
        if caller.portal.is_some() && !is_tenant_route {
            return Err(Problem::forbidden("a portal token is accepted under /hub/v1 only"));
        }
        let Some(tenant) = requested_tenant(headers, is_tenant_route, Some(&caller))? else {
            caller.require_active_tenant()?;
            return Ok((caller, None));
        };
        let unknown = || {
            let detail = format!(
                "there is no tenant `{}`: check the spelling, or create it with POST /admin/v1/tenants",
                tenant.as_str()
            );
            Problem::not_found("tenant-not-found", detail)
        };
        caller.standing = self.keys.standing(&tenant).await?.ok_or_else(unknown)?;
        let acting = ActsForTenant { principal: caller.principal, tenant: tenant.clone() };
        caller.tenant = tenant;
        Ok((caller, Some(acting)))
    }
}

/// Adds the [`Caller`] to the request's extensions, and [`ActsForTenant`] if it acts for another tenant, and passes it on to
/// `next`. Fails with 400, 401, 403, 404 or 429.
pub async fn authenticate(
    authenticator: &Authenticator,
    mut request: Request,
    next: impl AsyncFnOnce(Request) -> Result<Response, Problem>,
) -> Result<Response, Problem> {
    let client = request.extensions().get::<ClientAddress>().copied();
    // A client that guesses keys uses the share of its network.
    let network = CallerId::of_network(client);
    let caller = caller_share::scope(network, authenticator.caller(request.headers(), client)).await;
    let limit_headers = match authenticator.rate {
        Some(rate) => {
            // A rejected request counts against its address; otherwise guessing keys would not be limited.
            let credential = Subject::of_credential(caller.as_ref().ok().and_then(Option::as_ref), client);
            authenticator.limits.check(credential, rate, 1)?
        }
        None => HeaderMap::new(),
    };
    let is_tenant_route = authenticator.tenant_routes.contains(request.uri().path());
    let caller = match caller? {
        Some(caller) => {
            let id = CallerId::of(Some(&caller), client);
            let effective = authenticator.effective(caller, request.headers(), is_tenant_route);
            let (caller, acting) = caller_share::scope(id, effective).await?;
            request.extensions_mut().insert(caller.clone());
            if let Some(acting) = acting {
                request.extensions_mut().insert(acting);
            }
            Some(caller)
        }
        // The route refuses a request without a caller, unless it needs none; then the header is refused here.
        None => {
            requested_tenant(request.headers(), is_tenant_route, None)?;
            None
        }
    };
    let id = CallerId::of(caller.as_ref(), client);
    let mut response = caller_share::scope(id, next(request)).await?;
    // Whose part of the memory for responses it occupies.
    response.extensions_mut().insert(id);
    response.headers_mut().extend(limit_headers);
    Ok(response)
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, credential) = value.split_once(' ')?;
    let credential = credential.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !credential.is_empty()).then_some(credential)
}
