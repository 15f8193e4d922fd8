//! Connections to subscribers: names resolved once and vetted, exactly the vetted addresses dialled, TLS on top, or
//! through the operator's proxy.

use std::error::Error;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine};
use futures_util::future::BoxFuture;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, ResolverConfig};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use http::uri::Scheme;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tower::Service;
use url::Url;

use crate::address::Allowed;
use crate::client::{ErrorClass, Failure};

/// Shared by all addresses of a name, so that one that does not answer leaves time for the others.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// Behind a proxy there may be no name server that answers.
const VET_TIME_MAX: Duration = Duration::from_secs(1);

/// Asks for the addresses of a name.
pub trait Resolve: Send + Sync + 'static {
    /// An error of the kind `NotFound` says that there is no such name.
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// The resolver that this machine's `/etc/resolv.conf` and `/etc/hosts` describe, as they are at the start.
///
/// Not `getaddrinfo`: that blocks a thread for as long as a name server pleases, and a few subscribers with slow ones
/// would hold up everybody's deliveries.
pub(crate) struct SystemResolver(TokioResolver);

impl SystemResolver {
    pub(crate) fn new() -> Result<SystemResolver, String> {
        let mut builder = TokioResolver::builder_tokio().unwrap_or_else(|error| {
            tracing::warn!(%error, "no name server is known: webhooks reach only addresses and names of /etc/hosts");
            TokioResolver::builder_with_config(ResolverConfig::default(), TokioRuntimeProvider::default())
        });
        builder.options_mut().ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        builder.build().map(SystemResolver).map_err(|error| format!("the resolver of names cannot start: {error}"))
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

/// A proxy for all deliveries: `http://host:port`, with user and password if it wants them. Its own address is trusted.
#[derive(Clone, Debug)]
pub struct Proxy {
    uri: Uri,
    /// Marked sensitive: it does not print.
    pub(crate) auth: Option<HeaderValue>,
}

impl FromStr for Proxy {
    type Err = String;

    /// The error says what it takes and quotes nothing: there may be a password in it.
    fn from_str(text: &str) -> Result<Proxy, String> {
        let takes =
            || "takes an address as http://proxy.example:3128 or http://user:password@proxy.example:3128".to_owned();
        let url = Url::parse(text).map_err(|_| takes())?;
        let is_bare = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
        let (Some(host), true, "http") = (url.host(), is_bare, url.scheme()) else { return Err(takes()) };
        let uri = format!("http://{host}:{}/", url.port().unwrap_or(80)).parse().map_err(|_| takes())?;
        let decoded = |text: &str| percent_encoding::percent_decode_str(text).collect::<Vec<u8>>();
        let has_user = !url.username().is_empty() || url.password().is_some();
        let auth = has_user.then(|| {
            let user = [decoded(url.username()), decoded(url.password().unwrap_or_default())].join(&b':');
            let mut auth = HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(user)))?;
            auth.set_sensitive(true);
            Ok::<_, http::header::InvalidHeaderValue>(auth)
        });
        Ok(Proxy { uri, auth: auth.transpose().map_err(|_| takes())? })
    }
}

/// Opens connections.
pub(crate) struct Dialer {
    allowed: Arc<Allowed>,
    tls: TlsConnector,
    way: Way,
}

#[allow(clippy::large_enum_variant, reason = "there is one of it")]
enum Way {
    Direct(HttpConnector<Vetting>),
    /// The proxy resolves names for itself, and has to know what it lets through. What is known here is vetted here, too.
    Proxy {
        resolver: Arc<dyn Resolve>,
        uri: Uri,
        tcp: HttpConnector<Vetting>,
        tunnel: Tunnel<HttpConnector<Vetting>>,
    },
}

impl Dialer {
    pub(crate) fn new(
        allowed: Arc<Allowed>,
        resolver: Arc<dyn Resolve>,
        proxy: Option<&Proxy>,
        extra_roots: &[CertificateDer<'static>],
    ) -> Result<Dialer, String> {
        let tcp = |vetted_by: Option<Arc<Allowed>>| {
            let mut tcp = HttpConnector::new_with_resolver(Vetting { resolver: resolver.clone(), vetted_by });
            tcp.enforce_http(false);
            tcp.set_nodelay(true);
            tcp.set_connect_timeout(Some(CONNECT_TIME_MAX));
            tcp
        };
        let way = match proxy {
            None => Way::Direct(tcp(Some(Arc::clone(&allowed)))),
            Some(Proxy { uri, auth }) => {
                let tcp = tcp(None);
                let tunnel = Tunnel::new(uri.clone(), tcp.clone());
                let tunnel = auth.iter().fold(tunnel, |tunnel, auth| tunnel.with_auth(auth.clone()));
                Way::Proxy { resolver: resolver.clone(), uri: uri.clone(), tcp, tunnel }
            }
        };
        Ok(Dialer { allowed, tls: tls(extra_roots)?, way })
    }

    pub(crate) async fn dial(&self, uri: &Uri) -> Result<Stream, Failure> {
        let host = bare_host(uri)?;
        match (host.parse(), &self.way) {
            (Ok(address), _) => vet_literal(&self.allowed, address)?,
            (Err(_), Way::Proxy { resolver, .. }) => vet_for_proxy(&self.allowed, resolver.as_ref(), host).await?,
            (Err(_), Way::Direct(_)) => {} // `Vetting` does, by what it dials
        }
        let is_https = uri.scheme() == Some(&Scheme::HTTPS);
        let no_proxy = |error: &(dyn Error + 'static)| Failure::new(ErrorClass::Proxy, with_causes(error));
        let tcp = match &self.way {
            Way::Direct(tcp) => tcp.clone().call(uri.clone()).await.map_err(|error| not_connected(&error))?,
            Way::Proxy { tunnel, .. } if is_https => {
                tunnel.clone().call(uri.clone()).await.map_err(|error| no_proxy(&error))?
            }
            Way::Proxy { uri, tcp, .. } => tcp.clone().call(uri.clone()).await.map_err(|error| no_proxy(&error))?,
        };
        if !is_https {
            return Ok(Stream::new(Io::Plain(tcp)));
        }
        let not_secure = |error: &dyn Error| Failure::new(ErrorClass::Tls, error);
        let name = ServerName::try_from(host.trim_end_matches('.').to_owned()).map_err(|error| not_secure(&error))?;
        let secured = self.tls.connect(name, tcp.into_inner()).await.map_err(|error| not_secure(&error))?;
        Ok(Stream::new(Io::Tls(TokioIo::new(Box::new(secured)))))
    }
}

/// A literal skips DNS, and so `Vetting`.
pub(crate) fn vet_literal(allowed: &Allowed, address: IpAddr) -> Result<(), Failure> {
    if allowed.permits(address) {
        return Ok(());
    }
    Err(Failure::new(
        ErrorClass::AddressRefused,
        format!("{address} is not a public address, and `hub.allowed_networks` does not list it"),
    ))
}

/// A name that this machine cannot resolve is the proxy's to judge; one that is the proxy itself never goes there.
async fn vet_for_proxy(allowed: &Allowed, resolver: &dyn Resolve, name: &str) -> Result<(), Failure> {
    let plain = name.trim_end_matches('.').to_ascii_lowercase();
    if plain == "localhost" || plain.ends_with(".localhost") {
        return Err(Failure::new(ErrorClass::AddressRefused, format!("{name} would be the proxy itself")));
    }
    match tokio::time::timeout(VET_TIME_MAX, resolver.resolve(name)).await {
        Ok(Ok(addresses)) if !addresses.iter().all(|address| allowed.permits(*address)) => Err(refused(name)),
        Ok(Ok(_) | Err(_)) | Err(_) => Ok(()),
    }
}

/// Which address it is, is not for a stranger's eyes: it may be one of the names of our own network.
fn refused(name: &str) -> Failure {
    Failure::new(
        ErrorClass::AddressRefused,
        format!("{name} has an address that is not public, and `hub.allowed_networks` does not list it"),
    )
}

/// Resolves a name once, and gives its addresses out only if all may be dialled: whoever gets them dials these and asks
/// no second time, so a name that changes its mind in between gains nothing.
#[derive(Clone)]
struct Vetting {
    resolver: Arc<dyn Resolve>,
    /// None for the proxy's own name.
    vetted_by: Option<Arc<Allowed>>,
}

impl Service<Name> for Vetting {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = Failure;
    type Future = BoxFuture<'static, Result<Self::Response, Failure>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let Vetting { resolver, vetted_by } = self.clone();
        Box::pin(async move {
            let name = name.as_str();
            let addresses = resolver.resolve(name).await.map_err(|error| not_resolved(name, &error))?;
            if addresses.is_empty() {
                return Err(not_resolved(name, &io::ErrorKind::NotFound.into()));
            }
            let is_permitted = |address: &IpAddr| vetted_by.as_ref().is_none_or(|allowed| allowed.permits(*address));
            if !addresses.iter().all(is_permitted) {
                return Err(refused(name));
            }
            // The port is filled in by the caller.
            Ok(addresses.into_iter().map(|address| SocketAddr::new(address, 0)).collect::<Vec<_>>().into_iter())
        })
    }
}

fn not_resolved(name: &str, error: &io::Error) -> Failure {
    Failure::new(
        ErrorClass::Dns,
        match error.kind() {
            io::ErrorKind::NotFound => format!("{name}: there is no such name, or it has no address"),
            _ => format!("{name} cannot be resolved: {error}"),
        },
    )
}

/// What `Vetting` said, or else why TCP did not connect.
fn not_connected(error: &(dyn Error + 'static)) -> Failure {
    let vetting = causes(error).find_map(|cause| cause.downcast_ref::<Failure>());
    vetting.cloned().unwrap_or_else(|| Failure::new(ErrorClass::Connect, with_causes(error)))
}

pub(crate) fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

fn with_causes(error: &(dyn Error + 'static)) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn bare_host(uri: &Uri) -> Result<&str, Failure> {
    let host = uri.host().ok_or_else(|| Failure::new(ErrorClass::Protocol, "the URL has no host"))?;
    Ok(host.trim_start_matches('[').trim_end_matches(']'))
}

/// Mozilla's roots and the operator's own.
fn tls(extra_roots: &[CertificateDer<'static>]) -> Result<TlsConnector, String> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    for root in extra_roots {
        roots.add(root.clone()).map_err(|error| format!("a root certificate cannot be used: {error}"))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS cannot start: {error}"))?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// A connection as hyper uses it.
pub(crate) struct Stream {
    io: Io,
    is_resting: Arc<AtomicBool>,
}

enum Io {
    Plain(TokioIo<TcpStream>),
    Tls(TokioIo<Box<TlsStream<TcpStream>>>),
}

impl Stream {
    fn new(io: Io) -> Stream {
        Stream { io, is_resting: Arc::default() }
    }

    /// Set by whoever knows that no answer is to come: whatever comes is then the end.
    pub(crate) fn is_resting(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_resting)
    }

    /// The runtime says that nothing can be read, but may not have looked since; the socket itself knows. It is asked
    /// once before each request on a connection that rested: without, one request in some dozens is written to a
    /// connection whose end is in our socket already.
    fn is_over(&self) -> bool {
        let tcp = match &self.io {
            Io::Plain(io) => io.inner(),
            Io::Tls(io) => io.inner().get_ref().0,
        };
        // Bytes, too, are the end: a `408` for being idle, or TLS's way to say good-bye.
        let pending = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
        SockRef::from(tcp)
            .peek(&mut [MaybeUninit::uninit()])
            .map_or_else(|error| !pending.contains(&error.kind()), |_| true)
    }
}

impl Read for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        let read = match &mut stream.io {
            Io::Plain(io) => Pin::new(io).poll_read(cx, buf),
            Io::Tls(io) => Pin::new(io).poll_read(cx, buf),
        };
        if read.is_pending() && stream.is_resting.load(Ordering::Relaxed) && stream.is_over() {
            return Poll::Ready(Ok(())); // nothing read: the end
        }
        read
    }
}

impl Write for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_write(cx, buf),
            Io::Tls(io) => Pin::new(io).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_flush(cx),
            Io::Tls(io) => Pin::new(io).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_shutdown(cx),
            Io::Tls(io) => Pin::new(io).poll_shutdown(cx),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(io) => io.is_write_vectored(),
            Io::Tls(io) => io.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(io) => Pin::new(io).poll_write_vectored(cx, bufs),
            Io::Tls(io) => Pin::new(io).poll_write_vectored(cx, bufs),
        }
    }
}
