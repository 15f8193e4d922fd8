//! External issuers: their settings, and the public keys that verify their tokens.

use std::ops::RangeInclusive;
use std::sync::Arc;

use jsonwebtoken::jwk::{Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde::{Deserialize, Serialize};

use super::algorithms::{self, UnusableKey};
use super::{ISSUER, Key, TrustedKey};

/// The longest name of another issuer, in characters.
const ISSUER_CHARS_MAX: usize = 255;
/// The accepted values of [`Issuer::token_hours_max`], and its default.
const TOKEN_HOURS: RangeInclusive<u32> = 1..=8_784;
pub(super) const TOKEN_HOURS_DEFAULT: u32 = 24;

/// Settings of an external issuer whose users may call this installation. They are other users than those of the
/// installation itself and of other issuers, also if they have the same `sub`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Issuer {
    /// The `iss` claim of its tokens.
    pub issuer: String,
    /// The `aud` claim that its tokens for this installation contain.
    pub audience: String,
    /// The path of a JWKS file with its public keys.
    pub jwks_file: String,
    /// Whether the `role` claim of its tokens is accepted. If so, `role: admin` makes an operator.
    #[serde(default)]
    pub trust_roles: bool,
    /// The longest accepted lifetime of its tokens in hours, from `iat` to `exp`.
    #[serde(default = "token_hours_default")]
    pub token_hours_max: u32,
}

fn token_hours_default() -> u32 {
    TOKEN_HOURS_DEFAULT
}

impl Issuer {
    /// Fails with the invalid field and the values it accepts.
    fn check(&self) -> Result<(), IssuerError> {
        if !(1..=ISSUER_CHARS_MAX).contains(&self.issuer.chars().count()) {
            return Err(IssuerError::NameLength);
        }
        if self.issuer == ISSUER {
            return Err(IssuerError::OwnName);
        }
        if !TOKEN_HOURS.contains(&self.token_hours_max) {
            return Err(IssuerError::TokenHours);
        }
        Ok(())
    }
}

/// An issuer with an invalid field, or whose keys cannot be loaded, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("issuer {issuer}: {reason}")]
pub struct InvalidIssuer {
    issuer: String,
    reason: IssuerError,
}

#[derive(Debug, thiserror::Error)]
enum IssuerError {
    #[error("issuer must have 1 to {ISSUER_CHARS_MAX} characters")]
    NameLength,
    #[error("issuer must not be `{ISSUER}`, which is the name of this installation's own issuer")]
    OwnName,
    #[error("token_hours_max must be a number from {} to {}", TOKEN_HOURS.start(), TOKEN_HOURS.end())]
    TokenHours,
    #[error("jwks_file {path}: {error}")]
    Unreadable { path: String, error: std::io::Error },
    #[error("jwks_file is not a JWK set: {0}")]
    Malformed(serde_json::Error),
    #[error("a key has no `alg`: add it to the JWKS file")]
    NoAlgorithm,
    #[error("symmetric keys are not accepted")]
    SymmetricKey,
    #[error(transparent)]
    InvalidKey(#[from] jsonwebtoken::errors::Error),
    #[error(transparent)]
    UnusableKey(#[from] UnusableKey),
}

/// Loads the keys of an issuer. Fails if a setting or a key is invalid, or the file cannot be read.
pub(super) fn issuer_keys(issuer: &Issuer) -> Result<Vec<TrustedKey>, InvalidIssuer> {
    let name = || issuer.issuer.chars().take(ISSUER_CHARS_MAX).collect();
    load_keys(issuer).map_err(|reason| InvalidIssuer { issuer: name(), reason })
}

fn load_keys(issuer: &Issuer) -> Result<Vec<TrustedKey>, IssuerError> {
    issuer.check()?;
    let path = &issuer.jwks_file;
    let text = std::fs::read_to_string(path).map_err(|error| IssuerError::Unreadable { path: path.clone(), error })?;
    let set: JwkSet = serde_json::from_str(&text).map_err(IssuerError::Malformed)?;
    set.keys.iter().map(|jwk| issuer_key(issuer, jwk)).collect()
}

fn issuer_key(issuer: &Issuer, jwk: &Jwk) -> Result<TrustedKey, IssuerError> {
    let algorithm =
        jwk.common.key_algorithm.and_then(|name| name.to_string().parse().ok()).ok_or(IssuerError::NoAlgorithm)?;
    // A JWKS file is public, so a symmetric key in it is a mistake or an attack.
    if matches!(algorithm, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512) {
        return Err(IssuerError::SymmetricKey);
    }
    let key = DecodingKey::from_jwk(jwk)?;
    algorithms::check(algorithm, &key)?;
    Ok(TrustedKey {
        kid: jwk.common.key_id.clone(),
        algorithm,
        key: Key::External(key, signature_only(algorithm)),
        issuers: Arc::new([issuer.issuer.clone()]),
        audience: issuer.audience.clone(),
        trust_roles: issuer.trust_roles,
        token_hours_max: issuer.token_hours_max,
    })
}

/// Makes the library check only the signature; [`super::TokenVerifier::verify`] checks the claims against its own clock.
fn signature_only(algorithm: Algorithm) -> Validation {
    let mut validation = Validation::new(algorithm);
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation.required_spec_claims.clear();
    validation
}
