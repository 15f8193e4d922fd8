//! The layer that authenticates every API request and applies the rate limit.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, header};

use super::caller::Caller;
use super::jwt::TokenVerifier;
use crate::extract::single_header;
use crate::limit::RateLimit;
use crate::problem::Problem;
use crate::secret::digest;
use crate::serve::Peer;

/// The future of [`KeyStore::find`].
pub type KeyLookup<'a> = Pin<Box<dyn Future<Output = Result<Option<Caller>, Problem>> + Send + 'a>>;

/// Finds callers by their API keys.
pub trait KeyStore: Send + Sync + 'static {
    /// Returns the caller whose API key has this SHA-256 digest; None if the key is unknown, expired or revoked.
    fn find(&self, digest: [u8; 32]) -> KeyLookup<'_>;

    /// Returns true if `find` can answer from memory.
    fn is_cached(&self, digest: &[u8; 32]) -> bool;
}

/// Authenticates requests and counts them against the rate limit.
#[derive(Clone)]
pub struct Authenticator {
    pub keys: Arc<dyn KeyStore>,
    pub tokens: Arc<TokenVerifier>,
    pub rate_limit: Option<RateLimit>,
}

impl Authenticator {
    /// Returns None for a request without the header `Authorization`. Fails with 400, 401 or 429.
    async fn caller(&self, headers: &HeaderMap, client_name: &str) -> Result<Option<Caller>, Problem> {
        let Some(value) = single_header(headers, &header::AUTHORIZATION)? else { return Ok(None) };
        let credential =
            bearer(value).ok_or_else(|| Problem::unauthorized("send `Authorization: Bearer <JWT or API key>`"))?;
        // A JWT has three parts between dots; an API key has no dot.
        if credential.contains('.') {
            return self.tokens.verify(credential).map(Some);
        }
        let digest = digest(credential);
        // An address that guesses keys too fast causes no more lookups. Cached keys from the same address still work.
        if let Some(limit) = &self.rate_limit
            && limit.is_exhausted(client_name)
            && !self.keys.is_cached(&digest)
        {
            limit.check(client_name)?;
        }
        match self.keys.find(digest).await? {
            Some(caller) => Ok(Some(caller)),
            None => Err(Problem::unauthorized("this API key is unknown, expired or revoked")),
        }
    }
}

/// The middleware: adds the [`Caller`] to the request's extensions. Fails with 400, 401 or 429.
pub async fn authenticate(
    State(authenticator): State<Authenticator>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let client_name = client_name(&request);
    let caller = authenticator.caller(request.headers(), &client_name).await;
    // A rejected request counts against its address; otherwise guessing keys would not be limited.
    let limited_name = match &caller {
        Ok(Some(caller)) => caller.principal.to_string(),
        Ok(None) | Err(_) => client_name,
    };
    let limit_headers = authenticator.rate_limit.as_ref().map(|limit| limit.check(&limited_name)).transpose()?;
    if let Some(caller) = caller? {
        request.extensions_mut().insert(caller);
    }
    let mut response = next.run(request).await;
    response.headers_mut().extend(limit_headers.unwrap_or_default());
    Ok(response)
}

/// The name under which the rate limit counts requests without a caller.
fn client_name(request: &Request) -> String {
    let peer = request.extensions().get::<Peer>();
    peer.map_or_else(|| "unknown".to_owned(), |peer| format!("ip:{}", network(peer.0.ip())))
}

/// Returns the network of a client, for limits: the address itself, or the /64 network of an IPv6 address, because one host
/// can use all addresses of its /64.
pub fn network(address: IpAddr) -> IpAddr {
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
