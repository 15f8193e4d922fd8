//! Secrets: values that are never printed, the master key with the keys derived from it, and encryption for the
//! database.

use std::fmt;

use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD, Engine};
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
use hkdf::Hkdf;
use rand::RngCore;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A value that must not appear in a log: it prints as `***`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    pub fn new(value: T) -> Secret<T> {
        Secret(value)
    }

    /// Returns the value. Review every call when a secret leaks.
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

/// The secret key of an installation: 32 random bytes. Signing, cursor and encryption keys are derived from it, so
/// all replicas with the same master key have the same keys.
#[derive(Clone)]
pub struct MasterKey([u8; 32]);

/// The text is not a master key.
#[derive(Debug, thiserror::Error)]
#[error("not a key: a key is 32 bytes in base64, as `openssl rand -base64 32` prints them")]
pub struct InvalidKey;

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

    /// Derives a key of 32 bytes. The keys of different purposes are independent.
    pub fn derive(&self, purpose: &str) -> [u8; 32] {
        let mut out = [0; 32];
        // Fails only for an output of more than 255 hash lengths.
        let _ = Hkdf::<Sha256>::new(None, &self.0).expand(purpose.as_bytes(), &mut out);
        out
    }

    /// Returns a digest that identifies the key without revealing it.
    pub fn fingerprint(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(&self.derive("fingerprint")[..12])
    }
}

impl std::str::FromStr for MasterKey {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<MasterKey, InvalidKey> {
        let bytes = BASE64_STANDARD.decode(text.trim()).map_err(|_| InvalidKey)?;
        bytes.try_into().map(MasterKey).map_err(|_| InvalidKey)
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey(***)")
    }
}

/// Encrypts small secrets for the database, so that a copy of the database reveals none. A ciphertext can be
/// decrypted only unmodified and with the `context` that it was encrypted with (for example the id of the row), so it
/// cannot be moved to another row.
///
/// The format: version, id of the key, nonce, output of XChaCha20-Poly1305. The nonce is long enough to be random for
/// any number of values.
#[derive(Clone)]
pub struct Cipher {
    current: CipherKey,
    previous: Vec<CipherKey>,
}

#[derive(Clone)]
struct CipherKey {
    id: [u8; 4],
    cipher: XChaCha20Poly1305,
}

/// The reason why a ciphertext cannot be decrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecryptError {
    #[error("not a ciphertext of a supported version")]
    Malformed,
    #[error("encrypted with a secret key that is neither the current one nor a previous one")]
    UnknownKey,
    #[error("modified after encryption, or encrypted for another context")]
    Tampered,
}

const VERSION: u8 = 1;
const NONCE_BYTES: usize = 24;

impl Cipher {
    /// Encrypts with the current key and decrypts with any. Each purpose has its own keys.
    pub fn new(current: &MasterKey, previous: &[MasterKey], purpose: &str) -> Cipher {
        let key = |master: &MasterKey| {
            let [a, b, c, d, ..] = master.derive(&format!("{purpose} id"));
            CipherKey { id: [a, b, c, d], cipher: XChaCha20Poly1305::new(&master.derive(purpose).into()) }
        };
        Cipher { current: key(current), previous: previous.iter().map(key).collect() }
    }

    /// Returns the ciphertext of `plain`, bound to `context`.
    pub fn encrypt(&self, plain: &[u8], context: &[u8]) -> Vec<u8> {
        let CipherKey { id, cipher } = &self.current;
        let mut nonce = [0; NONCE_BYTES];
        rand::rng().fill_bytes(&mut nonce);
        let payload = Payload { msg: plain, aad: &associated_data(*id, context) };
        // Fails only for more than 256 GiB.
        let ciphertext = cipher.encrypt(&XNonce::from(nonce), payload).unwrap_or_default();
        [&[VERSION], id.as_slice(), nonce.as_slice(), ciphertext.as_slice()].concat()
    }

    /// Returns the plaintext. Fails if the ciphertext was modified, has an unknown key or belongs to another context.
    pub fn decrypt(&self, encrypted: &[u8], context: &[u8]) -> Result<Vec<u8>, DecryptError> {
        let (version, rest) = encrypted.split_first().ok_or(DecryptError::Malformed)?;
        let (id, rest) = rest.split_first_chunk::<4>().ok_or(DecryptError::Malformed)?;
        let (nonce, ciphertext) = rest.split_first_chunk::<NONCE_BYTES>().ok_or(DecryptError::Malformed)?;
        if *version != VERSION {
            return Err(DecryptError::Malformed);
        }
        let mut keys = std::iter::once(&self.current).chain(&self.previous);
        let key = keys.find(|key| key.id == *id).ok_or(DecryptError::UnknownKey)?;
        let payload = Payload { msg: ciphertext, aad: &associated_data(*id, context) };
        key.cipher.decrypt(&XNonce::from(*nonce), payload).map_err(|_| DecryptError::Tampered)
    }
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher(***)")
    }
}

/// The associated data of the encryption: everything besides the key that a ciphertext is bound to.
fn associated_data(id: [u8; 4], context: &[u8]) -> Vec<u8> {
    [&[VERSION], id.as_slice(), context].concat()
}

/// Returns the SHA-256 of a random secret, which has enough entropy to need no slow hash.
pub fn digest(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

/// Returns `length` random alphanumeric characters, with almost 6 bits of entropy each.
pub fn random_text(length: usize) -> String {
    use rand::distr::{Alphanumeric, SampleString};
    Alphanumeric.sample_string(&mut rand::rng(), length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let secret = Secret::new("hunter2".to_owned());
        assert!(!format!("{secret:?} {:?}", MasterKey::generate()).contains("hunter2"));
        assert_eq!(format!("{secret:?}"), "***");
    }

    #[test]
    fn derived_keys_differ_by_purpose_and_master_key() {
        let (one, two) = (MasterKey::generate(), MasterKey::generate());
        assert_ne!(one.derive("a"), one.derive("b"));
        assert_ne!(one.derive("a"), two.derive("a"));
        let again: MasterKey = one.to_base64().parse().unwrap();
        assert_eq!(one.derive("a"), again.derive("a"));
    }

    #[test]
    fn an_invalid_master_key_is_rejected() {
        assert!("c2hvcnQ=".parse::<MasterKey>().is_err());
        assert!("not base64".parse::<MasterKey>().is_err());
    }

    #[test]
    fn encryption_is_reversible_and_randomized() {
        let cipher = Cipher::new(&MasterKey::generate(), &[], "test");
        for plain in [b"".as_slice(), b"hunter2", &[7; 10_000]] {
            let encrypted = cipher.encrypt(plain, b"row 1");
            assert_eq!(cipher.decrypt(&encrypted, b"row 1").as_deref(), Ok(plain));
            assert_ne!(encrypted, cipher.encrypt(plain, b"row 1"));
            assert!(plain.is_empty() || !encrypted.windows(plain.len()).any(|window| window == plain));
        }
        assert_eq!(format!("{cipher:?}"), "Cipher(***)");
    }

    #[test]
    fn a_ciphertext_is_bound_to_its_context_and_purpose() {
        let master = MasterKey::generate();
        let encrypted = Cipher::new(&master, &[], "test").encrypt(b"hunter2", b"row 1");
        let decrypt = |purpose, context: &[u8]| Cipher::new(&master, &[], purpose).decrypt(&encrypted, context);
        assert_eq!(decrypt("test", b"row 1").as_deref(), Ok(b"hunter2".as_slice()));
        for context in [b"row 2".as_slice(), b"", b"row 11"] {
            assert_eq!(decrypt("test", context), Err(DecryptError::Tampered));
        }
        assert_eq!(decrypt("other", b"row 1"), Err(DecryptError::UnknownKey));
    }

    #[test]
    fn a_modified_or_truncated_ciphertext_is_rejected() {
        let cipher = Cipher::new(&MasterKey::generate(), &[], "test");
        let encrypted = cipher.encrypt(b"hunter2", b"");
        for bit in 0..encrypted.len() * 8 {
            let mut flipped = encrypted.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(cipher.decrypt(&flipped, b"").is_err(), "bit {bit}");
        }
        for length in 0..encrypted.len() {
            assert!(cipher.decrypt(&encrypted[..length], b"").is_err(), "{length} bytes");
        }
        assert_eq!(cipher.decrypt(&[encrypted, vec![0]].concat(), b""), Err(DecryptError::Tampered));
    }

    #[test]
    fn a_previous_key_decrypts_but_does_not_encrypt() {
        let (old, new) = (MasterKey::generate(), MasterKey::generate());
        let before = Cipher::new(&old, &[], "test");
        let encrypted = before.encrypt(b"hunter2", b"");
        let after = Cipher::new(&new, std::slice::from_ref(&old), "test");
        assert_eq!(after.decrypt(&encrypted, b"").as_deref(), Ok(b"hunter2".as_slice()));
        let again = after.encrypt(b"hunter2", b"");
        assert_eq!(before.decrypt(&again, b""), Err(DecryptError::UnknownKey));
        assert_eq!(Cipher::new(&new, &[], "test").decrypt(&encrypted, b""), Err(DecryptError::UnknownKey));
    }
}
