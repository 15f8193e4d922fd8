//! Signs and verifies deliveries by Standard Webhooks 1.0.0: over `{id}.{timestamp}.{body}`, symmetric (`v1`) or
//! ed25519 (`v1a`).
//!
//! While a receiver rotates its secret, it has several. A delivery then carries one signature per secret, and the
//! receiver accepts the delivery if any of them matches.

use std::fmt;

use base64::prelude::{BASE64_STANDARD, Engine};
use chrono::{DateTime, Utc};
use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use hmac::{Hmac, Mac};
use http::{HeaderMap, HeaderName, HeaderValue};
use rand::RngCore;
use sha2::Sha256;

/// The header with the id of the message.
pub const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
/// The header with the time of the request, in Unix seconds.
pub const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
/// The header with the signatures.
pub const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// Allowance for clock skew between sender and receiver, and for the time that a delivery is under way.
const TOLERANCE_SECONDS: u64 = 5 * 60;
/// The length of a symmetric secret.
const SYMMETRIC_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

type HmacSha256 = Hmac<Sha256>;

/// The kind of signature that a secret makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretKind {
    /// `v1`, HMAC-SHA256: the receiver knows the same secret.
    Symmetric,
    /// `v1a`: the receiver knows only the public key.
    Ed25519,
}

/// A secret that signs deliveries. Its debug output does not contain it.
#[derive(Clone)]
pub struct SigningSecret(Inner);

#[derive(Clone)]
enum Inner {
    /// The HMAC is keyed in advance, which halves the hashing per signature.
    Symmetric {
        key: Vec<u8>,
        keyed: Box<HmacSha256>,
    },
    Ed25519(Box<SigningKey>),
}

/// A text that is not a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be `whsec_` and 24 to 64 bytes in base64, or `whsk_` and an ed25519 key pair in base64")]
pub struct InvalidSecret;

impl SigningSecret {
    /// Generates a random secret.
    pub fn generate(kind: SecretKind) -> SigningSecret {
        let mut bytes = [0; 32];
        rand::rng().fill_bytes(&mut bytes);
        SigningSecret(match kind {
            SecretKind::Symmetric => Inner::symmetric(bytes.to_vec()),
            SecretKind::Ed25519 => Inner::Ed25519(Box::new(SigningKey::from_bytes(&bytes))),
        })
    }

    /// Parses `whsec_...` or `whsk_...`.
    ///
    /// # Errors
    /// The text is not a secret of either kind.
    pub fn parse(text: &str) -> Result<SigningSecret, InvalidSecret> {
        if let Some(bytes) = decode(text, "whsec_") {
            return symmetric_key(bytes).map(|key| SigningSecret(Inner::symmetric(key)));
        }
        let pair: [u8; 64] = decode(text, "whsk_").and_then(|bytes| bytes.try_into().ok()).ok_or(InvalidSecret)?;
        // Fails if the public key does not belong to the private key.
        let key = SigningKey::from_keypair_bytes(&pair).map_err(|_| InvalidSecret)?;
        Ok(SigningSecret(Inner::Ed25519(Box::new(key))))
    }

    /// Returns the secret itself, as `whsec_...` or `whsk_...`. Search for calls of this function when a secret leaks.
    pub fn to_text(&self) -> String {
        match &self.0 {
            Inner::Symmetric { key, .. } => format!("whsec_{}", BASE64_STANDARD.encode(key)),
            Inner::Ed25519(key) => format!("whsk_{}", BASE64_STANDARD.encode(key.to_keypair_bytes())),
        }
    }

    /// Returns the public key as `whpk_...`, or None for a symmetric secret.
    pub fn public_key(&self) -> Option<String> {
        match &self.0 {
            Inner::Symmetric { .. } => None,
            Inner::Ed25519(key) => Some(format!("whpk_{}", BASE64_STANDARD.encode(key.verifying_key().as_bytes()))),
        }
    }

    /// Returns the kind of signature that this secret makes.
    pub fn kind(&self) -> SecretKind {
        match &self.0 {
            Inner::Symmetric { .. } => SecretKind::Symmetric,
            Inner::Ed25519(_) => SecretKind::Ed25519,
        }
    }
}

impl Inner {
    fn symmetric(key: Vec<u8>) -> Inner {
        Inner::Symmetric { keyed: Box::new(keyed_hmac(&key)), key }
    }
}

impl fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningSecret(***)")
    }
}

/// Returns the secrets that have not expired at `now`. Each comes with its expiry, or None if it has none.
pub fn active_secrets(
    secrets: &[(SigningSecret, Option<DateTime<Utc>>)],
    now: DateTime<Utc>,
) -> impl Iterator<Item = &SigningSecret> {
    secrets.iter().filter(move |(_, expires_at)| expires_at.is_none_or(|at| at > now)).map(|(secret, _)| secret)
}

/// Returns the value of `webhook-signature`: one entry per secret, in their order. `timestamp` is in Unix seconds. `id`
/// must not contain a dot: otherwise two different contents could have the same signature.
pub fn sign<'a>(
    secrets: impl IntoIterator<Item = &'a SigningSecret>,
    id: &str,
    timestamp: i64,
    body: &[u8],
) -> HeaderValue {
    debug_assert!(!id.contains('.'), "{id}");
    let timestamp = timestamp.to_string();
    let mut value = String::new();
    for secret in secrets {
        if !value.is_empty() {
            value.push(' ');
        }
        match &secret.0 {
            Inner::Symmetric { keyed, .. } => {
                value.push_str("v1,");
                let mac = hash_content((**keyed).clone(), id, &timestamp, body).finalize().into_bytes();
                BASE64_STANDARD.encode_string(mac, &mut value);
            }
            Inner::Ed25519(key) => {
                value.push_str("v1a,");
                BASE64_STANDARD.encode_string(key.sign(&content(id, &timestamp, body)).to_bytes(), &mut value);
            }
        }
    }
    // Base64, commas and spaces are always valid in a header.
    HeaderValue::try_from(value).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// The key with which a receiver verifies deliveries.
#[derive(Clone)]
pub struct Verifier(VerifierKey);

#[derive(Clone)]
enum VerifierKey {
    Symmetric(Box<HmacSha256>),
    Ed25519(Box<VerifyingKey>),
}

/// Why a delivery is not authentic or not recent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// A header of Standard Webhooks is missing.
    #[error("the header `{0}` is missing or not ASCII text")]
    MissingHeader(HeaderName),
    /// The timestamp is not a number.
    #[error("`webhook-timestamp` must be a number of seconds since 1970")]
    InvalidTimestamp,
    /// The delivery is too old, or a clock is wrong.
    #[error(
        "`webhook-timestamp` differs from the current time by {0} seconds: at most {TOLERANCE_SECONDS} are accepted"
    )]
    TimestampOutOfRange(u64),
    /// The delivery was signed with another secret, or has been changed.
    #[error("no signature in `webhook-signature` matches this body and this secret")]
    NoMatchingSignature,
}

impl Verifier {
    /// Parses `whsec_...`, `whpk_...`, and for convenience `whsk_...`.
    ///
    /// # Errors
    /// The text is none of them.
    pub fn parse(text: &str) -> Result<Verifier, InvalidSecret> {
        if let Some(bytes) = decode(text, "whpk_") {
            let public: [u8; 32] = bytes.try_into().map_err(|_| InvalidSecret)?;
            let key = VerifyingKey::from_bytes(&public).map_err(|_| InvalidSecret)?;
            return Ok(Verifier(VerifierKey::Ed25519(Box::new(key))));
        }
        SigningSecret::parse(text).map(|secret| Verifier::from(&secret))
    }

    /// Checks that the delivery was signed with the secret at about `now` (Unix seconds).
    ///
    /// # Errors
    /// A header is missing or invalid, the timestamp is too old or too new, or no signature matches.
    pub fn verify(&self, headers: &HeaderMap, body: &[u8], now: i64) -> Result<(), VerifyError> {
        let text = |name: HeaderName| {
            headers.get(&name).and_then(|value| value.to_str().ok()).ok_or(VerifyError::MissingHeader(name))
        };
        let (id, timestamp) = (text(WEBHOOK_ID)?, text(WEBHOOK_TIMESTAMP)?);
        let signatures = text(WEBHOOK_SIGNATURE)?;
        let skew = timestamp.parse::<i64>().map_err(|_| VerifyError::InvalidTimestamp)?.abs_diff(now);
        if skew > TOLERANCE_SECONDS {
            return Err(VerifyError::TimestampOutOfRange(skew));
        }
        let matches = |entry: &str| self.matches(entry, id, timestamp, body);
        signatures.split(' ').any(matches).then_some(()).ok_or(VerifyError::NoMatchingSignature)
    }

    fn matches(&self, entry: &str, id: &str, timestamp: &str, body: &[u8]) -> bool {
        let Some((version, signature)) = entry.split_once(',') else { return false };
        let Ok(signature) = BASE64_STANDARD.decode(signature) else { return false };
        match (&self.0, version) {
            // `verify_slice` compares in constant time.
            (VerifierKey::Symmetric(keyed), "v1") => {
                hash_content((**keyed).clone(), id, timestamp, body).verify_slice(&signature).is_ok()
            }
            // `verify_strict` rejects malleable signatures and weak keys.
            (VerifierKey::Ed25519(key), "v1a") => ed25519_dalek::Signature::from_slice(&signature)
                .is_ok_and(|signature| key.verify_strict(&content(id, timestamp, body), &signature).is_ok()),
            (VerifierKey::Symmetric(_) | VerifierKey::Ed25519(_), _) => false,
        }
    }
}

impl From<&SigningSecret> for Verifier {
    fn from(secret: &SigningSecret) -> Verifier {
        Verifier(match &secret.0 {
            Inner::Symmetric { keyed, .. } => VerifierKey::Symmetric(keyed.clone()),
            Inner::Ed25519(key) => VerifierKey::Ed25519(Box::new(key.verifying_key())),
        })
    }
}

fn decode(text: &str, prefix: &str) -> Option<Vec<u8>> {
    BASE64_STANDARD.decode(text.strip_prefix(prefix)?).ok()
}

fn symmetric_key(bytes: Vec<u8>) -> Result<Vec<u8>, InvalidSecret> {
    SYMMETRIC_BYTES.contains(&bytes.len()).then_some(bytes).ok_or(InvalidSecret)
}

#[allow(clippy::expect_used, reason = "HMAC accepts a key of any length; the trait is fallible for other algorithms")]
fn keyed_hmac(key: &[u8]) -> HmacSha256 {
    HmacSha256::new_from_slice(key).expect("HMAC accepts a key of any length")
}

fn hash_content(keyed: HmacSha256, id: &str, timestamp: &str, body: &[u8]) -> HmacSha256 {
    [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].into_iter().fold(keyed, |mac, part| mac.chain_update(part))
}

fn content(id: &str, timestamp: &str, body: &[u8]) -> Vec<u8> {
    [id.as_bytes(), timestamp.as_bytes(), body].join(&b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const ID: &str = "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk";
    const NOW: i64 = 1_649_367_553;
    const BODY: &[u8] = br#"{"email":"test@example.com","username":"test_user"}"#;

    fn generated(kind: SecretKind) -> SigningSecret {
        SigningSecret::generate(kind)
    }

    fn headers(timestamp: i64, signature: &HeaderValue) -> HeaderMap {
        [(WEBHOOK_ID, HeaderValue::from_static(ID)), (WEBHOOK_TIMESTAMP, timestamp.into())]
            .into_iter()
            .chain([(WEBHOOK_SIGNATURE, signature.clone())])
            .collect()
    }

    #[test]
    fn the_test_vector_of_the_specification_matches() {
        let secret = SigningSecret::parse(SECRET).unwrap();
        let signature = sign(&[secret], ID, NOW, BODY);
        assert_eq!(signature, "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=");
    }

    #[test]
    fn a_rotation_signs_with_every_secret_and_each_verifies() {
        let secrets =
            [generated(SecretKind::Symmetric), generated(SecretKind::Ed25519), generated(SecretKind::Symmetric)];
        let signature = sign(&secrets, ID, NOW, BODY);
        let versions: Vec<_> = signature.to_str().unwrap().split(' ').map(|entry| entry.split(',').next()).collect();
        assert_eq!(versions, [Some("v1"), Some("v1a"), Some("v1")]);
        let headers = headers(NOW, &signature);
        for secret in &secrets {
            Verifier::from(secret).verify(&headers, BODY, NOW).unwrap();
        }
        let whpk = secrets[1].public_key().unwrap();
        Verifier::parse(&whpk).unwrap().verify(&headers, BODY, NOW).unwrap();
        for stranger in [SecretKind::Symmetric, SecretKind::Ed25519] {
            let verified = Verifier::from(&generated(stranger)).verify(&headers, BODY, NOW);
            assert_eq!(verified, Err(VerifyError::NoMatchingSignature));
        }
    }

    #[test]
    fn a_tampered_delivery_is_refused() {
        for kind in [SecretKind::Symmetric, SecretKind::Ed25519] {
            let secret = generated(kind);
            let verifier = Verifier::from(&secret);
            let signature = sign(std::slice::from_ref(&secret), ID, NOW, BODY);
            let good = headers(NOW, &signature);
            verifier.verify(&good, BODY, NOW).unwrap();
            assert_eq!(verifier.verify(&good, b"{}", NOW), Err(VerifyError::NoMatchingSignature));
            let mut other_id = good.clone();
            other_id.insert(WEBHOOK_ID, HeaderValue::from_static("msg_other"));
            assert_eq!(verifier.verify(&other_id, BODY, NOW), Err(VerifyError::NoMatchingSignature));
            assert_eq!(
                verifier.verify(&headers(NOW + 1, &signature), BODY, NOW),
                Err(VerifyError::NoMatchingSignature)
            );
            // A valid signature under the name of the other version.
            let renamed =
                signature.to_str().unwrap().replace("v1a,", "v2,").replace("v1,", "v1a,").replace("v2,", "v1,");
            let renamed = HeaderValue::try_from(renamed).unwrap();
            assert_eq!(verifier.verify(&headers(NOW, &renamed), BODY, NOW), Err(VerifyError::NoMatchingSignature));
            for broken in ["", "v1", "v1,", "v1,=", "v1a,AAAA", ",", "v1,AAAA v1a,AAAA"] {
                let broken = HeaderValue::from_static(broken);
                assert_eq!(verifier.verify(&headers(NOW, &broken), BODY, NOW), Err(VerifyError::NoMatchingSignature));
            }
        }
    }

    #[test]
    fn a_clock_skew_of_at_most_five_minutes_is_accepted() {
        let secret = generated(SecretKind::Symmetric);
        let verifier = Verifier::from(&secret);
        let signed = headers(NOW, &sign(&[secret], ID, NOW, BODY));
        for now in [NOW - 300, NOW + 300] {
            verifier.verify(&signed, BODY, now).unwrap();
        }
        for now in [NOW - 301, NOW + 301] {
            assert_eq!(verifier.verify(&signed, BODY, now), Err(VerifyError::TimestampOutOfRange(301)));
        }
        let mut broken = signed.clone();
        broken.insert(WEBHOOK_TIMESTAMP, HeaderValue::from_static("today"));
        assert_eq!(verifier.verify(&broken, BODY, NOW), Err(VerifyError::InvalidTimestamp));
        broken.remove(WEBHOOK_SIGNATURE);
        assert_eq!(verifier.verify(&broken, BODY, NOW), Err(VerifyError::MissingHeader(WEBHOOK_SIGNATURE)));
    }

    #[test]
    fn a_secret_round_trips_as_text_and_is_not_printed() {
        for kind in [SecretKind::Symmetric, SecretKind::Ed25519] {
            let secret = generated(kind);
            let again = SigningSecret::parse(&secret.to_text()).unwrap();
            assert_eq!(
                (again.kind(), again.to_text(), again.public_key()),
                (kind, secret.to_text(), secret.public_key())
            );
            assert_eq!(sign(std::slice::from_ref(&secret), ID, NOW, BODY), sign(&[again], ID, NOW, BODY));
            assert_eq!(format!("{secret:?}"), "SigningSecret(***)");
        }
        assert_eq!(BASE64_STANDARD.decode(&generated(SecretKind::Symmetric).to_text()[6..]).unwrap().len(), 32);
    }

    #[test]
    fn an_invalid_secret_is_refused() {
        let of = |prefix: &str, length: usize| format!("{prefix}{}", BASE64_STANDARD.encode(vec![7; length]));
        for good in [of("whsec_", 24), of("whsec_", 64)] {
            SigningSecret::parse(&good).unwrap();
        }
        // The last one is a pair whose public key does not belong to its private key.
        for bad in [
            of("whsec_", 23),
            of("whsec_", 65),
            of("", 32),
            of("whsk_", 32),
            of("whpk_", 32),
            "whsec_?".into(),
            "".into(),
            of("whsk_", 64),
        ] {
            assert!(SigningSecret::parse(&bad).is_err(), "{bad}");
        }
        for bad in [of("whpk_", 31), "whpk_".into(), of("whsec_", 1)] {
            assert!(Verifier::parse(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn signatures_are_interchangeable_with_the_reference_library() {
        let secret = generated(SecretKind::Symmetric);
        let reference = standardwebhooks::Webhook::new(&secret.to_text()).unwrap();
        let now = chrono::Utc::now().timestamp();
        let ours = headers(now, &sign(&[generated(SecretKind::Symmetric), secret.clone()], ID, now, BODY));
        reference.verify(BODY, &ours).unwrap();
        let theirs = HeaderValue::try_from(reference.sign(ID, now, BODY).unwrap()).unwrap();
        Verifier::from(&secret).verify(&headers(now, &theirs), BODY, now).unwrap();
    }
}
