//! Signatures after Standard Webhooks 1.0.0: over `{id}.{timestamp}.{body}`, symmetric (`v1`) or ed25519 (`v1a`).
//!
//! A subscriber that rotates its secret has two for a while; a delivery then carries a signature of each, and whoever
//! verifies takes any that fits.

use std::fmt;

use base64::prelude::{BASE64_STANDARD, Engine};
use chrono::{DateTime, Utc};
use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use hmac::{Hmac, Mac};
use http::{HeaderMap, HeaderName, HeaderValue};
use rand::RngCore;
use sha2::Sha256;

pub const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
pub const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
pub const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// How far a receiver's clock may be from the sender's.
const TOLERANCE_SECONDS: u64 = 5 * 60;
const SYMMETRIC_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

type HmacSha256 = Hmac<Sha256>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretKind {
    /// `v1`: the receiver knows the same secret.
    Symmetric,
    /// `v1a`: the receiver knows the public key only.
    Ed25519,
}

/// What a subscriber's deliveries are signed with. It does not print.
#[derive(Clone)]
pub struct SigningSecret(Inner);

#[derive(Clone)]
enum Inner {
    /// With the hash begun, so that a signature costs half the hashing.
    Symmetric {
        key: Vec<u8>,
        begun: Box<HmacSha256>,
    },
    Ed25519(Box<SigningKey>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a secret: it takes `whsec_` and 24 to 64 bytes in base64, or `whsk_` and an ed25519 key pair in base64")]
pub struct NotASecret;

impl SigningSecret {
    pub fn generate(kind: SecretKind) -> SigningSecret {
        let mut bytes = [0; 32];
        rand::rng().fill_bytes(&mut bytes);
        SigningSecret(match kind {
            SecretKind::Symmetric => Inner::symmetric(bytes.to_vec()),
            SecretKind::Ed25519 => Inner::Ed25519(Box::new(SigningKey::from_bytes(&bytes))),
        })
    }

    pub fn parse(text: &str) -> Result<SigningSecret, NotASecret> {
        if let Some(bytes) = decode(text, "whsec_") {
            return symmetric_key(bytes).map(|key| SigningSecret(Inner::symmetric(key)));
        }
        let pair: [u8; 64] = decode(text, "whsk_").and_then(|bytes| bytes.try_into().ok()).ok_or(NotASecret)?;
        // Refuses a public half that does not belong to the seed.
        let key = SigningKey::from_keypair_bytes(&pair).map_err(|_| NotASecret)?;
        Ok(SigningSecret(Inner::Ed25519(Box::new(key))))
    }

    /// `whsec_...` or `whsk_...`: the secret itself. Every call is a place to look at when a secret leaks.
    pub fn to_text(&self) -> String {
        match &self.0 {
            Inner::Symmetric { key, .. } => format!("whsec_{}", BASE64_STANDARD.encode(key)),
            Inner::Ed25519(key) => format!("whsk_{}", BASE64_STANDARD.encode(key.to_keypair_bytes())),
        }
    }

    /// `whpk_...`, what a receiver verifies with; a symmetric secret has no public half.
    pub fn public(&self) -> Option<String> {
        match &self.0 {
            Inner::Symmetric { .. } => None,
            Inner::Ed25519(key) => Some(format!("whpk_{}", BASE64_STANDARD.encode(key.verifying_key().as_bytes()))),
        }
    }

    pub fn kind(&self) -> SecretKind {
        match &self.0 {
            Inner::Symmetric { .. } => SecretKind::Symmetric,
            Inner::Ed25519(_) => SecretKind::Ed25519,
        }
    }
}

impl Inner {
    fn symmetric(key: Vec<u8>) -> Inner {
        Inner::Symmetric { begun: Box::new(begun(&key)), key }
    }
}

impl fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningSecret(***)")
    }
}

/// Of secrets, each with when it ends, those that sign at this time.
pub(crate) fn live(
    secrets: &[(SigningSecret, Option<DateTime<Utc>>)],
    now: DateTime<Utc>,
) -> impl Iterator<Item = &SigningSecret> {
    secrets.iter().filter(move |(_, ends_at)| ends_at.is_none_or(|at| at > now)).map(|(secret, _)| secret)
}

/// The value of `webhook-signature`: one entry for each secret, the newest first if they come so. `timestamp` is in Unix
/// seconds, and `id` holds no dot: with one, two contents could be signed alike.
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
            Inner::Symmetric { begun, .. } => {
                value.push_str("v1,");
                let mac = over((**begun).clone(), id, &timestamp, body).finalize().into_bytes();
                BASE64_STANDARD.encode_string(mac, &mut value);
            }
            Inner::Ed25519(key) => {
                value.push_str("v1a,");
                BASE64_STANDARD.encode_string(key.sign(&content(id, &timestamp, body)).to_bytes(), &mut value);
            }
        }
    }
    // Base64, commas and spaces are always a header's value.
    HeaderValue::try_from(value).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// What a receiver verifies with.
#[derive(Clone)]
pub struct Verifier(Verifying);

#[derive(Clone)]
enum Verifying {
    Symmetric(Box<HmacSha256>),
    Ed25519(Box<VerifyingKey>),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotVerified {
    #[error("the header `{0}` is missing or not text")]
    Missing(HeaderName),
    #[error("`webhook-timestamp` is not a number of seconds since 1970")]
    NotATime,
    #[error("`webhook-timestamp` is {0} seconds away from now: at most {TOLERANCE_SECONDS} are tolerated")]
    NotNow(u64),
    #[error("no signature in `webhook-signature` fits this body and this secret")]
    NoneFits,
}

impl Verifier {
    /// Takes `whsec_...`, `whpk_...`, and for convenience `whsk_...`.
    pub fn parse(text: &str) -> Result<Verifier, NotASecret> {
        if let Some(bytes) = decode(text, "whpk_") {
            let public: [u8; 32] = bytes.try_into().map_err(|_| NotASecret)?;
            let key = VerifyingKey::from_bytes(&public).map_err(|_| NotASecret)?;
            return Ok(Verifier(Verifying::Ed25519(Box::new(key))));
        }
        SigningSecret::parse(text).map(|secret| Verifier::from(&secret))
    }

    /// Is this delivery signed by who knows the secret, and fresh at `now` (Unix seconds)?
    pub fn verify(&self, headers: &HeaderMap, body: &[u8], now: i64) -> Result<(), NotVerified> {
        let text = |name: HeaderName| {
            headers.get(&name).and_then(|value| value.to_str().ok()).ok_or(NotVerified::Missing(name))
        };
        let (id, timestamp) = (text(WEBHOOK_ID)?, text(WEBHOOK_TIMESTAMP)?);
        let signatures = text(WEBHOOK_SIGNATURE)?;
        let away = timestamp.parse::<i64>().map_err(|_| NotVerified::NotATime)?.abs_diff(now);
        if away > TOLERANCE_SECONDS {
            return Err(NotVerified::NotNow(away));
        }
        let fits = |entry: &str| self.fits(entry, id, timestamp, body);
        signatures.split(' ').any(fits).then_some(()).ok_or(NotVerified::NoneFits)
    }

    fn fits(&self, entry: &str, id: &str, timestamp: &str, body: &[u8]) -> bool {
        let Some((version, signature)) = entry.split_once(',') else { return false };
        let Ok(signature) = BASE64_STANDARD.decode(signature) else { return false };
        match (&self.0, version) {
            // Compares in constant time.
            (Verifying::Symmetric(begun), "v1") => {
                over((**begun).clone(), id, timestamp, body).verify_slice(&signature).is_ok()
            }
            // Strict: a signature has one form, and weak keys have none.
            (Verifying::Ed25519(key), "v1a") => ed25519_dalek::Signature::from_slice(&signature)
                .is_ok_and(|signature| key.verify_strict(&content(id, timestamp, body), &signature).is_ok()),
            (Verifying::Symmetric(_) | Verifying::Ed25519(_), _) => false,
        }
    }
}

impl From<&SigningSecret> for Verifier {
    fn from(secret: &SigningSecret) -> Verifier {
        Verifier(match &secret.0 {
            Inner::Symmetric { begun, .. } => Verifying::Symmetric(begun.clone()),
            Inner::Ed25519(key) => Verifying::Ed25519(Box::new(key.verifying_key())),
        })
    }
}

fn decode(text: &str, prefix: &str) -> Option<Vec<u8>> {
    BASE64_STANDARD.decode(text.strip_prefix(prefix)?).ok()
}

fn symmetric_key(bytes: Vec<u8>) -> Result<Vec<u8>, NotASecret> {
    SYMMETRIC_BYTES.contains(&bytes.len()).then_some(bytes).ok_or(NotASecret)
}

#[allow(clippy::expect_used, reason = "HMAC takes a key of any length; its type says otherwise for other algorithms")]
fn begun(key: &[u8]) -> HmacSha256 {
    HmacSha256::new_from_slice(key).expect("a key of any length")
}

fn over(begun: HmacSha256, id: &str, timestamp: &str, body: &[u8]) -> HmacSha256 {
    [id.as_bytes(), b".", timestamp.as_bytes(), b".", body].into_iter().fold(begun, |mac, part| mac.chain_update(part))
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
    fn the_specifications_vector_comes_out() {
        let secret = SigningSecret::parse(SECRET).unwrap();
        let signature = sign(&[secret], ID, NOW, BODY);
        assert_eq!(signature, "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=");
    }

    #[test]
    fn a_rotation_signs_with_both_and_each_is_verified() {
        let secrets =
            [generated(SecretKind::Symmetric), generated(SecretKind::Ed25519), generated(SecretKind::Symmetric)];
        let signature = sign(&secrets, ID, NOW, BODY);
        let versions: Vec<_> = signature.to_str().unwrap().split(' ').map(|entry| entry.split(',').next()).collect();
        assert_eq!(versions, [Some("v1"), Some("v1a"), Some("v1")]);
        let headers = headers(NOW, &signature);
        for secret in &secrets {
            Verifier::from(secret).verify(&headers, BODY, NOW).unwrap();
        }
        let whpk = secrets[1].public().unwrap();
        Verifier::parse(&whpk).unwrap().verify(&headers, BODY, NOW).unwrap();
        for stranger in [SecretKind::Symmetric, SecretKind::Ed25519] {
            let verified = Verifier::from(&generated(stranger)).verify(&headers, BODY, NOW);
            assert_eq!(verified, Err(NotVerified::NoneFits));
        }
    }

    #[test]
    fn what_was_changed_on_the_way_is_refused() {
        for kind in [SecretKind::Symmetric, SecretKind::Ed25519] {
            let secret = generated(kind);
            let verifier = Verifier::from(&secret);
            let signature = sign(std::slice::from_ref(&secret), ID, NOW, BODY);
            let good = headers(NOW, &signature);
            verifier.verify(&good, BODY, NOW).unwrap();
            assert_eq!(verifier.verify(&good, b"{}", NOW), Err(NotVerified::NoneFits));
            let mut other_id = good.clone();
            other_id.insert(WEBHOOK_ID, HeaderValue::from_static("msg_other"));
            assert_eq!(verifier.verify(&other_id, BODY, NOW), Err(NotVerified::NoneFits));
            assert_eq!(verifier.verify(&headers(NOW + 1, &signature), BODY, NOW), Err(NotVerified::NoneFits));
            // The right signature under the other version's name.
            let renamed =
                signature.to_str().unwrap().replace("v1a,", "v2,").replace("v1,", "v1a,").replace("v2,", "v1,");
            let renamed = HeaderValue::try_from(renamed).unwrap();
            assert_eq!(verifier.verify(&headers(NOW, &renamed), BODY, NOW), Err(NotVerified::NoneFits));
            for broken in ["", "v1", "v1,", "v1,=", "v1a,AAAA", ",", "v1,AAAA v1a,AAAA"] {
                let broken = HeaderValue::from_static(broken);
                assert_eq!(verifier.verify(&headers(NOW, &broken), BODY, NOW), Err(NotVerified::NoneFits));
            }
        }
    }

    #[test]
    fn five_minutes_are_tolerated_either_way_and_no_more() {
        let secret = generated(SecretKind::Symmetric);
        let verifier = Verifier::from(&secret);
        let signed = headers(NOW, &sign(&[secret], ID, NOW, BODY));
        for now in [NOW - 300, NOW + 300] {
            verifier.verify(&signed, BODY, now).unwrap();
        }
        for now in [NOW - 301, NOW + 301] {
            assert_eq!(verifier.verify(&signed, BODY, now), Err(NotVerified::NotNow(301)));
        }
        let mut broken = signed.clone();
        broken.insert(WEBHOOK_TIMESTAMP, HeaderValue::from_static("today"));
        assert_eq!(verifier.verify(&broken, BODY, NOW), Err(NotVerified::NotATime));
        broken.remove(WEBHOOK_SIGNATURE);
        assert_eq!(verifier.verify(&broken, BODY, NOW), Err(NotVerified::Missing(WEBHOOK_SIGNATURE)));
    }

    #[test]
    fn a_secret_survives_its_text_and_does_not_print() {
        for kind in [SecretKind::Symmetric, SecretKind::Ed25519] {
            let secret = generated(kind);
            let again = SigningSecret::parse(&secret.to_text()).unwrap();
            assert_eq!((again.kind(), again.to_text(), again.public()), (kind, secret.to_text(), secret.public()));
            assert_eq!(sign(std::slice::from_ref(&secret), ID, NOW, BODY), sign(&[again], ID, NOW, BODY));
            assert_eq!(format!("{secret:?}"), "SigningSecret(***)");
        }
        assert_eq!(BASE64_STANDARD.decode(&generated(SecretKind::Symmetric).to_text()[6..]).unwrap().len(), 32);
    }

    #[test]
    fn what_is_not_a_secret_is_refused() {
        let of = |prefix: &str, length: usize| format!("{prefix}{}", BASE64_STANDARD.encode(vec![7; length]));
        for good in [of("whsec_", 24), of("whsec_", 64)] {
            SigningSecret::parse(&good).unwrap();
        }
        // The last: a public half that is not the seed's.
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
    fn the_reference_library_verifies_ours_and_we_verify_its() {
        let secret = generated(SecretKind::Symmetric);
        let reference = standardwebhooks::Webhook::new(&secret.to_text()).unwrap();
        let now = chrono::Utc::now().timestamp();
        let ours = headers(now, &sign(&[generated(SecretKind::Symmetric), secret.clone()], ID, now, BODY));
        reference.verify(BODY, &ours).unwrap();
        let theirs = HeaderValue::try_from(reference.sign(ID, now, BODY).unwrap()).unwrap();
        Verifier::from(&secret).verify(&headers(now, &theirs), BODY, now).unwrap();
    }
}
