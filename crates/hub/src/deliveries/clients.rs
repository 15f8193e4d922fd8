//! The HTTP clients of the tenants.
//!
//! The tenant `main` belongs to the operator and may reach networks that other tenants may not. Each of the two clients has
//! its own pool of connections: an open connection is not vetted again, so a tenant must not get one that only `main` may
//! open.

use pillarbox::log::Tenant;
use webhook_client::Client;

/// The client of the tenant `main`, and that of all other tenants. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct TenantClients {
    main: Client,
    others: Client,
}

impl TenantClients {
    pub(crate) fn new(main: Client, others: Client) -> TenantClients {
        TenantClients { main, others }
    }

    /// One client, with one pool, for all tenants.
    pub(crate) fn shared(client: Client) -> TenantClients {
        TenantClients { main: client.clone(), others: client }
    }

    pub(crate) fn of(&self, tenant: &str) -> &Client {
        if tenant == Tenant::MAIN { &self.main } else { &self.others }
    }
}
