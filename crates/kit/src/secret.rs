//! Secrets: never printed, and one from which the others grow.

use std::fmt;

use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD, Engine};
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
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

/// Encrypts small secrets for the database, so that a copy of it gives none away. What is sealed opens only unchanged and
/// with the `context` that it was sealed with (say, the row's id): it cannot be moved to another row.
///
/// A sealed value is a version, the id of its key, a nonce, and XChaCha20-Poly1305's output. The nonce is long enough to
/// be drawn at random for any number of values.
#[derive(Clone)]
pub struct Seal {
    current: SealKey,
    previous: Vec<SealKey>,
}

#[derive(Clone)]
struct SealKey {
    id: [u8; 4],
    cipher: XChaCha20Poly1305,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotOpened {
    #[error("not a sealed value of a version that is known here")]
    NotSealed,
    #[error("sealed under a secret key that is neither the current one nor a previous one")]
    UnknownKey,
    #[error("changed since it was sealed, or sealed for something else")]
    Changed,
}

const SEAL_VERSION: u8 = 1;
const NONCE_BYTES: usize = 24;

impl Seal {
    /// Seals with the current key; opens with any. Each purpose has keys of its own.
    pub fn new(current: &MasterKey, previous: &[MasterKey], purpose: &str) -> Seal {
        let key = |master: &MasterKey| {
            let [a, b, c, d, ..] = master.derive(&format!("{purpose} id"));
            SealKey { id: [a, b, c, d], cipher: XChaCha20Poly1305::new(&master.derive(purpose).into()) }
        };
        Seal { current: key(current), previous: previous.iter().map(key).collect() }
    }

    pub fn seal(&self, plain: &[u8], context: &[u8]) -> Vec<u8> {
        let SealKey { id, cipher } = &self.current;
        let mut nonce = [0; NONCE_BYTES];
        rand::rng().fill_bytes(&mut nonce);
        let payload = Payload { msg: plain, aad: &bound(*id, context) };
        // Fails only for more than 256 GiB.
        let sealed = cipher.encrypt(&XNonce::from(nonce), payload).unwrap_or_default();
        [&[SEAL_VERSION], id.as_slice(), nonce.as_slice(), sealed.as_slice()].concat()
    }

    pub fn open(&self, sealed: &[u8], context: &[u8]) -> Result<Vec<u8>, NotOpened> {
        let (version, rest) = sealed.split_first().ok_or(NotOpened::NotSealed)?;
        let (id, rest) = rest.split_first_chunk::<4>().ok_or(NotOpened::NotSealed)?;
        let (nonce, sealed) = rest.split_first_chunk::<NONCE_BYTES>().ok_or(NotOpened::NotSealed)?;
        if *version != SEAL_VERSION {
            return Err(NotOpened::NotSealed);
        }
        let mut keys = std::iter::once(&self.current).chain(&self.previous);
        let key = keys.find(|key| key.id == *id).ok_or(NotOpened::UnknownKey)?;
        let payload = Payload { msg: sealed, aad: &bound(*id, context) };
        key.cipher.decrypt(&XNonce::from(*nonce), payload).map_err(|_| NotOpened::Changed)
    }

    /// Is it sealed under a previous key, so that it is worth sealing again?
    pub fn is_stale(&self, sealed: &[u8]) -> bool {
        sealed.get(1..5) != Some(self.current.id.as_slice())
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seal(***)")
    }
}

/// What a sealed value is tied to, beside its key.
fn bound(id: [u8; 4], context: &[u8]) -> Vec<u8> {
    [&[SEAL_VERSION], id.as_slice(), context].concat()
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

    #[test]
    fn what_is_sealed_opens_again_and_never_looks_the_same() {
        let seal = Seal::new(&MasterKey::generate(), &[], "test");
        for plain in [b"".as_slice(), b"hunter2", &[7; 10_000]] {
            let sealed = seal.seal(plain, b"row 1");
            assert_eq!(seal.open(&sealed, b"row 1").as_deref(), Ok(plain));
            assert_ne!(sealed, seal.seal(plain, b"row 1"));
            assert!(plain.is_empty() || !sealed.windows(plain.len()).any(|window| window == plain));
        }
        assert_eq!(format!("{seal:?}"), "Seal(***)");
    }

    #[test]
    fn a_sealed_value_is_tied_to_its_context_and_its_purpose() {
        let master = MasterKey::generate();
        let sealed = Seal::new(&master, &[], "test").seal(b"hunter2", b"row 1");
        let open = |purpose, context: &[u8]| Seal::new(&master, &[], purpose).open(&sealed, context);
        assert_eq!(open("test", b"row 1").as_deref(), Ok(b"hunter2".as_slice()));
        for context in [b"row 2".as_slice(), b"", b"row 11"] {
            assert_eq!(open("test", context), Err(NotOpened::Changed));
        }
        assert_eq!(open("other", b"row 1"), Err(NotOpened::UnknownKey));
    }

    #[test]
    fn no_bit_and_no_byte_of_a_sealed_value_can_change() {
        let seal = Seal::new(&MasterKey::generate(), &[], "test");
        let sealed = seal.seal(b"hunter2", b"");
        for bit in 0..sealed.len() * 8 {
            let mut flipped = sealed.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(seal.open(&flipped, b"").is_err(), "bit {bit}");
        }
        for length in 0..sealed.len() {
            assert!(seal.open(&sealed[..length], b"").is_err(), "{length} bytes");
        }
        assert_eq!(seal.open(&[sealed, vec![0]].concat(), b""), Err(NotOpened::Changed));
    }

    #[test]
    fn a_previous_key_opens_but_does_not_seal_and_an_unknown_one_is_told() {
        let (old, new) = (MasterKey::generate(), MasterKey::generate());
        let before = Seal::new(&old, &[], "test");
        let sealed = before.seal(b"hunter2", b"");
        let after = Seal::new(&new, std::slice::from_ref(&old), "test");
        assert_eq!(after.open(&sealed, b"").as_deref(), Ok(b"hunter2".as_slice()));
        assert!(after.is_stale(&sealed) && !before.is_stale(&sealed));
        let again = after.seal(b"hunter2", b"");
        assert_eq!(before.open(&again, b""), Err(NotOpened::UnknownKey));
        assert_eq!(Seal::new(&new, &[], "test").open(&sealed, b""), Err(NotOpened::UnknownKey));
    }
}
