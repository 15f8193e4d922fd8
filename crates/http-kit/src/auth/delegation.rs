//! Acting for a tenant: the header `Pillarbox-Tenant`.
//!
//! A key of the tenant `main` with the role `manage` or `admin` names a tenant in the header, and the request acts within that
//! tenant. The caller has its role there, but is not an operator. The header is refused from all other callers, and on routes that
//! do not act for tenants: ignoring it would do something else than what the caller wants.

use std::sync::Arc;

use http::{HeaderMap, HeaderName};

use pillarbox::log::{InvalidTenant, Tenant};

use crate::caller::{Caller, Principal, Role};
use crate::header::{malformed_header, single_header};
use crate::problem::Problem;

/// The name of the header.
pub const TENANT_HEADER: &str = "pillarbox-tenant";
const HEADER: HeaderName = HeaderName::from_static(TENANT_HEADER);

/// An extension of a request that acts for a tenant by the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActsForTenant {
    /// Who sent the request.
    pub principal: Principal,
    pub tenant: Tenant,
}

/// The routes that act for the tenant of the caller, and accept the header and portal tokens. A path that ends with a slash
/// stands for all paths below it.
#[derive(Debug, Clone, Default)]
pub struct TenantRoutes(Arc<[&'static str]>);

impl TenantRoutes {
    pub fn new(paths: impl IntoIterator<Item = &'static str>) -> TenantRoutes {
        TenantRoutes(paths.into_iter().collect())
    }

    pub(super) fn contains(&self, path: &str) -> bool {
        self.0.iter().any(|route| if route.ends_with('/') { path.starts_with(route) } else { path == *route })
    }
}

/// The tenant in the header; None without the header. Fails with 400 if the route does not accept the header or the name is
/// invalid, and with 403 if the caller must not act for tenants. A request without a caller is the route's to refuse.
pub(super) fn requested_tenant(
    headers: &HeaderMap,
    is_tenant_route: bool,
    caller: Option<&Caller>,
) -> Result<Option<Tenant>, Problem> {
    let Some(name) = single_header(headers, &HEADER)? else { return Ok(None) };
    if !is_tenant_route {
        return Err(malformed_header(
            &HEADER,
            "is accepted by the routes of the hub only: send the request without it",
        ));
    }
    let Some(caller) = caller else { return Ok(None) };
    if !may_act_for_tenants(caller) {
        let detail = "only API keys of the tenant main with the role manage or admin may send the header Pillarbox-Tenant; \
                      a key of the tenant itself needs no header";
        return Err(Problem::forbidden(detail));
    }
    name.parse().map(Some).map_err(|error: InvalidTenant| malformed_header(&HEADER, &error.to_string()))
}

fn may_act_for_tenants(caller: &Caller) -> bool {
    matches!(caller.principal, Principal::Key(_))
        && caller.tenant == Tenant::main()
        && caller.role >= Some(Role::Manage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use uuid::Uuid;

    fn status(caller: &Caller, name: &'static str, is_tenant_route: bool) -> Result<Option<Tenant>, u16> {
        let headers = HeaderMap::from_iter([(HEADER, HeaderValue::from_static(name))]);
        requested_tenant(&headers, is_tenant_route, Some(caller)).map_err(|problem| problem.status().as_u16())
    }

    #[test]
    fn only_manage_and_admin_keys_of_main_act_for_a_tenant() {
        let key = |role, tenant: &str| Caller::new(Principal::Key(Uuid::nil()), tenant.parse().unwrap(), Some(role));
        let acme: Tenant = "acme".parse().unwrap();
        for role in [Role::Manage, Role::Admin] {
            assert_eq!(status(&key(role, "main"), "acme", true), Ok(Some(acme.clone())));
            assert_eq!(status(&key(role, "acme"), "acme", true), Err(403), "a key of another tenant");
            let user = Caller { principal: Principal::User(Uuid::nil()), ..key(role, "main") };
            assert_eq!(status(&user, "acme", true), Err(403), "a user");
        }
        assert_eq!(status(&key(Role::Ingest, "main"), "acme", true), Err(403));
        assert_eq!(status(&key(Role::Admin, "main"), "acme", false), Err(400), "a route without tenants");
        assert_eq!(status(&key(Role::Admin, "main"), "../x", true), Err(400));
        assert_eq!(status(&key(Role::Ingest, "main"), "../x", true), Err(403), "the permission is checked first");
    }

    #[test]
    fn a_path_with_a_slash_at_its_end_stands_for_those_below_it() {
        let routes = TenantRoutes::new(["/hub/v1/", "/events"]);
        assert!(routes.contains("/hub/v1/events") && routes.contains("/events"));
        assert!(!routes.contains("/events/x") && !routes.contains("/hub/v10") && !routes.contains("/admin/v1/keys"));
    }
}
