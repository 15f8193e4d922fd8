//! The JWTs of users: signs the tokens of this installation (EdDSA, with a key derived from the master key), and
//! verifies them and those of configured issuers.
//!
//! The `sub` of a local token is the id of its user. The user of another issuer's token is known by an id that is derived
//! from `iss` and `sub`, so an issuer speaks for its own users only.

mod algorithms;

use std::ops::RangeInclusive;
use std::time::Duration;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use chrono::{DateTime, Utc};
use ed25519_dalek::pkcs8::EncodePrivateKey;
use ed25519_dalek::{Signature, SigningKey, Verifier, VerifyingKey};
use jsonwebtoken::jwk::{Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::caller::{Caller, Principal, Role, Tenant};
use crate::clock::Clock;
use crate::problem::Problem;
use crate::secret::MasterKey;

/// The `typ` of an access token (RFC 9068). It prevents other tokens of the same issuer from being accepted as access
/// tokens.
const TYPE: &str = "at+jwt";
const ISSUER: &str = "pillarbox";
/// Allowance for clock skew between issuer and verifier, in seconds.
const LEEWAY_SECONDS: i64 = 30;

/// The longest lifetime of a token of this installation.
const TOKEN_TTL_MAX: Duration = Duration::from_secs(24 * 3600);
/// The longest name of another issuer, in characters.
const ISSUER_CHARS_MAX: usize = 255;
/// The longest `sub` of another issuer's token, in characters, as OpenID Connect limits it.
const SUBJECT_CHARS_MAX: usize = 255;
/// The accepted values of [`Issuer::token_hours_max`], and its default.
const TOKEN_HOURS: RangeInclusive<u32> = 1..=8_784;
const TOKEN_HOURS_DEFAULT: u32 = 24;

#[derive(Debug, Serialize, Deserialize)]
struct Claims {
    iss: String,
    aud: Audience,
    sub: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    iat: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exp: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nbf: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    jti: Option<Uuid>,
    /// Any JSON value: the `role` of another issuer may have another type, which must not make its token unreadable.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    role: serde_json::Value,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

impl Audience {
    fn includes(&self, wanted: &str) -> bool {
        match self {
            Audience::One(one) => one == wanted,
            Audience::Many(many) => many.iter().any(|one| one == wanted),
        }
    }
}

/// Signs tokens for users of this installation.
pub struct TokenSigner {
    key: EncodingKey,
    kid: String,
}

impl TokenSigner {
    pub fn new(master: &MasterKey) -> TokenSigner {
        algorithms::install();
        let signing = signing_key(master);
        // Encoding 32 bytes as PKCS#8 cannot fail. A token signed with an empty key would never verify.
        let der = signing.to_pkcs8_der().map(|der| der.as_bytes().to_vec()).unwrap_or_default();
        TokenSigner { key: EncodingKey::from_ed_der(&der), kid: key_id(&signing) }
    }

    /// Returns a token for `user`, valid from `now` for `ttl`, at most 24 hours.
    pub fn sign(
        &self,
        user: Uuid,
        role: Option<Role>,
        now: DateTime<Utc>,
        ttl: Duration,
    ) -> Result<String, jsonwebtoken::errors::Error> {
        let ttl = ttl.min(TOKEN_TTL_MAX);
        let claims = Claims {
            iss: ISSUER.to_owned(),
            aud: Audience::One(ISSUER.to_owned()),
            sub: user.to_string(),
            iat: Some(now.timestamp()),
            exp: Some(now.timestamp() + ttl.as_secs() as i64),
            nbf: None,
            jti: Some(Uuid::now_v7()),
            role: role.map(Role::as_str).into(),
        };
        let header =
            Header { typ: Some(TYPE.to_owned()), kid: Some(self.kid.clone()), ..Header::new(Algorithm::EdDSA) };
        jsonwebtoken::encode(&header, &claims, &self.key)
    }
}

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
    fn check(&self) -> Result<(), String> {
        if !(1..=ISSUER_CHARS_MAX).contains(&self.issuer.chars().count()) {
            return Err(format!("issuer must have 1 to {ISSUER_CHARS_MAX} characters"));
        }
        if self.issuer == ISSUER {
            return Err(format!("issuer must not be `{ISSUER}`, which is the name of this installation's own issuer"));
        }
        if !TOKEN_HOURS.contains(&self.token_hours_max) {
            let (min, max) = (TOKEN_HOURS.start(), TOKEN_HOURS.end());
            return Err(format!("token_hours_max must be a number from {min} to {max}"));
        }
        Ok(())
    }
}

/// An issuer with an invalid field, or whose keys cannot be loaded, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("issuer {issuer}: {reason}")]
pub struct InvalidIssuer {
    issuer: String,
    reason: String,
}

/// A public key, and the claims that tokens signed with it must have.
struct TrustedKey {
    kid: Option<String>,
    algorithm: Algorithm,
    key: Key,
    issuer: String,
    audience: String,
    trust_roles: bool,
    /// The longest accepted time from `iat` to `exp`.
    token_hours_max: u32,
}

enum Key {
    /// A decoded key. The library would decode it again for each token, and verifying the token is most of the time
    /// of a small request.
    Local(VerifyingKey),
    External(DecodingKey, Validation),
}

/// Verifies the tokens of users.
pub struct TokenVerifier {
    keys: Vec<TrustedKey>,
    clock: Clock,
}

impl TokenVerifier {
    /// Trusts the tokens signed with `masters` (the current key first, then the previous ones) and those of
    /// `issuers`. Fails if the keys of an issuer cannot be loaded.
    pub fn new(masters: &[MasterKey], issuers: &[Issuer], clock: Clock) -> Result<TokenVerifier, InvalidIssuer> {
        algorithms::install();
        let mut keys: Vec<TrustedKey> = masters.iter().map(|master| local_key(&signing_key(master))).collect();
        for issuer in issuers {
            keys.extend(issuer_keys(issuer)?);
        }
        Ok(TokenVerifier { keys, clock })
    }

    /// Returns the user of a valid token. Fails with 401.
    pub fn verify(&self, token: &str) -> Result<Caller, Problem> {
        let invalid = || Problem::unauthorized("this token is not valid");
        let header = jsonwebtoken::decode_header(token).map_err(|_| invalid())?;
        for trusted in self.keys.iter().filter(|trusted| trusted.may_have_signed(&header)) {
            let Some(claims) = trusted.key.signed_claims(token) else { continue };
            if claims.iss != trusted.issuer || !claims.aud.includes(&trusted.audience) {
                continue;
            }
            trusted.check_times(&claims, self.clock.now().timestamp())?;
            let user = trusted.user_id(&claims.sub)?;
            let role = claims.role.as_str().filter(|_| trusted.trust_roles).and_then(|role| role.parse().ok());
            return Ok(Caller { principal: Principal::User(user), tenant: Tenant::main(), role });
        }
        Err(invalid())
    }
}

impl TrustedKey {
    fn may_have_signed(&self, header: &Header) -> bool {
        let has_kid = match (&self.kid, &header.kid) {
            (Some(key), Some(token)) => key == token,
            (None, _) => true,
            (Some(_), None) => !self.is_local(),
        };
        // Local tokens always have the specific type; many external issuers still write plain `JWT`.
        let kind = header.typ.as_deref().unwrap_or("JWT");
        let has_type = kind.eq_ignore_ascii_case(TYPE) || (!self.is_local() && kind.eq_ignore_ascii_case("JWT"));
        has_kid && has_type && header.alg == self.algorithm
    }

    fn is_local(&self) -> bool {
        matches!(self.key, Key::Local(_))
    }

    /// Fails with 401 unless the token is valid now. A token of another issuer must also have `iat`, and must not be
    /// valid for longer than the installation accepts: a token cannot be revoked here.
    fn check_times(&self, claims: &Claims, now: i64) -> Result<(), Problem> {
        let (issued_at, expires_at) = match (claims.iat, claims.exp) {
            (Some(issued_at), Some(expires_at)) => (issued_at, expires_at),
            (None, Some(expires_at)) if self.is_local() => (0, expires_at),
            _ => return Err(Problem::unauthorized("this token has no `iat` or no `exp` claim: it must have both")),
        };
        if now >= expires_at.saturating_add(LEEWAY_SECONDS) {
            return Err(Problem::unauthorized("this token has expired"));
        }
        let valid_from = claims.nbf.map_or(issued_at, |not_before| not_before.max(issued_at));
        if now.saturating_add(LEEWAY_SECONDS) < valid_from {
            return Err(Problem::unauthorized("this token is not valid yet"));
        }
        let hours_max = self.token_hours_max;
        if !self.is_local() && expires_at.saturating_sub(issued_at) > i64::from(hours_max) * 3600 {
            let detail = "request a token with a shorter lifetime (`exp` minus `iat`)";
            return Err(Problem::unauthorized(format!(
                "this token is valid for more than {hours_max} h, which is the limit for its issuer: {detail}"
            )));
        }
        Ok(())
    }

    /// Returns the id of the user that the token names. Fails with 401 if `sub` is invalid.
    fn user_id(&self, subject: &str) -> Result<Uuid, Problem> {
        if self.is_local() {
            return subject.parse().map_err(|_| Problem::unauthorized("the `sub` claim of this token is not a UUID"));
        }
        if !(1..=SUBJECT_CHARS_MAX).contains(&subject.chars().count()) {
            let detail = format!("the `sub` claim of this token must have 1 to {SUBJECT_CHARS_MAX} characters");
            return Err(Problem::unauthorized(detail));
        }
        Ok(foreign_user_id(&self.issuer, subject))
    }
}

/// Returns the id of a user of another issuer: a UUID of version 8 made of the SHA-256 of issuer and subject, each
/// preceded by its length in 8 bytes. Each issuer thus has its own users: whatever `sub` it signs, it cannot name a user
/// of this installation or of a third issuer.
fn foreign_user_id(issuer: &str, subject: &str) -> Uuid {
    let mut hash = Sha256::new();
    for part in [issuer, subject] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.finalize()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

impl Key {
    /// Returns the claims of the token; None if it was not signed with this key.
    fn signed_claims(&self, token: &str) -> Option<Claims> {
        match self {
            Key::External(key, validation) => Some(jsonwebtoken::decode(token, key, validation).ok()?.claims),
            Key::Local(key) => {
                let (signed, signature) = token.rsplit_once('.')?;
                let signature = BASE64_URL_SAFE_NO_PAD.decode(signature).ok()?;
                key.verify(signed.as_bytes(), &Signature::from_slice(&signature).ok()?).ok()?;
                let (_, claims) = signed.split_once('.')?;
                serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
            }
        }
    }
}

/// Makes the library check only the signature; [`TokenVerifier::verify`] checks the claims against its own clock.
fn signature_only(algorithm: Algorithm) -> Validation {
    let mut validation = Validation::new(algorithm);
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation.required_spec_claims.clear();
    validation
}

fn signing_key(master: &MasterKey) -> SigningKey {
    SigningKey::from_bytes(&master.derive("jwt signing"))
}

fn key_id(key: &SigningKey) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(&key.verifying_key().as_bytes()[..9])
}

fn local_key(signing: &SigningKey) -> TrustedKey {
    TrustedKey {
        kid: Some(key_id(signing)),
        algorithm: Algorithm::EdDSA,
        key: Key::Local(signing.verifying_key()),
        issuer: ISSUER.to_owned(),
        audience: ISSUER.to_owned(),
        trust_roles: true,
        token_hours_max: TOKEN_HOURS_DEFAULT,
    }
}

fn issuer_keys(issuer: &Issuer) -> Result<Vec<TrustedKey>, InvalidIssuer> {
    let name = issuer.issuer.chars().take(ISSUER_CHARS_MAX).collect::<String>();
    let invalid = |reason: String| InvalidIssuer { issuer: name.clone(), reason };
    issuer.check().map_err(&invalid)?;
    let text = std::fs::read_to_string(&issuer.jwks_file)
        .map_err(|error| invalid(format!("jwks_file {}: {error}", issuer.jwks_file)))?;
    let set: JwkSet =
        serde_json::from_str(&text).map_err(|error| invalid(format!("jwks_file is not a JWK set: {error}")))?;
    set.keys.iter().map(|jwk| issuer_key(issuer, jwk).map_err(&invalid)).collect()
}

fn issuer_key(issuer: &Issuer, jwk: &Jwk) -> Result<TrustedKey, String> {
    let algorithm = jwk
        .common
        .key_algorithm
        .and_then(|name| name.to_string().parse().ok())
        .ok_or("a key has no `alg`: add it to the JWKS file")?;
    // A JWKS file is public, so a symmetric key in it is a mistake or an attack.
    if matches!(algorithm, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512) {
        return Err("symmetric keys are not accepted".to_owned());
    }
    let key = DecodingKey::from_jwk(jwk).map_err(|error| error.to_string())?;
    algorithms::check(algorithm, &key)?;
    Ok(TrustedKey {
        kid: jwk.common.key_id.clone(),
        algorithm,
        key: Key::External(key, signature_only(algorithm)),
        issuer: issuer.issuer.clone(),
        audience: issuer.audience.clone(),
        trust_roles: issuer.trust_roles,
        token_hours_max: issuer.token_hours_max,
    })
}

#[cfg(test)]
mod tests;
