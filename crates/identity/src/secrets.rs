//! Random tokens, of which only digests are stored, and keyed digests of addresses and networks.

use std::net::IpAddr;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use http_kit::idempotency::RequestIdentity;
use rand::RngCore;
use runtime::secret::{Secret, digest};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The length of a token as text: 32 bytes in base64.
const TOKEN_CHARS: usize = 43;

/// A new token: 32 random bytes.
pub(crate) struct NewToken {
    /// For the user; never stored or logged.
    pub(crate) text: Secret<String>,
    pub(crate) digest: [u8; 32],
}

impl NewToken {
    pub(crate) fn generate() -> NewToken {
        let mut bytes = [0; 32];
        rand::rng().fill_bytes(&mut bytes);
        let text = BASE64_URL_SAFE_NO_PAD.encode(bytes);
        NewToken { digest: digest(&text), text: Secret::new(text) }
    }
}

/// Returns the digest under which a token is stored; None if the text is not a token.
pub(crate) fn token_digest(token: &Secret<String>) -> Option<[u8; 32]> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let text = token.reveal();
    (text.len() == TOKEN_CHARS && text.bytes().all(is_valid)).then(|| digest(text))
}

/// Makes digests that cannot be guessed without the secret key of the installation: there are few addresses and passwords
/// compared with tokens.
#[derive(Clone)]
pub(crate) struct DigestKey([u8; 32]);

impl DigestKey {
    pub(crate) fn new(key: [u8; 32]) -> DigestKey {
        DigestKey(key)
    }

    pub(crate) fn of_email(&self, email: &str) -> [u8; 32] {
        self.digest("email", &[email.as_bytes()])
    }

    /// A fraction from 0 to below 1 that looks random, but is always the same for an address.
    pub(crate) fn fraction_of_email(&self, email: &str) -> f64 {
        let digest = self.digest("fraction of email", &[email.as_bytes()]);
        let number = digest[..4].iter().fold(0_u32, |number, byte| number << 8 | u32::from(*byte));
        f64::from(number) / (f64::from(u32::MAX) + 1.0)
    }

    /// The digest of an address together with a network.
    pub(crate) fn of_email_in(&self, email: &str, network: &[u8; 32]) -> [u8; 32] {
        self.digest("email in network", &[email.as_bytes(), network])
    }

    pub(crate) fn of_user(&self, id: Uuid) -> [u8; 32] {
        self.digest("user", &[id.as_bytes()])
    }

    pub(crate) fn of_network(&self, network: Option<IpAddr>) -> [u8; 32] {
        self.digest("network", &[network.map(|network| network.to_string()).unwrap_or_default().as_bytes()])
    }

    /// The same identity with another fingerprint. The fingerprint of a request is a fast digest of its body, from which a
    /// password could be guessed; this one cannot be computed without the secret key.
    pub(crate) fn sealed(&self, identity: Option<RequestIdentity>) -> Option<RequestIdentity> {
        identity.map(|identity| {
            let sealed = self.digest("fingerprint", &[&identity.fingerprint]);
            let mut fingerprint = [0; 16];
            fingerprint.copy_from_slice(&sealed[..16]);
            RequestIdentity { fingerprint, ..identity }
        })
    }

    /// Each part is preceded by its length, so that the boundaries between parts are unambiguous.
    fn digest(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
        let mut hash = Sha256::new();
        for part in [self.0.as_slice(), purpose.as_bytes()].iter().chain(parts) {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_found_by_its_digest_only() {
        let token = NewToken::generate();
        assert_eq!(token_digest(&token.text), Some(token.digest));
        assert_ne!(NewToken::generate().digest, token.digest);
        for text in ["", "x", &"a".repeat(44), &"ä".repeat(43), &format!("{} ", "a".repeat(42))] {
            assert_eq!(token_digest(&Secret::new(text.to_owned())), None, "{text}");
        }
    }

    #[test]
    fn a_sealed_fingerprint_depends_on_the_key() {
        let identity = || Some(RequestIdentity { id: [1; 16], fingerprint: [2; 16] });
        let (one, two) = (DigestKey::new([1; 32]), DigestKey::new([2; 32]));
        assert_eq!(one.sealed(identity()), one.sealed(identity()));
        assert_ne!(one.sealed(identity()), two.sealed(identity()));
        assert_ne!(one.sealed(identity()).unwrap().fingerprint, [2; 16]);
    }
}
