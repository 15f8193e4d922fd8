//! Opens connections to receivers, directly or through the operator's proxy.
//!
//! A host name is resolved once, its addresses are vetted, and exactly the vetted addresses are dialled. TLS runs on
//! top.

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine};
use futures_util::future::BoxFuture;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use http::uri::Scheme;
use http::{HeaderValue, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tower::Service;
use url::Url;

use crate::address::AddressPolicy;
use crate::error::{ClientError, ErrorClass, RequestError};
use crate::identity::ClientIdentity;
use crate::stream::{Socket, Stream};

/// Time to connect over TCP. hyper-util divides it among a name's addresses, so that one that does not answer leaves
/// time for the others.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// Time to resolve a name before the proxy is used: behind a proxy there may be no name server that answers.
const VET_TIME_MAX: Duration = Duration::from_secs(1);

/// Resolves host names.
pub trait Resolve: Send + Sync + 'static {
    /// Returns the addresses of a name. Fails with the kind `NotFound` if the name does not exist or has no address.
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// Resolves by this machine's `/etc/resolv.conf` and `/etc/hosts`, read once when the process starts.
///
/// It does not use `getaddrinfo`, which blocks a thread until the name server answers: a few receivers with slow name
/// servers would delay the requests to all others.
pub(crate) struct SystemResolver(TokioResolver);

impl SystemResolver {
    pub(crate) fn new() -> Result<SystemResolver, ClientError> {
        let mut builder = TokioResolver::builder_tokio().unwrap_or_else(|error| {
            tracing::warn!(%error, "no name server is configured; webhooks reach only IP addresses and names in /etc/hosts");
            TokioResolver::builder_with_config(ResolverConfig::default(), TokioRuntimeProvider::default())
        });
        builder.options_mut().ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        builder.build().map(SystemResolver).map_err(|error| ClientError::Resolver(error.into()))
    }
}

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            match self.0.lookup_ip(name).await {
                Ok(found) => Ok(found.iter().collect()),
                Err(error) if error.is_no_records_found() => Err(io::ErrorKind::NotFound.into()),
                Err(error) => Err(io::Error::other(error)),
            }
        })
    }
}

/// A proxy for all requests: `http://host:port`, with a user name and password if it requires them. The proxy's own
/// address is not vetted.
#[derive(Clone, Debug)]
pub struct Proxy {
    uri: Uri,
    /// The `Proxy-Authorization` header, marked sensitive so that it is not printed.
    pub(crate) auth: Option<HeaderValue>,
}

/// A text that is not the address of a proxy. The error does not quote it, because it may contain a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a URL such as http://proxy.example:3128 or http://user:password@proxy.example:3128")]
pub struct InvalidProxy;

impl FromStr for Proxy {
    type Err = InvalidProxy;

    fn from_str(text: &str) -> Result<Proxy, InvalidProxy> {
        let url = Url::parse(text).map_err(|_| InvalidProxy)?;
        let is_bare = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
        let (Some(host), true, "http") = (url.host(), is_bare, url.scheme()) else { return Err(InvalidProxy) };
        let uri = format!("http://{host}:{}/", url.port().unwrap_or(80)).parse().map_err(|_| InvalidProxy)?;
        let decoded = |text: &str| percent_encoding::percent_decode_str(text).collect::<Vec<u8>>();
        let has_user = !url.username().is_empty() || url.password().is_some();
        let auth = has_user.then(|| {
            let user = [decoded(url.username()), decoded(url.password().unwrap_or_default())].join(&b':');
            let mut auth = HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(user)))?;
            auth.set_sensitive(true);
            Ok::<_, http::header::InvalidHeaderValue>(auth)
        });
        Ok(Proxy { uri, auth: auth.transpose().map_err(|_| InvalidProxy)? })
    }
}

/// Opens connections to receivers.
pub(crate) struct Dialer {
    policy: Arc<AddressPolicy>,
    /// Without a certificate of the client.
    tls: TlsConnector,
    roots: Arc<RootCertStore>,
    egress: Egress,
}

#[allow(clippy::large_enum_variant, reason = "each process has one")]
enum Egress {
    Direct(HttpConnector<VettingResolver>),
    /// The proxy resolves names itself and must restrict what it connects to. Names that this machine can resolve are
    /// vetted here as well.
    Proxy {
        resolver: Arc<dyn Resolve>,
        uri: Uri,
        tcp: HttpConnector<VettingResolver>,
        tunnel: Tunnel<HttpConnector<VettingResolver>>,
    },
}

impl Dialer {
    pub(crate) fn new(
        policy: Arc<AddressPolicy>,
        resolver: Arc<dyn Resolve>,
        proxy: Option<&Proxy>,
        extra_roots: &[CertificateDer<'static>],
    ) -> Result<Dialer, ClientError> {
        let tcp = |policy: Option<Arc<AddressPolicy>>| {
            let mut tcp = HttpConnector::new_with_resolver(VettingResolver { resolver: resolver.clone(), policy });
            tcp.enforce_http(false);
            tcp.set_nodelay(true);
            tcp.set_connect_timeout(Some(CONNECT_TIME_MAX));
            tcp
        };
        let egress = match proxy {
            None => Egress::Direct(tcp(Some(Arc::clone(&policy)))),
            Some(Proxy { uri, auth }) => {
                let tcp = tcp(None);
                let tunnel = Tunnel::new(uri.clone(), tcp.clone());
                let tunnel = auth.iter().fold(tunnel, |tunnel, auth| tunnel.with_auth(auth.clone()));
                Egress::Proxy { resolver: resolver.clone(), uri: uri.clone(), tcp, tunnel }
            }
        };
        let roots = Arc::new(trusted_roots(extra_roots)?);
        Ok(Dialer { policy, tls: tls(&roots, None)?, roots, egress })
    }

    /// Connects to the host of `uri`, with the certificate of `identity` if the endpoint requests one. Fails if an address of
    /// the host is not permitted; nothing is sent in that case.
    pub(crate) async fn dial(&self, uri: &Uri, identity: Option<&ClientIdentity>) -> Result<Stream, RequestError> {
        let host = bare_host(uri)?;
        match (host.parse(), &self.egress) {
            (Ok(address), _) => self.policy.vet_ip_address(address)?,
            (Err(_), Egress::Proxy { resolver, .. }) => vet_for_proxy(&self.policy, resolver.as_ref(), host).await?,
            (Err(_), Egress::Direct(_)) => {} // the connector's `VettingResolver` vets the addresses
        }
        let is_https = uri.scheme() == Some(&Scheme::HTTPS);
        let proxy_failed = |error: &(dyn Error + 'static)| RequestError::new(ErrorClass::Proxy, with_causes(error));
        let tcp = match &self.egress {
            Egress::Direct(tcp) => tcp.clone().call(uri.clone()).await.map_err(|error| connect_error(&error))?,
            Egress::Proxy { tunnel, .. } if is_https => {
                tunnel.clone().call(uri.clone()).await.map_err(|error| proxy_failed(&error))?
            }
            Egress::Proxy { uri, tcp, .. } => {
                tcp.clone().call(uri.clone()).await.map_err(|error| proxy_failed(&error))?
            }
        };
        let socket = Socket::new(tcp.into_inner());
        if !is_https {
            return Ok(Stream::plain(socket));
        }
        let tls_failed = |error: &dyn Error| RequestError::new(ErrorClass::Tls, error);
        let name = ServerName::try_from(host.trim_end_matches('.').to_owned()).map_err(|error| tls_failed(&error))?;
        let connector = match identity {
            None => self.tls.clone(),
            // A separate configuration for each connection: TLS sessions are not resumed by another identity.
            Some(_) => tls(&self.roots, identity).map_err(|error| RequestError::new(ErrorClass::Tls, error))?,
        };
        let secured = connector.connect(name, socket).await.map_err(|error| tls_failed(&error))?;
        Ok(Stream::tls(secured))
    }
}

/// Fails if a name has an address that is not permitted, or if it means the proxy itself. A name that this machine
/// cannot resolve is left to the proxy.
async fn vet_for_proxy(policy: &AddressPolicy, resolver: &dyn Resolve, name: &str) -> Result<(), RequestError> {
    let plain = name.trim_end_matches('.').to_ascii_lowercase();
    if plain == "localhost" || plain.ends_with(".localhost") {
        return Err(RequestError::new(
            ErrorClass::AddressRefused,
            format!("{name} means the proxy itself, which is not permitted"),
        ));
    }
    match tokio::time::timeout(VET_TIME_MAX, resolver.resolve(name)).await {
        Ok(Ok(addresses)) if !addresses.iter().all(|address| policy.permits(*address)) => Err(policy.refused(name)),
        Ok(Ok(_) | Err(_)) | Err(_) => Ok(()),
    }
}

/// Resolves a name once and returns its addresses only if all of them are permitted. The connector dials these
/// addresses and does not resolve again, so a name that changes its addresses in between (DNS rebinding) cannot bypass
/// the check.
#[derive(Clone)]
struct VettingResolver {
    resolver: Arc<dyn Resolve>,
    /// None for the proxy's own name, which is not vetted.
    policy: Option<Arc<AddressPolicy>>,
}

impl Service<Name> for VettingResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = RequestError;
    type Future = BoxFuture<'static, Result<Self::Response, RequestError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), RequestError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let VettingResolver { resolver, policy } = self.clone();
        Box::pin(async move {
            let name = name.as_str();
            let addresses = resolver.resolve(name).await.map_err(|error| dns_error(name, &error))?;
            if addresses.is_empty() {
                return Err(dns_error(name, &io::ErrorKind::NotFound.into()));
            }
            if let Some(policy) = policy
                && !addresses.iter().all(|address| policy.permits(*address))
            {
                return Err(policy.refused(name));
            }
            // The connector sets the port.
            Ok(addresses.into_iter().map(|address| SocketAddr::new(address, 0)).collect::<Vec<_>>().into_iter())
        })
    }
}

fn dns_error(name: &str, error: &io::Error) -> RequestError {
    RequestError::new(
        ErrorClass::Dns,
        match error.kind() {
            io::ErrorKind::NotFound => format!("{name}: the name does not exist or has no address"),
            _ => format!("{name} cannot be resolved: {error}"),
        },
    )
}

/// Returns the error of the [`VettingResolver`] if there is one, and otherwise why TCP could not connect.
fn connect_error(error: &(dyn Error + 'static)) -> RequestError {
    let vetting = causes(error).find_map(|cause| cause.downcast_ref::<RequestError>());
    vetting.cloned().unwrap_or_else(|| RequestError::new(ErrorClass::Connect, with_causes(error)))
}

pub(crate) fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

fn with_causes(error: &(dyn Error + 'static)) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn bare_host(uri: &Uri) -> Result<&str, RequestError> {
    let host = uri.host().ok_or_else(|| RequestError::new(ErrorClass::Protocol, "the URL has no host"))?;
    Ok(host.trim_start_matches('[').trim_end_matches(']'))
}

/// Mozilla's root certificates and the operator's additional ones. Fails if one of the latter is invalid.
fn trusted_roots(extra_roots: &[CertificateDer<'static>]) -> Result<RootCertStore, ClientError> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    for root in extra_roots {
        roots.add(root.clone()).map_err(ClientError::RootCertificate)?;
    }
    Ok(roots)
}

fn tls(roots: &Arc<RootCertStore>, identity: Option<&ClientIdentity>) -> Result<TlsConnector, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(ClientError::Tls)?;
    let config = config.with_root_certificates(Arc::clone(roots));
    let mut config = match identity {
        None => config.with_no_client_auth(),
        Some(identity) => config.with_client_cert_resolver(identity.resolver()),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}
