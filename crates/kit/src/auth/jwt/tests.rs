//! Tests of signing and verifying tokens.

use super::*;
use ed25519_dalek::Signer;
use hmac::{Hmac, Mac};
use sha2::Sha256;

const MINUTE: Duration = Duration::from_secs(60);

fn clock() -> Clock {
    Clock::manual(DateTime::from_timestamp(1_800_000_000, 0).unwrap())
}

fn verifier(master: &MasterKey, clock: &Clock) -> TokenVerifier {
    TokenVerifier::new(std::slice::from_ref(master), &[], clock.clone()).unwrap()
}

#[test]
fn a_local_token_identifies_its_user_and_role() {
    let (master, clock, user) = (MasterKey::generate(), clock(), Uuid::now_v7());
    let token = TokenSigner::new(&master).sign(user, Some(Role::Admin), clock.now(), MINUTE).unwrap();
    let caller = verifier(&master, &clock).verify(&token).unwrap();
    assert_eq!((caller.user_id(), caller.role, caller.tenant), (Some(user), Some(Role::Admin), Tenant::main()));
}

#[test]
fn expired_foreign_and_modified_tokens_are_rejected() {
    let (master, clock) = (MasterKey::generate(), clock());
    let token = TokenSigner::new(&master).sign(Uuid::now_v7(), None, clock.now(), MINUTE).unwrap();
    assert!(verifier(&MasterKey::generate(), &clock).verify(&token).is_err(), "signed by another installation");
    let parts: Vec<&str> = token.split('.').collect();
    let admin = BASE64_URL_SAFE_NO_PAD.decode(parts[1]).unwrap();
    let admin = String::from_utf8(admin).unwrap().replace("\"iss\"", "\"role\":\"admin\",\"iss\"");
    let forged = format!("{}.{}.{}", parts[0], BASE64_URL_SAFE_NO_PAD.encode(admin), parts[2]);
    assert!(verifier(&master, &clock).verify(&forged).is_err(), "modified");
    let none = format!("{}.{}.", BASE64_URL_SAFE_NO_PAD.encode(r#"{"alg":"none","typ":"at+jwt"}"#), parts[1]);
    assert!(verifier(&master, &clock).verify(&none).is_err(), "alg none");
    clock.advance(MINUTE + Duration::from_secs(31));
    assert!(verifier(&master, &clock).verify(&token).is_err(), "expired");
}

/// Returns a token with this header and these claims, signed with `key`.
fn signed(header: &str, claims: &str, key: &SigningKey) -> String {
    let encode = |text: &str| BASE64_URL_SAFE_NO_PAD.encode(text);
    let message = format!("{}.{}", encode(header), encode(claims));
    format!("{message}.{}", BASE64_URL_SAFE_NO_PAD.encode(key.sign(message.as_bytes()).to_bytes()))
}

#[test]
fn forged_local_tokens_are_rejected() {
    let (master, clock) = (MasterKey::generate(), clock());
    let (key, kid) = (signing_key(&master), key_id(&signing_key(&master)));
    let header = format!(r#"{{"alg":"EdDSA","typ":"at+jwt","kid":"{kid}"}}"#);
    let (sub, exp) = (Uuid::now_v7(), clock.now().timestamp() + 60);
    let claims = format!(r#"{{"iss":"pillarbox","aud":"pillarbox","sub":"{sub}","exp":{exp}}}"#);
    let good = signed(&header, &claims, &key);
    let is_accepted = |token: &str| verifier(&master, &clock).verify(token).is_ok();
    assert!(is_accepted(&good), "the unmodified token");

    let (message, signature) = good.rsplit_once('.').unwrap();
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(signature).unwrap();
    let with_bytes = |bytes: &[u8]| format!("{message}.{}", BASE64_URL_SAFE_NO_PAD.encode(bytes));
    // The same signature in its non-canonical form: s plus the order of the group.
    let order = [
        0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde, 0x14, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10_u8,
    ];
    let mut malleable = bytes.clone();
    let mut carry = 0_u16;
    for (byte, added) in malleable[32..].iter_mut().zip(order) {
        carry += u16::from(*byte) + u16::from(added);
        *byte = carry as u8;
        carry >>= 8;
    }
    let with_secret = {
        let header = header.replace("EdDSA", "HS256");
        let message = format!("{}.{}", BASE64_URL_SAFE_NO_PAD.encode(header), BASE64_URL_SAFE_NO_PAD.encode(&claims));
        let mac = Hmac::<Sha256>::new_from_slice(key.verifying_key().as_bytes()).unwrap().chain_update(&message);
        format!("{message}.{}", BASE64_URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()))
    };
    let cases = [
        ("another key", signed(&header, &claims, &signing_key(&MasterKey::generate()))),
        ("our public key as a shared secret", with_secret),
        ("no signature", with_bytes(&[])),
        ("a byte less", with_bytes(&bytes[..63])),
        ("a byte more", with_bytes(&[&bytes[..], &[0]].concat())),
        ("a non-canonical signature", with_bytes(&malleable)),
        ("padded", format!("{good}==")),
        ("four parts", format!("{message}.{}.{signature}", BASE64_URL_SAFE_NO_PAD.encode("{}"))),
        ("two parts", message.to_owned()),
        ("claims that are not JSON", signed(&header, "admin", &key)),
        ("no kid", signed(r#"{"alg":"EdDSA","typ":"at+jwt"}"#, &claims, &key)),
        ("another type", signed(&header.replace("at+jwt", "JWT"), &claims, &key)),
        ("another issuer", signed(&header, &claims.replace(r#""iss":"pillarbox""#, r#""iss":"other""#), &key)),
    ];
    for (what, token) in cases {
        assert!(!is_accepted(&token), "{what}: {token}");
    }
}

#[test]
fn a_previous_master_key_still_verifies_tokens() {
    let (old, new, clock) = (MasterKey::generate(), MasterKey::generate(), clock());
    let token = TokenSigner::new(&old).sign(Uuid::now_v7(), None, clock.now(), MINUTE).unwrap();
    let both = TokenVerifier::new(&[new, old], &[], clock).unwrap();
    assert!(both.verify(&token).is_ok());
}

#[test]
fn a_configured_issuer_is_trusted_for_its_audience_only() {
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
