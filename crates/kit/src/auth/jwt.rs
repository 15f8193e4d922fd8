//! User tokens: our own (EdDSA, derived from the master key) and those of issuers that the configuration names.

use std::time::Duration;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use chrono::{DateTime, Utc};
use ed25519_dalek::pkcs8::EncodePrivateKey;
use ed25519_dalek::{Signature, SigningKey, Verifier, VerifyingKey};
use jsonwebtoken::jwk::{Jwk, JwkSet};
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Caller, Principal, Role, Tenant};
use crate::clock::Clock;
use crate::problem::Problem;
use crate::secret::MasterKey;

/// `typ` of an access token (RFC 9068): keeps other tokens of the same issuer from passing as one.
const TYPE: &str = "at+jwt";
const ISSUER: &str = "pillarbox";
/// How far a clock may be off.
const LEEWAY_SECONDS: i64 = 30;

/// No token of ours lives longer.
pub const TOKEN_TTL_MAX: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, Serialize, Deserialize)]
struct Claims {
    iss: String,
    aud: Audience,
    sub: String,
    #[serde(default)]
    iat: i64,
    exp: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nbf: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    jti: Option<Uuid>,
    /// Any value: another issuer's `role` may mean something else, and must not make its token unreadable.
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
        let signing = signing_key(master);
        // Encoding 32 bytes as PKCS#8 does not fail; an empty key would sign nothing that verifies.
        let der = signing.to_pkcs8_der().map(|der| der.as_bytes().to_vec()).unwrap_or_default();
        TokenSigner { key: EncodingKey::from_ed_der(&der), kid: key_id(&signing) }
    }

    /// A token for `user`, good from `now` for `ttl`.
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
            iat: now.timestamp(),
            exp: now.timestamp() + ttl.as_secs() as i64,
            nbf: None,
            jti: Some(Uuid::now_v7()),
            role: role.map(Role::as_str).into(),
        };
        let header =
            Header { typ: Some(TYPE.to_owned()), kid: Some(self.kid.clone()), ..Header::new(Algorithm::EdDSA) };
        jsonwebtoken::encode(&header, &claims, &self.key)
    }
}

/// An issuer whose users may call, besides our own.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Issuer {
    /// `iss` of its tokens.
    pub issuer: String,
    /// `aud` that its tokens for us carry.
    pub audience: String,
    /// A file with its public keys (JWKS).
    pub jwks_file: String,
    /// Whether its `role: admin` makes an operator here.
    #[serde(default)]
    pub trust_roles: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("issuer {issuer}: {reason}")]
pub struct BadIssuer {
    issuer: String,
    reason: String,
}

struct TrustedKey {
    kid: Option<String>,
    algorithm: Algorithm,
    key: Key,
    issuer: String,
    audience: String,
    trust_roles: bool,
}

enum Key {
    /// Ready to verify: the library would unpack it for each token, and most of a small request's time goes into its token.
    Ours(VerifyingKey),
    Theirs(DecodingKey, Validation),
}

pub struct TokenVerifier {
    keys: Vec<TrustedKey>,
    clock: Clock,
}

impl TokenVerifier {
    /// Trusts what `masters` sign (the current key first, then those it replaced) and the issuers given.
    pub fn new(masters: &[MasterKey], issuers: &[Issuer], clock: Clock) -> Result<TokenVerifier, BadIssuer> {
        let mut keys: Vec<TrustedKey> = masters.iter().map(|master| own_key(&signing_key(master))).collect();
        for issuer in issuers {
            keys.extend(issuer_keys(issuer)?);
        }
        Ok(TokenVerifier { keys, clock })
    }

    pub fn verify(&self, token: &str) -> Result<Caller, Problem> {
        let refused = || Problem::unauthorized("this token is not valid");
        let header = jsonwebtoken::decode_header(token).map_err(|_| refused())?;
        for trusted in self.keys.iter().filter(|trusted| trusted.may_have_signed(&header)) {
            let Some(claims) = trusted.key.signed_claims(token) else { continue };
            if claims.iss != trusted.issuer || !claims.aud.includes(&trusted.audience) {
                continue;
            }
            let now = self.clock.now().timestamp();
            if now >= claims.exp + LEEWAY_SECONDS {
                return Err(Problem::unauthorized("this token has expired"));
            }
            if now + LEEWAY_SECONDS < claims.nbf.unwrap_or(claims.iat) {
                return Err(Problem::unauthorized("this token is not valid yet"));
            }
            let user = claims.sub.parse().map_err(|_| Problem::unauthorized("the token's `sub` is not a UUID"))?;
            let role = claims.role.as_str().filter(|_| trusted.trust_roles).and_then(|role| role.parse().ok());
            return Ok(Caller { principal: Principal::User(user), tenant: Tenant::main(), role });
        }
        Err(refused())
    }
}

impl TrustedKey {
    fn may_have_signed(&self, header: &Header) -> bool {
        let named = match (&self.kid, &header.kid) {
            (Some(ours), Some(theirs)) => ours == theirs,
            (None, _) => true,
            (Some(_), None) => !self.is_ours(),
        };
        // Ours say what they are; many issuers still write plain JWT.
        let kind = header.typ.as_deref().unwrap_or("JWT");
        let fits = kind.eq_ignore_ascii_case(TYPE) || (!self.is_ours() && kind.eq_ignore_ascii_case("JWT"));
        named && fits && header.alg == self.algorithm
    }

    fn is_ours(&self) -> bool {
        matches!(self.key, Key::Ours(_))
    }
}

impl Key {
    /// What the token claims, if this key has signed it.
    fn signed_claims(&self, token: &str) -> Option<Claims> {
        match self {
            Key::Theirs(key, validation) => Some(jsonwebtoken::decode(token, key, validation).ok()?.claims),
            Key::Ours(key) => {
                let (signed, signature) = token.rsplit_once('.')?;
                let signature = BASE64_URL_SAFE_NO_PAD.decode(signature).ok()?;
                key.verify(signed.as_bytes(), &Signature::from_slice(&signature).ok()?).ok()?;
                let (_, claims) = signed.split_once('.')?;
                serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
            }
        }
    }
}

/// The claims are checked by us, against our clock.
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

fn own_key(signing: &SigningKey) -> TrustedKey {
    TrustedKey {
        kid: Some(key_id(signing)),
        algorithm: Algorithm::EdDSA,
        key: Key::Ours(signing.verifying_key()),
        issuer: ISSUER.to_owned(),
        audience: ISSUER.to_owned(),
        trust_roles: true,
    }
}

fn issuer_keys(issuer: &Issuer) -> Result<Vec<TrustedKey>, BadIssuer> {
    let bad = |reason: String| BadIssuer { issuer: issuer.issuer.clone(), reason };
    let text = std::fs::read_to_string(&issuer.jwks_file)
        .map_err(|error| bad(format!("jwks_file {}: {error}", issuer.jwks_file)))?;
    let set: JwkSet =
        serde_json::from_str(&text).map_err(|error| bad(format!("jwks_file is not a JWK set: {error}")))?;
    set.keys.iter().map(|jwk| issuer_key(issuer, jwk).map_err(&bad)).collect()
}

fn issuer_key(issuer: &Issuer, jwk: &Jwk) -> Result<TrustedKey, String> {
    let algorithm =
        jwk.common.key_algorithm.and_then(|name| name.to_string().parse().ok()).ok_or("a key has no `alg`")?;
    // A shared secret cannot be published, so a symmetric key in a JWKS is a mistake or an attack.
    if matches!(algorithm, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512) {
        return Err("symmetric keys are not taken".to_owned());
    }
    Ok(TrustedKey {
        kid: jwk.common.key_id.clone(),
        algorithm,
        key: Key::Theirs(DecodingKey::from_jwk(jwk).map_err(|error| error.to_string())?, signature_only(algorithm)),
        issuer: issuer.issuer.clone(),
        audience: issuer.audience.clone(),
        trust_roles: issuer.trust_roles,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ed25519_dalek::Signer;

    const MINUTE: Duration = Duration::from_secs(60);

    fn clock() -> Clock {
        Clock::manual(DateTime::from_timestamp(1_800_000_000, 0).unwrap())
    }

    fn verifier(master: &MasterKey, clock: &Clock) -> TokenVerifier {
        TokenVerifier::new(std::slice::from_ref(master), &[], clock.clone()).unwrap()
    }

    #[test]
    fn our_own_token_names_its_user_and_role() {
        let (master, clock, user) = (MasterKey::generate(), clock(), Uuid::now_v7());
        let token = TokenSigner::new(&master).sign(user, Some(Role::Admin), clock.now(), MINUTE).unwrap();
        let caller = verifier(&master, &clock).verify(&token).unwrap();
        assert_eq!((caller.user_id(), caller.role, caller.tenant), (Some(user), Some(Role::Admin), Tenant::main()));
    }

    #[test]
    fn expired_foreign_and_changed_tokens_are_refused() {
        let (master, clock) = (MasterKey::generate(), clock());
        let token = TokenSigner::new(&master).sign(Uuid::now_v7(), None, clock.now(), MINUTE).unwrap();
        assert!(verifier(&MasterKey::generate(), &clock).verify(&token).is_err(), "another installation's");
        let parts: Vec<&str> = token.split('.').collect();
        let admin = BASE64_URL_SAFE_NO_PAD.decode(parts[1]).unwrap();
        let admin = String::from_utf8(admin).unwrap().replace("\"iss\"", "\"role\":\"admin\",\"iss\"");
        let forged = format!("{}.{}.{}", parts[0], BASE64_URL_SAFE_NO_PAD.encode(admin), parts[2]);
        assert!(verifier(&master, &clock).verify(&forged).is_err(), "changed");
        let none = format!("{}.{}.", BASE64_URL_SAFE_NO_PAD.encode(r#"{"alg":"none","typ":"at+jwt"}"#), parts[1]);
        assert!(verifier(&master, &clock).verify(&none).is_err(), "alg none");
        clock.advance(MINUTE + Duration::from_secs(31));
        assert!(verifier(&master, &clock).verify(&token).is_err(), "expired");
    }

    /// A token of these parts, signed by a key.
    fn signed(header: &str, claims: &str, key: &SigningKey) -> String {
        let encode = |text: &str| BASE64_URL_SAFE_NO_PAD.encode(text);
        let message = format!("{}.{}", encode(header), encode(claims));
        format!("{message}.{}", BASE64_URL_SAFE_NO_PAD.encode(key.sign(message.as_bytes()).to_bytes()))
    }

    #[test]
    fn what_only_looks_like_ours_is_refused() {
        let (master, clock) = (MasterKey::generate(), clock());
        let (key, kid) = (signing_key(&master), key_id(&signing_key(&master)));
        let header = format!(r#"{{"alg":"EdDSA","typ":"at+jwt","kid":"{kid}"}}"#);
        let (sub, exp) = (Uuid::now_v7(), clock.now().timestamp() + 60);
        let claims = format!(r#"{{"iss":"pillarbox","aud":"pillarbox","sub":"{sub}","exp":{exp}}}"#);
        let good = signed(&header, &claims, &key);
        let is_taken = |token: &str| verifier(&master, &clock).verify(token).is_ok();
        assert!(is_taken(&good), "what the others are made of");

        let (message, signature) = good.rsplit_once('.').unwrap();
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(signature).unwrap();
        let with_bytes = |bytes: &[u8]| format!("{message}.{}", BASE64_URL_SAFE_NO_PAD.encode(bytes));
        // The same signature in its other form: s and the order of the group.
        let order = [
            0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde, 0x14, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10_u8,
        ];
        let mut twisted = bytes.clone();
        let mut carry = 0_u16;
        for (byte, added) in twisted[32..].iter_mut().zip(order) {
            carry += u16::from(*byte) + u16::from(added);
            *byte = carry as u8;
            carry >>= 8;
        }
        let with_secret = {
            let header = Header { kid: Some(kid.clone()), typ: Some(TYPE.to_owned()), ..Header::new(Algorithm::HS256) };
            let claims: serde_json::Value = serde_json::from_str(&claims).unwrap();
            let secret = EncodingKey::from_secret(key.verifying_key().as_bytes());
            jsonwebtoken::encode(&header, &claims, &secret).unwrap()
        };
        let cases = [
            ("another key", signed(&header, &claims, &signing_key(&MasterKey::generate()))),
            ("our public key as a shared secret", with_secret),
            ("no signature", with_bytes(&[])),
            ("a byte less", with_bytes(&bytes[..63])),
            ("a byte more", with_bytes(&[&bytes[..], &[0]].concat())),
            ("the signature twisted", with_bytes(&twisted)),
            ("padded", format!("{good}==")),
            ("four parts", format!("{message}.{}.{signature}", BASE64_URL_SAFE_NO_PAD.encode("{}"))),
            ("two parts", message.to_owned()),
            ("claims that are no JSON", signed(&header, "admin", &key)),
            ("no kid", signed(r#"{"alg":"EdDSA","typ":"at+jwt"}"#, &claims, &key)),
            ("another type", signed(&header.replace("at+jwt", "JWT"), &claims, &key)),
            ("another issuer", signed(&header, &claims.replace(r#""iss":"pillarbox""#, r#""iss":"other""#), &key)),
        ];
        for (what, token) in cases {
            assert!(!is_taken(&token), "{what}: {token}");
        }
    }

    #[test]
    fn a_replaced_master_key_still_verifies_but_no_longer_signs() {
        let (old, new, clock) = (MasterKey::generate(), MasterKey::generate(), clock());
        let token = TokenSigner::new(&old).sign(Uuid::now_v7(), None, clock.now(), MINUTE).unwrap();
        let both = TokenVerifier::new(&[new, old], &[], clock).unwrap();
        assert!(both.verify(&token).is_ok());
    }

    #[test]
    fn a_configured_issuer_is_trusted_for_its_audience_but_not_for_roles() {
        let (foreign, clock) = (MasterKey::generate(), clock());
        let signing = signing_key(&foreign);
        let file = std::env::temp_dir().join(format!("pillarbox-jwks-{}.json", Uuid::new_v4()));
        let x = BASE64_URL_SAFE_NO_PAD.encode(signing.verifying_key().as_bytes());
        std::fs::write(
            &file,
            format!(r#"{{"keys":[{{"kty":"OKP","crv":"Ed25519","alg":"EdDSA","kid":"k1","x":"{x}"}}]}}"#),
        )
        .unwrap();
        let issuer = Issuer {
            issuer: "https://login.example".to_owned(),
            audience: "tickets".to_owned(),
            jwks_file: file.display().to_string(),
            trust_roles: false,
        };
        let verifier = TokenVerifier::new(&[], std::slice::from_ref(&issuer), clock.clone()).unwrap();
        std::fs::remove_file(file).unwrap();
        let der = signing.to_pkcs8_der().unwrap();
        let token = |audience: &str| {
            let claims = Claims {
                iss: issuer.issuer.clone(),
                aud: Audience::Many(vec![audience.to_owned()]),
                sub: Uuid::nil().to_string(),
                iat: clock.now().timestamp(),
                exp: clock.now().timestamp() + 60,
                nbf: None,
                jti: None,
                role: "admin".into(),
            };
            let header = Header { kid: Some("k1".to_owned()), ..Header::new(Algorithm::EdDSA) };
            jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ed_der(der.as_bytes())).unwrap()
        };
        assert_eq!(verifier.verify(&token("tickets")).unwrap().role, None);
        assert!(verifier.verify(&token("other")).is_err());
    }
}
