//! The definition of one caller, for everything that callers share and for the rate limits.
//!
//! Each user is one caller. All API keys and portal tokens of a tenant are one caller, so that a tenant gains nothing by creating
//! more of them. All requests without a caller from one network are one caller.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::LazyLock;

use crate::caller::{Caller, Principal};
use crate::client_address::ClientAddress;
use pillarbox::log::Tenant;

static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The subject of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Subject<'a> {
    /// One user, API key or portal token.
    Principal(Principal),
    /// A tenant, by its name.
    Tenant(&'a str),
    /// The clients without valid credentials in one network. None: the address of the client is unknown.
    Network(Option<IpAddr>),
}

impl<'a> Subject<'a> {
    /// Returns the caller of a request; without one, the client's network.
    pub fn of(caller: Option<&'a Caller>, client: Option<ClientAddress>) -> Subject<'a> {
        match caller {
            Some(Caller { principal: user @ Principal::User(_), .. }) => Subject::Principal(*user),
            Some(Caller { tenant, .. }) => Subject::Tenant(tenant.as_str()),
            None => Subject::of_network(client),
        }
    }

    /// Returns the credential of a request, for limits of which each API key has its own; without one, the client's network.
    pub(crate) fn of_credential(caller: Option<&Caller>, client: Option<ClientAddress>) -> Subject<'static> {
        caller.map_or_else(|| Subject::of_network(client), |caller| Subject::Principal(caller.principal))
    }

    pub(crate) fn of_network(client: Option<ClientAddress>) -> Subject<'static> {
        Subject::Network(client.map(ClientAddress::network))
    }
}

/// Identifies a subject within this process. It is a hash and not a name, which would be an allocation for each request. Two
/// subjects with the same hash count as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallerId(u64);

impl CallerId {
    /// Returns the id of a caller; without one, that of the client's network.
    pub fn of(caller: Option<&Caller>, client: Option<ClientAddress>) -> CallerId {
        Subject::of(caller, client).into()
    }

    /// Returns the id of one user, API key or portal token.
    pub fn of_principal(principal: Principal) -> CallerId {
        Subject::Principal(principal).into()
    }

    /// Returns the id of a tenant with all its users.
    pub fn of_tenant(tenant: &Tenant) -> CallerId {
        Subject::Tenant(tenant.as_str()).into()
    }

    /// Returns the id of the client's network.
    pub fn of_network(client: Option<ClientAddress>) -> CallerId {
        Subject::of_network(client).into()
    }
}

impl From<Subject<'_>> for CallerId {
    fn from(subject: Subject<'_>) -> CallerId {
        CallerId(HASHER.hash_one(subject))
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
