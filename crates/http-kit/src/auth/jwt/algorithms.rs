//! The signature algorithms of tokens. The library that parses tokens is built without its algorithms: its RSA comes from the
//! crate `rsa`, which has an open advisory (RUSTSEC-2023-0071). ring verifies instead, as it does for TLS.

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey;
use jsonwebtoken::crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{Error, ErrorKind};
use jsonwebtoken::signature::{self, Signer, Verifier};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey, DecodingKeyKind, EncodingKey};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384,
    RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512,
    RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};

/// The sizes of an RSA modulus that ring accepts, in bytes.
const RSA_MODULUS_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |algorithm, key| Ok(Box::new(TokenKey::new(*algorithm, key)?)),
    verifier_factory: |algorithm, key| Ok(Box::new(PublicKey::new(*algorithm, key)?)),
    // Only for deriving a JWK from a private key, which nothing here does.
    key_utils: KeyUtils::new_unimplemented(),
};

/// Makes the library use these algorithms. Every call after the first has no effect.
pub(super) fn install() {
    let _ = PROVIDER.install_default();
}

/// Tokens could never be verified with a key.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnusableKey {
    #[error("the type of a key does not belong to its `alg`")]
    OtherType,
    #[error("an RSA key has {0} bits; 2048 to 8192 are accepted")]
    RsaBits(usize),
}

/// Fails if tokens could never be verified with this key.
pub(super) fn check(algorithm: Algorithm, key: &DecodingKey) -> Result<(), UnusableKey> {
    let public_key = PublicKey::new(algorithm, key).map_err(|_| UnusableKey::OtherType)?;
    match public_key {
        PublicKey { kind: Kind::Rsa { modulus, .. }, .. } if !RSA_MODULUS_BYTES.contains(&modulus.len()) => {
            Err(UnusableKey::RsaBits(modulus.len() * 8))
        }
        _ => Ok(()),
    }
}

/// The private key of this installation. It signs with EdDSA only.
struct TokenKey(SigningKey);

impl TokenKey {
    fn new(algorithm: Algorithm, key: &EncodingKey) -> Result<TokenKey, Error> {
        if algorithm != Algorithm::EdDSA || key.family() != AlgorithmFamily::Ed {
            return Err(ErrorKind::InvalidAlgorithm.into());
        }
        SigningKey::from_pkcs8_der(key.as_bytes()).map(TokenKey).map_err(|_| ErrorKind::InvalidEddsaKey.into())
    }
}

impl Signer<Vec<u8>> for TokenKey {
    fn try_sign(&self, message: &[u8]) -> Result<Vec<u8>, signature::Error> {
        Ok(self.0.try_sign(message)?.to_vec())
    }
}

impl JwtSigner for TokenKey {
    fn algorithm(&self) -> Algorithm {
        Algorithm::EdDSA
    }
}

/// A public key of an issuer.
struct PublicKey {
    algorithm: Algorithm,
    kind: Kind,
}

enum Kind {
    Rsa { parameters: &'static RsaParameters, modulus: Vec<u8>, exponent: Vec<u8> },
    Curve(UnparsedPublicKey<Vec<u8>>),
}

impl PublicKey {
    /// Fails unless the key is of the algorithm's type, and for symmetric algorithms, whose keys are not public.
    fn new(algorithm: Algorithm, key: &DecodingKey) -> Result<PublicKey, Error> {
        let curve = |family, verification: &'static dyn VerificationAlgorithm| match key.kind() {
            DecodingKeyKind::SecretOrDer(bytes) if key.family() == family => {
                Ok(Kind::Curve(UnparsedPublicKey::new(verification, bytes.clone())))
            }
            _ => Err(ErrorKind::InvalidKeyFormat),
        };
        let rsa = |parameters| match key.kind() {
            DecodingKeyKind::RsaModulusExponent { n, e } => {
                Ok(Kind::Rsa { parameters, modulus: without_zeros(n), exponent: without_zeros(e) })
            }
            _ => Err(ErrorKind::InvalidKeyFormat),
        };
        let kind = match algorithm {
            Algorithm::EdDSA => curve(AlgorithmFamily::Ed, &ED25519),
            Algorithm::ES256 => curve(AlgorithmFamily::Ec, &ECDSA_P256_SHA256_FIXED),
            Algorithm::ES384 => curve(AlgorithmFamily::Ec, &ECDSA_P384_SHA384_FIXED),
            Algorithm::RS256 => rsa(&RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => rsa(&RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => rsa(&RSA_PKCS1_2048_8192_SHA512),
            Algorithm::PS256 => rsa(&RSA_PSS_2048_8192_SHA256),
            Algorithm::PS384 => rsa(&RSA_PSS_2048_8192_SHA384),
            Algorithm::PS512 => rsa(&RSA_PSS_2048_8192_SHA512),
            // Symmetric algorithms, and those of later versions of the library.
            _ => Err(ErrorKind::InvalidAlgorithm),
        };
        Ok(PublicKey { algorithm, kind: kind? })
    }
}

impl Verifier<Vec<u8>> for PublicKey {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        let verified = match &self.kind {
            Kind::Rsa { parameters, modulus, exponent } => {
                RsaPublicKeyComponents { n: modulus, e: exponent }.verify(parameters, message, signature)
            }
            Kind::Curve(key) => key.verify(message, signature),
        };
        verified.map_err(|_| signature::Error::new())
    }
}

impl JwtVerifier for PublicKey {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

/// Removes leading zeros, which some issuers write and ring refuses.
fn without_zeros(number: &[u8]) -> Vec<u8> {
    number.iter().copied().skip_while(|&byte| byte == 0).collect()
}

#[cfg(test)]
mod tests;
