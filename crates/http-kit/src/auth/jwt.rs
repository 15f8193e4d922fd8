//! The JWTs of users. The [`signer`] signs the tokens of this installation (EdDSA, with [`signing_keys`] derived from the master
//! key); the [`TokenVerifier`] verifies them and those of configured issuers ([`issuer`]).
//!
//! The `sub` of a local token is the id of its user. The user of another issuer's token is known by an id that is derived
//! from `iss` and `sub`, so an issuer speaks for its own users only.

mod algorithms;
mod issuer;
mod signer;
mod signing_keys;
mod token_cache;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use chrono::{DateTime, Utc};
use ed25519_dalek::{Signature, Verifier, VerifyingKey};
use jsonwebtoken::{Algorithm, DecodingKey, Header, Validation};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

pub use self::issuer::{InvalidIssuer, Issuer};
use self::issuer::{TOKEN_HOURS_DEFAULT, issuer_keys};
pub use self::signer::TokenSigner;
use self::signing_keys::{key_id, period_of, signing_key, trusted_periods};
use self::token_cache::TokenCache;
use pillarbox::log::Tenant;

use crate::caller::{Caller, Principal};
use crate::problem::Problem;
use runtime::clock::Clock;
use runtime::secret::MasterKey;

/// The `typ` of an access token (RFC 9068). It prevents other tokens of the same issuer from being accepted as access
/// tokens.
const TYPE: &str = "at+jwt";
const ISSUER: &str = "pillarbox";
/// Allowance for clock skew between issuer and verifier, in seconds. The tokens of sessions expire without it, because the
/// process that signs them and those that verify them follow the database's clock.
const LEEWAY_SECONDS: i64 = 30;

/// The longest lifetime of a token of a session. It bounds the time in which another process accepts the token of a
/// session that has ended.
pub const SESSION_TOKEN_TTL_MAX: Duration = Duration::from_secs(300);
/// The longest `sub` of another issuer's token, in characters, as OpenID Connect limits it.
const SUBJECT_CHARS_MAX: usize = 255;

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
    /// The session of a local token, if a user signed in for it. Any JSON value, as `role`.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    sid: serde_json::Value,
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

/// A public key, and the claims that tokens signed with it must have.
struct TrustedKey {
    kid: Option<String>,
    algorithm: Algorithm,
    key: Key,
    /// The accepted values of `iss`. The first one names the issuer.
    issuers: Arc<[String]>,
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
    /// The current key first.
    masters: Vec<MasterKey>,
    local_issuers: Arc<[String]>,
    local_keys: RwLock<LocalKeys>,
    external_keys: Vec<TrustedKey>,
    /// The time by which the tokens of sessions expire.
    clock: Clock,
    /// The time by which tokens expire that were signed elsewhere: by other issuers, and by `pillarbox token`.
    issuer_clock: Clock,
    cache: TokenCache,
}

/// The keys of this installation that are trusted in a period.
#[derive(Clone)]
struct LocalKeys {
    period: i64,
    keys: Arc<[TrustedKey]>,
}

impl TokenVerifier {
    /// Trusts the tokens signed with `masters` (the current key first, then the previous ones) and those of
    /// `issuers`. Fails if the keys of an issuer cannot be loaded.
    pub fn new(masters: &[MasterKey], issuers: &[Issuer], clock: Clock) -> Result<TokenVerifier, InvalidIssuer> {
        algorithms::install();
        let mut external_keys = Vec::new();
        for issuer in issuers {
            external_keys.extend(issuer_keys(issuer)?);
        }
        Ok(TokenVerifier {
            masters: masters.to_vec(),
            local_issuers: Arc::new([ISSUER.to_owned()]),
            // No time is in this period, so the keys are derived for the first token.
            local_keys: RwLock::new(LocalKeys { period: i64::MIN, keys: Arc::new([]) }),
            external_keys,
            issuer_clock: clock.clone(),
            clock,
            cache: TokenCache::new(),
        })
    }

    /// Sets the clock by which tokens without a session expire: they were signed on other machines.
    pub fn with_issuer_clock(mut self, clock: Clock) -> TokenVerifier {
        self.issuer_clock = clock;
        self
    }

    /// Accepts tokens of this installation also with this `iss`.
    pub fn with_local_issuer(mut self, address: &str) -> TokenVerifier {
        self.local_issuers = Arc::new([ISSUER.to_owned(), address.to_owned()]);
        self
    }

    /// Returns the user of a valid token. Fails with 401.
    pub fn verify(&self, token: &str) -> Result<Caller, Problem> {
        if let Some(caller) = self.cache.find(token, |session| self.time_for(session)) {
            return Ok(caller);
        }
        let (caller, invalid_from) = self.verify_signature(token)?;
        if self.cache.has_ended(&caller) {
            return Err(Problem::unauthorized("the session of this token has ended: sign in again"));
        }
        self.cache.insert(token, caller.clone(), invalid_from);
        Ok(caller)
    }

    /// Refuses the tokens of this session from now on, in this process.
    pub fn end_session(&self, session: Uuid) {
        self.cache.end_session(session);
    }

    /// Returns the public keys of this installation as a JWK set (RFC 7517): those that tokens may be signed with now, and
    /// the next one.
    pub fn public_keys(&self) -> serde_json::Value {
        let keys = self.local_keys(self.clock.now());
        let jwk = |trusted: &TrustedKey| match &trusted.key {
            Key::Local(key) => Some(serde_json::json!({
                "kty": "OKP",
                "crv": "Ed25519",
                "alg": "EdDSA",
                "use": "sig",
                "kid": trusted.kid,
                "x": BASE64_URL_SAFE_NO_PAD.encode(key.as_bytes()),
            })),
            Key::External(..) => None,
        };
        serde_json::json!({ "keys": keys.iter().filter_map(jwk).collect::<Vec<_>>() })
    }

    /// Returns the user of a valid token and the second from which it is no longer valid. Fails with 401.
    fn verify_signature(&self, token: &str) -> Result<(Caller, i64), Problem> {
        let invalid = || Problem::unauthorized("this token is not valid");
        let header = jsonwebtoken::decode_header(token).map_err(|_| invalid())?;
        let local_keys = self.local_keys(self.clock.now());
        let keys = local_keys.iter().chain(&self.external_keys);
        for trusted in keys.filter(|trusted| trusted.may_have_signed(&header)) {
            let Some(claims) = trusted.key.signed_claims(token) else { continue };
            if !trusted.issuers.contains(&claims.iss) || !claims.aud.includes(&trusted.audience) {
                continue;
            }
            let session = claims.sid.as_str().filter(|_| trusted.is_local()).and_then(|session| session.parse().ok());
            let leeway = if session.is_some() { 0 } else { LEEWAY_SECONDS };
            let invalid_from = trusted.check_times(&claims, self.time_for(session), leeway)?;
            let user = trusted.user_id(&claims.sub)?;
            let role = claims.role.as_str().filter(|_| trusted.trust_roles).and_then(|role| role.parse().ok());
            let caller = Caller { session, ..Caller::new(Principal::User(user), Tenant::main(), role) };
            return Ok((caller, invalid_from));
        }
        Err(invalid())
    }

    /// Returns the time by which a token of this session, or without a session, expires, in seconds since 1970.
    fn time_for(&self, session: Option<Uuid>) -> i64 {
        let clock = if session.is_some() { &self.clock } else { &self.issuer_clock };
        clock.now().timestamp()
    }

    /// Returns the keys of this installation that are trusted at this time.
    fn local_keys(&self, now: DateTime<Utc>) -> Arc<[TrustedKey]> {
        let period = period_of(now);
        let known = self.local_keys.read().unwrap_or_else(PoisonError::into_inner).clone();
        if known.period == period {
            return known.keys;
        }
        let of_master =
            |master: &MasterKey| trusted_periods(period).map(|period| signing_key(master, period)).collect();
        let keys: Vec<_> = self.masters.iter().flat_map(|master| -> Vec<_> { of_master(master) }).collect();
        let keys = keys.iter().map(|key| local_key(key.verifying_key(), &self.local_issuers)).collect();
        let derived = LocalKeys { period, keys };
        *self.local_keys.write().unwrap_or_else(PoisonError::into_inner) = derived.clone();
        derived.keys
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

    /// Returns the second from which the token is no longer valid. Fails with 401 unless it is valid now. A token of another issuer must also have `iat`, and must not be
    /// valid for longer than the installation accepts: a token cannot be revoked here.
    fn check_times(&self, claims: &Claims, now: i64, leeway: i64) -> Result<i64, Problem> {
        let (issued_at, expires_at) = match (claims.iat, claims.exp) {
            (Some(issued_at), Some(expires_at)) => (issued_at, expires_at),
            (None, Some(expires_at)) if self.is_local() => (0, expires_at),
            _ => return Err(Problem::unauthorized("this token has no `iat` or no `exp` claim: it must have both")),
        };
        let invalid_from = expires_at.saturating_add(leeway);
        if now >= invalid_from {
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
        Ok(invalid_from)
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
        Ok(foreign_user_id(&self.issuers[0], subject))
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

fn local_key(key: VerifyingKey, issuers: &Arc<[String]>) -> TrustedKey {
    TrustedKey {
        kid: Some(key_id(&key)),
        algorithm: Algorithm::EdDSA,
        key: Key::Local(key),
        issuers: issuers.clone(),
        audience: ISSUER.to_owned(),
        trust_roles: true,
        token_hours_max: TOKEN_HOURS_DEFAULT,
    }
}

#[cfg(test)]
mod tests;
