//! Connections of commands to a server, with or without TLS.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, crypto};
use tower::Service;

/// A PEM file with certificates of authorities that are trusted in addition to the public ones, as other programs use it.
const ROOTS_VARIABLE: &str = "SSL_CERT_FILE";

/// Why the trusted certificates cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{ROOTS_VARIABLE} must name a PEM file with certificates; {} cannot be read as one: {cause}", file.display())]
    InvalidFile { file: PathBuf, cause: pem::Error },
    #[error("{ROOTS_VARIABLE} must name a PEM file with certificates, and {} has none", .0.display())]
    WithoutCertificate(PathBuf),
    #[error("{ROOTS_VARIABLE} has an invalid certificate: {0}")]
    InvalidCertificate(rustls::Error),
    #[error("TLS cannot be used: {0}")]
    Unusable(rustls::Error),
}

/// Connects to the host of an address: with TLS if its scheme is `https`.
#[derive(Clone)]
pub(crate) struct Connector {
    http: HttpConnector,
    tls: TlsConnector,
}

impl Connector {
    /// Fails if `SSL_CERT_FILE` names a file without certificates.
    pub(crate) fn new() -> Result<Connector, TlsError> {
        let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        for certificate in extra_roots()? {
            roots.add(certificate).map_err(TlsError::InvalidCertificate)?;
        }
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(TlsError::Unusable)?;
        let tls = TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()));
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        Ok(Connector { http, tls })
    }
}

/// The certificates of `SSL_CERT_FILE`; none if it is not set.
pub(crate) fn extra_roots() -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let Some(file) = std::env::var_os(ROOTS_VARIABLE).filter(|file| !file.is_empty()) else { return Ok(Vec::new()) };
    let file = PathBuf::from(file);
    let certificates = CertificateDer::pem_file_iter(&file).and_then(|found| found.collect::<Result<Vec<_>, _>>());
    match certificates {
        Ok(found) if found.is_empty() => Err(TlsError::WithoutCertificate(file)),
        Ok(found) => Ok(found),
        Err(cause) => Err(TlsError::InvalidFile { file, cause }),
    }
}

impl Service<Uri> for Connector {
    type Response = ServerStream;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<ServerStream>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.http.poll_ready(context).map_err(io::Error::other)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
        let tls = (uri.scheme_str() == Some("https")).then(|| self.tls.clone());
        let connecting = self.http.call(uri);
        async move {
            let stream = connecting.await.map_err(io::Error::other)?;
            let Some(tls) = tls else { return Ok(ServerStream::Plain(stream)) };
            let name = ServerName::try_from(host).map_err(io::Error::other)?;
            let stream = tls.connect(name, stream.into_inner()).await?;
            Ok(ServerStream::Tls(Box::new(TokioIo::new(stream))))
        }
        .boxed()
    }
}

/// A connection to a server.
pub(crate) enum ServerStream {
    Plain(TokioIo<TcpStream>),
    Tls(Box<TokioIo<TlsStream<TcpStream>>>),
}

impl Connection for ServerStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for ServerStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ServerStream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            ServerStream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl Write for ServerStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            ServerStream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            ServerStream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ServerStream::Plain(stream) => Pin::new(stream).poll_flush(context),
            ServerStream::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ServerStream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            ServerStream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
