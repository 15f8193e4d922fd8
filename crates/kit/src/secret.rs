//! Secrets: never printed, and one from which the others grow.

use std::fmt;

use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD, Engine};
use hkdf::Hkdf;
use rand::RngCore;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A value that must not reach a log: it prints as `***`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    pub fn new(value: T) -> Secret<T> {
        Secret(value)
    }

    /// The value itself. Every call is a place to look at when a secret leaks.
    pub fn reveal(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl<T: std::str::FromStr> std::str::FromStr for Secret<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Secret<T>, T::Err> {
        text.parse().map(Secret)
    }
}

/// The one secret of an installation: 32 random bytes. Signing keys, cursor keys and encryption keys are derived from
/// it, so replicas that share it agree on all of them.
#[derive(Clone)]
pub struct MasterKey([u8; 32]);

#[derive(Debug, thiserror::Error)]
#[error("not a key: it takes 32 bytes in base64, as `openssl rand -base64 32` prints them")]
pub struct NotAKey;

impl MasterKey {
    pub fn generate() -> MasterKey {
        let mut bytes = [0; 32];
        rand::rng().fill_bytes(&mut bytes);
        MasterKey(bytes)
    }

    pub fn from_bytes(bytes: [u8; 32]) -> MasterKey {
        MasterKey(bytes)
    }

    pub fn to_base64(&self) -> String {
        BASE64_STANDARD.encode(self.0)
    }

    /// Another 32 bytes, independent for each purpose.
    pub fn derive(&self, purpose: &str) -> [u8; 32] {
        let mut out = [0; 32];
        // Fails only for more than 255 hash lengths of output.
        let _ = Hkdf::<Sha256>::new(None, &self.0).expand(purpose.as_bytes(), &mut out);
        out
    }

    /// Tells two keys apart without giving either away.
    pub fn fingerprint(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(&self.derive("fingerprint")[..12])
    }
}

impl std::str::FromStr for MasterKey {
    type Err = NotAKey;

    fn from_str(text: &str) -> Result<MasterKey, NotAKey> {
        let bytes = BASE64_STANDARD.decode(text.trim()).map_err(|_| NotAKey)?;
        bytes.try_into().map(MasterKey).map_err(|_| NotAKey)
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey(***)")
    }
}

/// SHA-256, for secrets with enough randomness of their own to need no slow hash.
pub fn digest(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

/// `length` random characters out of 62: close to 6 bits each.
pub fn random_text(length: usize) -> String {
    use rand::distr::{Alphanumeric, SampleString};
    Alphanumeric.sample_string(&mut rand::rng(), length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_do_not_print() {
        let secret = Secret::new("hunter2".to_owned());
        assert!(!format!("{secret:?} {:?}", MasterKey::generate()).contains("hunter2"));
        assert_eq!(format!("{secret:?}"), "***");
    }

    #[test]
    fn purposes_and_keys_have_different_children() {
        let (one, two) = (MasterKey::generate(), MasterKey::generate());
        assert_ne!(one.derive("a"), one.derive("b"));
        assert_ne!(one.derive("a"), two.derive("a"));
        let again: MasterKey = one.to_base64().parse().unwrap();
        assert_eq!(one.derive("a"), again.derive("a"));
    }

    #[test]
    fn a_short_key_is_refused() {
        assert!("c2hvcnQ=".parse::<MasterKey>().is_err());
        assert!("not base64".parse::<MasterKey>().is_err());
    }
}
