//! Who is calling: a user by JWT, or a producer or operator by API key.
//!
//! One layer looks at `Authorization` once per request; handlers take a [`Caller`] and so cannot forget to ask. Each
//! role includes the one before it: `ingest`, `manage`, `admin`. A caller acts within its tenant; only an admin of
//! [`Tenant::main`] is an operator of the whole installation.

mod jwt;

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use axum::extract::{FromRequestParts, OptionalFromRequestParts, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::request::Parts;
use http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

pub use self::jwt::{BadIssuer, Issuer, TOKEN_TTL_MAX, TokenSigner, TokenVerifier};
use crate::extract::single_header;
use crate::limit::RateLimit;
use crate::problem::Problem;
use crate::secret::digest;

/// What a caller may do. Each includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Post events.
    Ingest,
    /// Manage what a tenant has: subscribers, dead letters, replays.
    Manage,
    /// Manage who may call, and operate.
    Admin,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Ingest, Role::Manage, Role::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Role::Ingest => "ingest",
            Role::Manage => "manage",
            Role::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Role, String> {
        Role::ALL
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or_else(|| "takes ingest, manage or admin".to_owned())
    }
}

/// A name that keeps its owner's data apart from everyone else's.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "main", pattern = "^[a-z0-9][a-z0-9_-]{0,62}$")]
pub struct Tenant(String);

impl Tenant {
    /// Where users and the domain services live.
    pub const MAIN: &str = "main";

    pub fn main() -> Tenant {
        Tenant(Tenant::MAIN.to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Tenant {
    type Error = String;

    fn try_from(name: String) -> Result<Tenant, String> {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let valid = name.len() <= 63
            && name.bytes().next().is_some_and(plain)
            && name.bytes().all(|byte| plain(byte) || byte == b'-' || byte == b'_');
        if valid {
            Ok(Tenant(name))
        } else {
            Err("takes 1 to 63 of a-z, 0-9, - and _, with a letter or digit first".to_owned())
        }
    }
}

impl std::str::FromStr for Tenant {
    type Err = String;

    fn from_str(text: &str) -> Result<Tenant, String> {
        Tenant::try_from(text.to_owned())
    }
}

impl From<Tenant> for String {
    fn from(tenant: Tenant) -> String {
        tenant.0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Principal {
    User(Uuid),
    Key(Uuid),
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Principal::User(id) => write!(f, "user:{id}"),
            Principal::Key(id) => write!(f, "key:{id}"),
        }
    }
}

/// Someone who has shown who they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub principal: Principal,
    pub tenant: Tenant,
    /// None: an ordinary user, who may do what belongs to them.
    pub role: Option<Role>,
}

impl Caller {
    /// 403 unless the caller has this role or one that includes it.
    pub fn require(&self, role: Role) -> Result<(), Problem> {
        if self.role >= Some(role) {
            return Ok(());
        }
        Err(Problem::forbidden(format!("this needs the role {role}")))
    }

    /// An admin of the whole installation, not only of a tenant.
    pub fn is_operator(&self) -> bool {
        self.role == Some(Role::Admin) && self.tenant == Tenant::main()
    }

    pub fn user_id(&self) -> Option<Uuid> {
        match self.principal {
            Principal::User(id) => Some(id),
            Principal::Key(_) => None,
        }
    }
}

/// A look-up under way.
pub type Looking<'a> = Pin<Box<dyn Future<Output = Result<Option<Caller>, Problem>> + Send + 'a>>;

/// Finds the caller behind the SHA-256 of an API key.
pub trait KeyStore: Send + Sync + 'static {
    fn find(&self, digest: [u8; 32]) -> Looking<'_>;

    /// Whether the answer is at hand, at no cost.
    fn is_at_hand(&self, digest: &[u8; 32]) -> bool;
}

/// The gate that every API request passes: who is it, and is it not too often?
#[derive(Clone)]
pub struct Gate {
    pub keys: Arc<dyn KeyStore>,
    pub tokens: Arc<TokenVerifier>,
    pub rate_limit: Option<RateLimit>,
}

impl Gate {
    async fn caller(&self, headers: &HeaderMap, address: &str) -> Result<Option<Caller>, Problem> {
        let Some(value) = single_header(headers, &header::AUTHORIZATION)? else { return Ok(None) };
        let credential =
            bearer(value).ok_or_else(|| Problem::unauthorized("send `Authorization: Bearer <JWT or API key>`"))?;
        // A JWT has three parts between dots; an API key has no dot.
        if credential.contains('.') {
            return self.tokens.verify(credential).map(Some);
        }
        let digest = digest(credential);
        // Who guesses too fast is not looked up any more; keys that are known go on, from the same address, too.
        if let Some(limit) = &self.rate_limit
            && limit.is_exhausted(address)
            && !self.keys.is_at_hand(&digest)
        {
            limit.check(address)?;
        }
        match self.keys.find(digest).await? {
            Some(caller) => Ok(Some(caller)),
            None => Err(Problem::unauthorized("this API key is unknown, expired or revoked")),
        }
    }
}

/// The layer: puts a [`Caller`] on the request, or answers 401 or 429.
pub async fn pass_gate(State(gate): State<Gate>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let address = address_name(&request);
    let caller = gate.caller(request.headers(), &address).await;
    // Who is refused counts, too, or guessing would be free.
    let name = match &caller {
        Ok(Some(caller)) => caller.principal.to_string(),
        Ok(None) | Err(_) => address,
    };
    let counted = gate.rate_limit.as_ref().map(|limit| limit.check(&name)).transpose()?;
    if let Some(caller) = caller? {
        request.extensions_mut().insert(caller);
    }
    let mut response = next.run(request).await;
    response.headers_mut().extend(counted.unwrap_or_default());
    Ok(response)
}

fn address_name(request: &Request) -> String {
    let peer = request.extensions().get::<crate::serve::Peer>();
    peer.map_or_else(|| "unknown".to_owned(), |peer| format!("ip:{}", network(peer.0.ip())))
}

/// One host can use a whole IPv6 /64.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) >> 64 << 64).into()),
    }
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, credential) = value.split_once(' ')?;
    let credential = credential.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !credential.is_empty()).then_some(credential)
}

/// A person who calls for themselves. A handler that takes one cannot forget to ask, and nothing else of the request is looked
/// at before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User(pub Uuid);

impl<S: Send + Sync> FromRequestParts<S> for User {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<User, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        let no_user = || Problem::forbidden("this is for users: call it with a user's token, not with an API key");
        caller.user_id().map(User).ok_or_else(no_user)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Caller, Problem> {
        let missing = || Problem::unauthorized("send `Authorization: Bearer <JWT or API key>`");
        parts.extensions.get::<Caller>().cloned().ok_or_else(missing)
    }
}

/// An admin of the whole installation. A handler that takes one cannot forget to ask, and nothing else of the request is
/// looked at before.
#[derive(Debug, Clone)]
pub struct Operator(pub Caller);

impl<S: Send + Sync> FromRequestParts<S> for Operator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Operator, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        caller.require(Role::Admin)?;
        if !caller.is_operator() {
            return Err(Problem::forbidden("this is for operators: admins of the tenant main"));
        }
        Ok(Operator(caller))
    }
}

/// For routes that anyone may call and that show more to some.
impl<S: Send + Sync> OptionalFromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Option<Caller>, Problem> {
        Ok(parts.extensions.get::<Caller>().cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_includes_the_ones_before_it_and_a_user_has_none() {
        let caller = |role| Caller { principal: Principal::Key(Uuid::nil()), tenant: Tenant::main(), role };
        assert!(caller(Some(Role::Admin)).require(Role::Ingest).is_ok());
        assert!(caller(Some(Role::Ingest)).require(Role::Manage).is_err());
        assert!(caller(None).require(Role::Ingest).is_err());
    }

    #[test]
    fn an_admin_of_another_tenant_is_no_operator() {
        let caller =
            Caller { principal: Principal::Key(Uuid::nil()), tenant: "acme".parse().unwrap(), role: Some(Role::Admin) };
        assert!(!caller.is_operator());
    }

    #[test]
    fn tenants_have_plain_names() {
        assert!("acme-2_b".parse::<Tenant>().is_ok());
        for name in ["", "-a", "Acme", "a b", "a/b", &"a".repeat(64)] {
            assert!(name.parse::<Tenant>().is_err(), "{name}");
        }
    }
}
