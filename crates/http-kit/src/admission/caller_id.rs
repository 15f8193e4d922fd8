//! The caller that a request counts for, wherever callers share something that is limited.
//!
//! The users of a tenant are callers of their own. All API keys and portal tokens of a tenant are one caller, so that a tenant
//! gains nothing by creating more of them; and so are all requests without a caller from one network.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::LazyLock;

use crate::auth::{Caller, Principal};
use crate::client_address::ClientAddress;
use pillarbox::log::Tenant;

static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// Identifies a caller within this process. It is a hash and not a name, which would be an allocation for each request. Two
/// callers with the same hash count as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallerId(u64);

impl CallerId {
    /// Returns the id of a caller; without one, that of the client's network.
    pub fn of(caller: Option<&Caller>, client: Option<ClientAddress>) -> CallerId {
        match caller {
            Some(Caller { principal: Principal::User(id), .. }) => CallerId::from_name(("user", id)),
            Some(Caller { tenant, .. }) => CallerId::of_tenant(tenant),
            None => CallerId::of_network(client),
        }
    }

    /// Returns the id of one user, API key or portal token.
    pub fn of_principal(principal: Principal) -> CallerId {
        CallerId::from_name(("principal", principal))
    }

    /// Returns the id of a tenant with all its users.
    pub fn of_tenant(tenant: &Tenant) -> CallerId {
        CallerId::from_name(("tenant", tenant.as_str()))
    }

    /// Returns the id of the client's network, whoever the caller is.
    pub fn of_network(client: Option<ClientAddress>) -> CallerId {
        CallerId::from_name(("network", client.map(ClientAddress::network)))
    }

    fn from_name(name: impl Hash) -> CallerId {
        CallerId(HASHER.hash_one(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn keys_and_portal_tokens_of_a_tenant_are_one_caller_and_each_user_is_one() {
        let id = |principal: fn(Uuid) -> Principal, tenant: &str| {
            let caller = Caller::new(principal(Uuid::new_v4()), tenant.parse::<Tenant>().unwrap(), None);
            CallerId::of(Some(&caller), None)
        };
        assert_eq!(id(Principal::Key, "acme"), id(Principal::Portal, "acme"));
        assert_ne!(id(Principal::Key, "acme"), id(Principal::Key, "rival"));
        assert_ne!(id(Principal::User, "main"), id(Principal::User, "main"));
    }

    #[test]
    fn requests_without_a_caller_count_for_their_network() {
        let id = |address: &str| CallerId::of(None, Some(ClientAddress(address.parse().unwrap())));
        assert_ne!(id("192.0.2.1"), id("192.0.2.2"));
        assert_eq!(id("2001:db8::1"), id("2001:db8::2"), "a host can use all addresses of its /64");
        assert_ne!(id("2001:db8::1"), id("2001:db8:0:1::1"));
    }
}
