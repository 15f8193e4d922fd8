//! The certificate with which the client authenticates itself to an endpoint (mutual TLS).

use std::fmt;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::client::ResolvesClientCert;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{CertificateError, Error, InconsistentKeys, RootCertStore, crypto};

/// Certificates of a chain.
const CHAIN_CERTIFICATES_MAX: usize = 10;
/// Characters of the certificates, and of the key.
pub const PEM_CHARS_MAX: usize = 32 * 1024;

/// A client certificate and its key, checked.
pub struct ClientIdentity {
    resolver: Arc<dyn ResolvesClientCert>,
    chain: Vec<CertificateDer<'static>>,
    /// Differs from that of every other identity, also of the same certificate for another owner.
    name: String,
}

/// Why an identity is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidIdentity {
    /// The certificate: what is accepted.
    Certificate(&'static str),
    /// The private key: what is accepted.
    PrivateKey(&'static str),
}

impl ClientIdentity {
    /// Parses a certificate, with the intermediate ones, and its private key. `owner` is the only one that uses its
    /// connections.
    ///
    /// # Errors
    /// One of them is not PEM of the expected kind, or they do not belong together.
    pub fn from_pem(owner: &str, certificate: &str, private_key: &str) -> Result<ClientIdentity, InvalidIdentity> {
        let not_a_certificate = InvalidIdentity::Certificate(
            "must be one or more certificates as PEM (-----BEGIN CERTIFICATE-----), that of the client first",
        );
        let not_a_key = InvalidIdentity::PrivateKey(
            "must be an unencrypted private key as PEM: PKCS #8 (-----BEGIN PRIVATE KEY-----), RSA or EC",
        );
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect();
        let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(not_a_certificate.clone())?;
        if chain.len() > CHAIN_CERTIFICATES_MAX {
            return Err(InvalidIdentity::Certificate(
                "must be at most 10 certificates: that of the client and the intermediate ones",
            ));
        }
        let key = PrivateKeyDer::from_pem_slice(private_key.as_bytes()).map_err(|_| not_a_key.clone())?;
        let provider = crypto::ring::default_provider();
        let certified = CertifiedKey::from_der(chain.clone(), key, &provider).map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                InvalidIdentity::PrivateKey("does not belong to the first certificate")
            }
            Error::InvalidCertificate(_) => not_a_certificate,
            _ => not_a_key,
        })?;
        let digest = Sha256::new_with_prefix(certificate).chain_update([0]).chain_update(private_key).finalize();
        let name = format!("{owner} {digest:x}");
        Ok(ClientIdentity { resolver: Arc::new(SingleCertAndKey::from(certified)), chain, name })
    }

    /// Checks the validity of the certificate.
    ///
    /// # Errors
    /// The certificate is not valid at this time.
    pub fn check_time(&self, now: DateTime<Utc>) -> Result<(), InvalidIdentity> {
        // The verifier of a receiver checks the time first. It knows no authority that could have issued the certificate, so
        // that all other errors say nothing. It does not get the intermediate certificates: with some dozens of the same name
        // it tries 200,000 paths.
        let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        let provider = Arc::new(crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        let (Ok(verifier), Some(first)) = (verifier, self.chain.first()) else { return Ok(()) };
        let seconds = u64::try_from(now.timestamp()).unwrap_or_default();
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        match verifier.verify_client_cert(first, &[], now) {
            Err(Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. })) => {
                Err(InvalidIdentity::Certificate("must not have expired: renew it"))
            }
            Err(Error::InvalidCertificate(
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
            )) => Err(InvalidIdentity::Certificate("must be valid already: its validity begins in the future")),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    pub(crate) fn resolver(&self) -> Arc<dyn ResolvesClientCert> {
        Arc::clone(&self.resolver)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl PartialEq for ClientIdentity {
    fn eq(&self, other: &ClientIdentity) -> bool {
        self.name == other.name
    }
}

impl Eq for ClientIdentity {}

impl fmt::Debug for ClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientIdentity").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, Engine};
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// A self-signed certificate that is valid from one year to another, and its key, as PEM.
    fn pair(years: (i32, i32)) -> (String, String) {
        let mut params = CertificateParams::new(vec!["client.example".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        let key = KeyPair::generate().unwrap();
        let pem = |label: &str, der: &[u8]| {
            format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64_STANDARD.encode(der))
        };
        (pem("CERTIFICATE", params.self_signed(&key).unwrap().der()), pem("PRIVATE KEY", &key.serialize_der()))
    }

    #[test]
    fn a_certificate_and_its_key_belong_together() {
        let ((certificate, key), (other, other_key)) = (pair((2020, 2090)), pair((2020, 2090)));
        let identity = ClientIdentity::from_pem("a", &certificate, &key).unwrap();
        assert!(!format!("{identity:?}").contains("PRIVATE"));
        assert_eq!(identity, ClientIdentity::from_pem("a", &certificate, &key).unwrap());
        assert_ne!(identity, ClientIdentity::from_pem("b", &certificate, &key).unwrap(), "of another owner");
        let chain = |others: usize| certificate.clone() + &other.repeat(others);
        assert!(ClientIdentity::from_pem("a", &chain(CHAIN_CERTIFICATES_MAX - 1), &key).is_ok());
        let refused = |certificate: &str, key: &str| ClientIdentity::from_pem("a", certificate, key).unwrap_err();
        let mismatch = InvalidIdentity::PrivateKey("does not belong to the first certificate");
        assert_eq!(refused(&certificate, &other_key), mismatch);
        let too_many = refused(&chain(CHAIN_CERTIFICATES_MAX), &key);
        assert!(
            matches!(too_many, InvalidIdentity::Certificate(detail) if detail.contains("at most 10")),
            "{too_many:?}"
        );
        for text in ["", "certificate", &key, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"] {
            assert!(matches!(refused(text, &key), InvalidIdentity::Certificate(_)), "{text}");
        }
        for text in ["", "key", &certificate, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"] {
            assert!(matches!(refused(&certificate, text), InvalidIdentity::PrivateKey(_)), "{text}");
        }
    }

    #[test]
    fn a_certificate_is_accepted_only_within_its_validity() {
        let now = Utc::now();
        for (years, expected) in [((2020, 2090), None), ((2000, 2001), Some("expired")), ((2080, 2090), Some("future"))]
        {
            let (certificate, key) = pair(years);
            let checked = ClientIdentity::from_pem("a", &certificate, &key).unwrap().check_time(now);
            match (checked, expected) {
                (Ok(()), None) => {}
                (Err(InvalidIdentity::Certificate(detail)), Some(word)) => assert!(detail.contains(word), "{detail}"),
                (checked, expected) => panic!("{years:?}: {checked:?}, expected {expected:?}"),
            }
        }
    }
}
