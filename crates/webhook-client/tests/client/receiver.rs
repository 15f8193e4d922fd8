//! Receivers whose behaviour each test scripts byte by byte, and resolvers with fixed answers.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto};
use webhook_client::Resolve;

pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A server on loopback that ends with its test's runtime.
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<Mutex<Vec<String>>>,
}

/// The receiver's end of one connection.
pub(crate) struct Peer {
    pub(crate) stream: Box<dyn Duplex>,
    /// The number of this connection among all to this receiver, from 0.
    pub(crate) number: usize,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Receiver {
    /// Runs `behave` for each connection and closes the connection when it returns.
    pub(crate) async fn start<F>(behave: impl Fn(Peer) -> F + Send + 'static) -> Receiver
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Receiver::start_on("127.0.0.1:0", None, behave).await
    }

    pub(crate) async fn start_on<F>(
        address: &str,
        tls: Option<TlsAcceptor>,
        behave: impl Fn(Peer) -> F + Send + 'static,
    ) -> Receiver
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (connections, requests) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<String>>>::default());
        let receiver = Receiver { address, connections: Arc::clone(&connections), requests: Arc::clone(&requests) };
        tokio::spawn(async move {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let number = connections.fetch_add(1, Ordering::SeqCst);
                let Some(stream) = secured(tls.as_ref(), tcp).await else { continue };
                tokio::spawn(behave(Peer { stream, number, requests: Arc::clone(&requests) }));
            }
        });
        receiver
    }

    /// Sends the same response to every request and leaves the connections open.
    pub(crate) async fn answering(answer: &'static str) -> Receiver {
        Receiver::start(async move |mut peer: Peer| while peer.answer(answer).await {}).await
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/hook?q=1", self.address)
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Every request received so far, with headers and body.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

async fn secured(tls: Option<&TlsAcceptor>, tcp: TcpStream) -> Option<Box<dyn Duplex>> {
    tcp.set_nodelay(true).unwrap();
    match tls {
        None => Some(Box::new(tcp)),
        // The handshake fails when the client does not trust the certificate.
        Some(tls) => tls.accept(tcp).await.ok().map(|stream| Box::new(stream) as Box<dyn Duplex>),
    }
}

impl Peer {
    /// Reads one request. Returns None when the client has closed the connection.
    pub(crate) async fn request(&mut self) -> Option<String> {
        let mut bytes = Vec::new();
        let end_of_head = loop {
            if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            bytes.push(self.stream.read_u8().await.ok()?);
        };
        let head = String::from_utf8(bytes.clone()).unwrap().to_lowercase();
        let length =
            head.split("content-length: ").nth(1).map_or(0, |rest| rest.lines().next().unwrap().parse().unwrap());
        bytes.resize(end_of_head + length, 0);
        self.stream.read_exact(&mut bytes[end_of_head..]).await.ok()?;
        let request = String::from_utf8(bytes).unwrap();
        self.requests.lock().unwrap().push(request.clone());
        Some(request)
    }

    /// Reads a request and writes the response. Returns false when the client has closed the connection.
    pub(crate) async fn answer(&mut self, answer: &str) -> bool {
        self.request().await.is_some() && self.write(answer).await
    }

    pub(crate) async fn write(&mut self, text: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(text.as_ref()).await.is_ok() && self.stream.flush().await.is_ok()
    }

    /// Writes the text again and again until the client closes the connection.
    pub(crate) async fn drip(&mut self, text: &[u8], pause: std::time::Duration) {
        while self.write(text).await {
            tokio::time::sleep(pause).await;
        }
    }
}

/// Returns a self-signed certificate for these names, and a TLS acceptor that presents it.
pub(crate) fn self_signed(names: &[&str]) -> (CertificateDer<'static>, TlsAcceptor) {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(names).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    (cert.der().clone(), TlsAcceptor::from(Arc::new(config)))
}

/// A resolver with fixed answers: each lookup of a name returns the next list, and in the end always the last one.
#[derive(Default)]
pub(crate) struct FixedResolver {
    names: Mutex<HashMap<&'static str, Vec<Vec<IpAddr>>>>,
    pub(crate) lookups: AtomicUsize,
}

impl FixedResolver {
    pub(crate) fn of(names: &[(&'static str, &[&[&str]])]) -> Arc<FixedResolver> {
        let parsed = |addresses: &&[&str]| addresses.iter().map(|address| address.parse().unwrap()).collect();
        let names = names.iter().map(|(name, turns)| (*name, turns.iter().map(parsed).collect())).collect();
        Arc::new(FixedResolver { names: Mutex::new(names), lookups: AtomicUsize::new(0) })
    }
}

impl Resolve for FixedResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        self.lookups.fetch_add(1, Ordering::SeqCst);
        let mut names = self.names.lock().unwrap();
        let answer = match names.get_mut(name) {
            Some(turns) if turns.len() > 1 => Ok(turns.remove(0)),
            Some(turns) => Ok(turns[0].clone()),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        Box::pin(async { answer })
    }
}

/// A resolver that never answers.
pub(crate) struct SilentResolver;

impl Resolve for SilentResolver {
    fn resolve<'a>(&'a self, _: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(std::future::pending())
    }
}
