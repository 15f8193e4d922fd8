//! Tokens that were not signed by this installation for this use are refused, by identity and by other services.

use std::time::Duration;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use chrono::{TimeDelta, Utc};
use ed25519_dalek::{Signer, SigningKey};
use http_kit::auth::TokenSigner;
use runtime::secret::MasterKey;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::fixture::Fixture;
use crate::support::text;

fn encode(bytes: &[u8]) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

fn part_of(token: &str, at: usize) -> Value {
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(token.split('.').nth(at).unwrap()).unwrap()).unwrap()
}

fn signed_part(header: &Value, claims: &Value) -> String {
    format!("{}.{}", encode(header.to_string().as_bytes()), encode(claims.to_string().as_bytes()))
}

/// HMAC-SHA256 (RFC 2104).
fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    let mut block = [0; 64];
    block[..key.len()].copy_from_slice(key);
    let pad = |with: u8| block.map(|byte| byte ^ with);
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(text).finalize();
    Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().to_vec()
}

#[tokio::test]
async fn a_forged_token_is_refused_by_identity_and_by_events() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    let session: Uuid = person.session().await.parse().unwrap();
    let key: MasterKey = fixture.app.settings.secret_key.as_ref().unwrap().reveal().parse().unwrap();
    let (now, minute) = (Utc::now(), Duration::from_secs(60));
    let sign = |signer: TokenSigner, from| signer.sign_for_session(person.id, None, session, from, minute).unwrap();
    let valid = sign(TokenSigner::new(&key), now);
    let (header, claims) = (part_of(&valid, 0), part_of(&valid, 1));
    let signature = valid.rsplit('.').next().unwrap();
    let changed = |of: &Value, name: &str, value: Value| {
        let mut changed = of.clone();
        changed[name] = value;
        changed
    };
    // Signed with the key of the installation, as only a server can: only the changed part is wrong.
    let period = now.timestamp().div_euclid(30 * 24 * 3600);
    let signing_key = SigningKey::from_bytes(&key.derive(&format!("jwt signing {period}")));
    let resign = |header: &Value, claims: &Value| {
        let message = signed_part(header, claims);
        let signature = encode(&signing_key.sign(message.as_bytes()).to_bytes());
        format!("{message}.{signature}")
    };
    let keys = fixture.app.anonymous().get("/identity/v1/jwks.json").await.json();
    let public = keys["keys"].as_array().unwrap().iter().find(|key| key["kid"] == header["kid"]).unwrap();
    let public = BASE64_URL_SAFE_NO_PAD.decode(text(&public["x"])).unwrap();
    let symmetric = signed_part(&changed(&header, "alg", json!("HS256")), &claims);
    let unsigned = signed_part(&changed(&header, "alg", json!("none")), &claims);
    let forged = [
        ("alg none", format!("{unsigned}.")),
        ("alg none with a signature", format!("{unsigned}.{signature}")),
        ("HS256 with the public key", format!("{symmetric}.{}", encode(&hmac(&public, symmetric.as_bytes())))),
        ("another issuer", sign(TokenSigner::new(&key).with_issuer("https://other.example"), now)),
        ("expired", sign(TokenSigner::new(&key), now - TimeDelta::minutes(5))),
        ("another key", sign(TokenSigner::new(&MasterKey::generate()), now)),
        (
            "another user",
            format!("{}.{signature}", signed_part(&header, &changed(&claims, "sub", json!(Uuid::now_v7())))),
        ),
        ("another audience", resign(&header, &changed(&claims, "aud", json!("other")))),
        ("no audience", resign(&header, &changed(&claims, "aud", Value::Null))),
        ("another type", resign(&changed(&header, "typ", json!("JWT")), &claims)),
        ("another role", format!("{}.{signature}", signed_part(&header, &changed(&claims, "role", json!("admin"))))),
        ("no signature", format!("{}.", signed_part(&header, &claims))),
    ];
    for path in ["/identity/v1/me", "/event/v1/me/events"] {
        let with = |token: &str| fixture.app.anonymous().bearer(token);
        for token in [&valid, &resign(&header, &claims)] {
            assert_eq!(with(token).get(path).await.status, 200, "{path}");
        }
        for (what, token) in &forged {
            let refused = with(token).get(path).await;
            assert_eq!(refused.status, 401, "{what} at {path}: {refused:?}");
        }
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_access_token_has_the_claims_that_the_discovery_document_names_and_lives_for_five_minutes() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    let claims = part_of(person.client.credential(), 1);
    assert_eq!(claims["sub"], person.id.to_string());
    assert_eq!(claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap(), 300);
    let configuration = fixture.app.anonymous().get("/.well-known/openid-configuration").await.json();
    assert_eq!(configuration["issuer"], claims["iss"]);
    let supported = configuration["claims_supported"].as_array().unwrap();
    for claim in claims.as_object().unwrap().keys() {
        assert!(supported.contains(&json!(claim)), "{claim}");
    }
    let keys = fixture.app.anonymous().get(text(&configuration["jwks_uri"])).await.json();
    let kid = &part_of(person.client.credential(), 0)["kid"];
    assert!(keys["keys"].as_array().unwrap().iter().any(|key| key["kid"] == *kid), "{keys}");
    fixture.app.stop().await;
}
