//! Signs the tokens of this installation.

use std::time::Duration;

use chrono::{DateTime, Utc};
use ed25519_dalek::pkcs8::EncodePrivateKey;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use uuid::Uuid;

use super::signing_keys::{key_id, period_of, signing_key};
use super::{Audience, Claims, ISSUER, SESSION_TOKEN_TTL_MAX, TYPE, algorithms};
use crate::caller::Role;
use runtime::secret::MasterKey;

/// The longest lifetime of a token of this installation.
const TOKEN_TTL_MAX: Duration = Duration::from_secs(24 * 3600);

/// Signs tokens for users of this installation.
#[derive(Clone)]
pub struct TokenSigner {
    master: MasterKey,
    issuer: String,
}

impl TokenSigner {
    pub fn new(master: &MasterKey) -> TokenSigner {
        algorithms::install();
        TokenSigner { master: master.clone(), issuer: ISSUER.to_owned() }
    }

    /// Sets the `iss` of the tokens: the public address of the installation. Verifiers must know it; see
    /// [`super::TokenVerifier::with_local_issuer`].
    pub fn with_issuer(mut self, address: &str) -> TokenSigner {
        self.issuer = address.to_owned();
        self
    }

    pub fn issuer(&self) -> &str {
        &self.issuer
    }

    /// Returns a token for `user`, valid from `now` for `ttl`, at most 24 hours.
    pub fn sign(
        &self,
        user: Uuid,
        role: Option<Role>,
        now: DateTime<Utc>,
        ttl: Duration,
    ) -> Result<String, jsonwebtoken::errors::Error> {
        self.encode(user, role, None, now, ttl.min(TOKEN_TTL_MAX))
    }

    /// Returns a token for the session of a user who has signed in, valid from `now` for `ttl`, at most
    /// [`SESSION_TOKEN_TTL_MAX`].
    pub fn sign_for_session(
        &self,
        user: Uuid,
        role: Option<Role>,
        session: Uuid,
        now: DateTime<Utc>,
        ttl: Duration,
    ) -> Result<String, jsonwebtoken::errors::Error> {
        self.encode(user, role, Some(session), now, ttl.min(SESSION_TOKEN_TTL_MAX))
    }

    fn encode(
        &self,
        user: Uuid,
        role: Option<Role>,
        session: Option<Uuid>,
        now: DateTime<Utc>,
        ttl: Duration,
    ) -> Result<String, jsonwebtoken::errors::Error> {
        let claims = Claims {
            iss: self.issuer.clone(),
            aud: Audience::One(ISSUER.to_owned()),
            sub: user.to_string(),
            iat: Some(now.timestamp()),
            exp: Some(now.timestamp() + ttl.as_secs() as i64),
            nbf: None,
            jti: Some(Uuid::now_v7()),
            sid: session.map(|session| session.to_string()).into(),
            role: role.map(Role::as_str).into(),
        };
        let key = signing_key(&self.master, period_of(now));
        let kid = Some(key_id(&key.verifying_key()));
        let header = Header { typ: Some(TYPE.to_owned()), kid, ..Header::new(Algorithm::EdDSA) };
        // Encoding 32 bytes as PKCS#8 cannot fail. A token signed with an empty key would never verify.
        let der = key.to_pkcs8_der().map(|der| der.as_bytes().to_vec()).unwrap_or_default();
        jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ed_der(&der))
    }
}
