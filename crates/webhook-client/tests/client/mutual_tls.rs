//! Client certificates: who presents one, and that connections of one identity serve no other.

use std::sync::Arc;

use base64::prelude::{BASE64_STANDARD, Engine};
use bytes::Bytes;
use http::HeaderMap;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto};
use webhook_client::{Client, ClientIdentity, ClientSettings, ErrorClass, Target, WebhookRequest};

use crate::receiver::{OK, Peer, Receiver};
use crate::{LONG, PostResult, loopback};

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Issuer {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate of the authority and its key, as PEM.
fn issue(authority: &Issuer, name: &str) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &**authority).unwrap();
    (pem("CERTIFICATE", certificate.der()), pem("PRIVATE KEY", &key.serialize_der()))
}

fn pem(label: &str, der: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64_STANDARD.encode(der))
}

/// A TLS acceptor that refuses clients without a certificate of the authority.
fn acceptor(authority: &Issuer) -> TlsAcceptor {
    let provider = Arc::new(crypto::ring::default_provider());
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &**authority).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build().unwrap();
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

async fn post(client: &Client, target: &Target) -> PostResult {
    let body = Bytes::from_static(b"{}");
    client.post(WebhookRequest { target, headers: HeaderMap::new(), body, timeout: LONG }).await
}

#[tokio::test]
async fn only_the_owner_of_a_certificate_uses_connections_with_it() {
    let (authority, stranger) = (authority(), authority());
    let serve = async |mut peer: Peer| while peer.answer(OK).await {};
    let receiver = Receiver::start_on("127.0.0.1:0", Some(acceptor(&authority)), serve).await;
    let settings = ClientSettings { extra_roots: vec![authority.der().clone()], ..loopback() };
    let client = Client::new(settings).unwrap();
    let anonymous = Target::parse(&format!("https://{}/hook", receiver.address), false).unwrap();
    let identity = |owner: &str, authority: &Issuer| {
        let (certificate, key) = issue(authority, "client.example");
        let identity = ClientIdentity::from_pem(owner, &certificate, &key).unwrap();
        anonymous.clone().with_identity(Arc::new(identity))
    };
    let (first, second) = (identity("first", &authority), identity("second", &authority));
    for (target, connections) in [(&first, 1), (&first, 1), (&second, 2), (&second, 2), (&first, 2)] {
        assert_eq!(post(&client, target).await.unwrap().status, 200);
        assert_eq!(receiver.connections(), connections);
    }
    // Although connections of both are idle, no other request uses them.
    for (target, connections) in [(&anonymous, 3), (&identity("third", &stranger), 4)] {
        let failure = post(&client, target).await.unwrap_err();
        assert!(matches!(failure.class, ErrorClass::Tls | ErrorClass::Reset), "{failure:?}");
        assert_eq!(receiver.connections(), connections);
    }
    assert_eq!(receiver.requests().len(), 5);
}

#[tokio::test]
async fn the_same_certificate_of_another_subscriber_is_another_identity() {
    let authority = authority();
    let serve = async |mut peer: Peer| while peer.answer(OK).await {};
    let receiver = Receiver::start_on("127.0.0.1:0", Some(acceptor(&authority)), serve).await;
    let settings = ClientSettings { extra_roots: vec![authority.der().clone()], ..loopback() };
    let client = Client::new(settings).unwrap();
    let (certificate, key) = issue(&authority, "client.example");
    for (owner, connections) in [("first", 1), ("second", 2), ("first", 2)] {
        let identity = ClientIdentity::from_pem(owner, &certificate, &key).unwrap();
        let target = Target::parse(&format!("https://{}/hook", receiver.address), false).unwrap();
        post(&client, &target.with_identity(Arc::new(identity))).await.unwrap();
        assert_eq!(receiver.connections(), connections, "{owner}");
    }
}
