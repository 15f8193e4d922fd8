//! Tests of signing and verifying tokens.

use super::*;
use crate::caller::Role;
use ed25519_dalek::{Signer, SigningKey};
use hmac::{Hmac, Mac};
use sha2::Sha256;

const MINUTE: Duration = Duration::from_secs(60);

fn clock() -> Clock {
    Clock::manual(DateTime::from_timestamp(1_800_000_000, 0).unwrap())
}

/// The key that signs tokens now.
fn key_now(master: &MasterKey, clock: &Clock) -> SigningKey {
    signing_key(master, period_of(clock.now()))
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
    let key = key_now(&master, &clock);
    let kid = key_id(&key.verifying_key());
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
        ("another key", signed(&header, &claims, &signing_key(&MasterKey::generate(), 0))),
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
fn the_signing_key_changes_after_a_period_and_the_previous_one_stays_trusted() {
    let (master, clock, hour) = (MasterKey::generate(), clock(), Duration::from_secs(3600));
    let (verifier, signer) = (verifier(&master, &clock), TokenSigner::new(&master));
    let kids = |keys: serde_json::Value| -> Vec<String> {
        let keys = keys["keys"].as_array().unwrap().clone();
        keys.iter().map(|key| key["kid"].as_str().unwrap().to_owned()).collect()
    };
    let kid_now = || key_id(&key_now(&master, &clock).verifying_key());
    let (first, published) = (kid_now(), kids(verifier.public_keys()));
    let until_change = signing_keys::PERIOD_SECONDS - clock.now().timestamp().rem_euclid(signing_keys::PERIOD_SECONDS);
    clock.advance(Duration::from_secs(until_change as u64 - 60));
    let token = signer.sign(Uuid::now_v7(), None, clock.now(), hour).unwrap();
    assert_eq!(jsonwebtoken::decode_header(&token).unwrap().kid.as_ref(), Some(&first));
    clock.advance(MINUTE);
    assert_ne!(kid_now(), first);
    assert!(published.contains(&kid_now()), "the next key is published before it is used");
    assert!(verifier.verify(&token).is_ok(), "the token outlives the change of keys");
    let published = kids(verifier.public_keys());
    assert!(published.contains(&first) && published.contains(&kid_now()) && published.len() == 3, "{published:?}");
    let ahead = clock.now() + Duration::from_secs(20);
    assert!(
        verifier.verify(&signer.sign(Uuid::now_v7(), None, ahead, hour).unwrap()).is_ok(),
        "signed with the new key"
    );
    clock.advance(Duration::from_secs(signing_keys::PERIOD_SECONDS as u64));
    assert!(!kids(verifier.public_keys()).contains(&first), "a key is trusted for one more period");
}

#[test]
fn the_token_of_an_ended_session_is_refused_also_if_it_was_verified_before() {
    let (master, clock, user) = (MasterKey::generate(), clock(), Uuid::now_v7());
    let (verifier, signer) = (verifier(&master, &clock), TokenSigner::new(&master));
    let token = |session| signer.sign_for_session(user, None, session, clock.now(), MINUTE).unwrap();
    let (ended, other, unseen) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    let (first, second, third) = (token(ended), token(other), token(unseen));
    for _ in 0..2 {
        assert_eq!(verifier.verify(&first).unwrap().session, Some(ended));
        assert!(verifier.verify(&second).is_ok());
    }
    verifier.end_session(ended);
    verifier.end_session(unseen);
    assert!(verifier.verify(&first).is_err() && verifier.verify(&third).is_err());
    assert!(verifier.verify(&second).is_ok(), "another session");
    clock.advance(MINUTE);
    assert!(verifier.verify(&second).is_err(), "a remembered token expires too");
}

#[test]
fn a_token_expires_by_the_clock_of_those_who_sign_it() {
    let (master, database_clock, machine_clock) = (MasterKey::generate(), clock(), clock());
    let verifier = verifier(&master, &database_clock).with_issuer_clock(machine_clock.clone());
    let (signer, user, now) = (TokenSigner::new(&master), Uuid::now_v7(), machine_clock.now());
    let of_command = signer.sign(user, None, now, MINUTE).unwrap();
    let of_session = signer.sign_for_session(user, None, Uuid::now_v7(), now, MINUTE).unwrap();
    assert!(verifier.verify(&of_command).is_ok() && verifier.verify(&of_session).is_ok());
    database_clock.advance(MINUTE);
    assert!(verifier.verify(&of_command).is_ok(), "a command signs by the clock of its machine");
    assert!(verifier.verify(&of_session).is_err(), "identity signs by the database's clock");
    machine_clock.advance(MINUTE + Duration::from_secs(31));
    assert!(verifier.verify(&of_command).is_err());
}

#[test]
fn a_local_token_for_another_audience_is_rejected() {
    let (master, clock) = (MasterKey::generate(), clock());
    let key = key_now(&master, &clock);
    let header = format!(r#"{{"alg":"EdDSA","typ":"at+jwt","kid":"{}"}}"#, key_id(&key.verifying_key()));
    let claims = |audience: &str| {
        let (sub, now) = (Uuid::now_v7(), clock.now().timestamp());
        format!(r#"{{"iss":"pillarbox","aud":"{audience}","sub":"{sub}","iat":{now},"exp":{}}}"#, now + 60)
    };
    let is_accepted = |audience| verifier(&master, &clock).verify(&signed(&header, &claims(audience), &key)).is_ok();
    assert!(is_accepted("pillarbox") && !is_accepted("other"));
}

#[test]
fn the_token_of_a_session_is_valid_for_five_minutes_at_most() {
    let (master, clock) = (MasterKey::generate(), clock());
    let day = Duration::from_secs(24 * 3600);
    let token = TokenSigner::new(&master).sign_for_session(Uuid::now_v7(), None, Uuid::now_v7(), clock.now(), day);
    clock.advance(SESSION_TOKEN_TTL_MAX - Duration::from_secs(1));
    assert!(verifier(&master, &clock).verify(token.as_ref().unwrap()).is_ok());
    clock.advance(Duration::from_secs(1));
    assert!(verifier(&master, &clock).verify(&token.unwrap()).is_err());
}

#[test]
fn a_local_token_may_name_the_public_address_as_its_issuer() {
    let (master, clock, address) = (MasterKey::generate(), clock(), "https://tickets.example");
    let token = TokenSigner::new(&master).with_issuer(address).sign(Uuid::now_v7(), None, clock.now(), MINUTE).unwrap();
    assert!(verifier(&master, &clock).verify(&token).is_err(), "another installation's address");
    let verifier = verifier(&master, &clock).with_local_issuer(address);
    assert!(verifier.verify(&token).is_ok());
    let unnamed = TokenSigner::new(&master).sign(Uuid::now_v7(), None, clock.now(), MINUTE).unwrap();
    assert!(verifier.verify(&unnamed).is_ok(), "signed before the address was set");
}

/// Another issuer with its signing key.
struct Partner {
    issuer: Issuer,
    key: SigningKey,
}

impl Partner {
    /// An issuer whose only key has this id.
    fn new(name: &str, kid: &str) -> Partner {
        let key = signing_key(&MasterKey::generate(), 0);
        let file = std::env::temp_dir().join(format!("pillarbox-jwks-{}.json", Uuid::new_v4()));
        let x = BASE64_URL_SAFE_NO_PAD.encode(key.verifying_key().as_bytes());
        let jwk = format!(r#"{{"kty":"OKP","crv":"Ed25519","alg":"EdDSA","kid":"{kid}","x":"{x}"}}"#);
        std::fs::write(&file, format!(r#"{{"keys":[{jwk}]}}"#)).unwrap();
        let settings = serde_json::json!({"issuer": name, "audience": "tickets", "jwks_file": file});
        Partner { issuer: serde_json::from_value(settings).unwrap(), key }
    }

    /// A token with these claims in addition to `iss` and `aud`, or instead of them.
    fn token(&self, kid: &str, claims: serde_json::Value) -> String {
        let mut all = serde_json::json!({"iss": self.issuer.issuer, "aud": ["other", "tickets"]});
        all.as_object_mut().unwrap().extend(claims.as_object().unwrap().clone());
        signed(&format!(r#"{{"alg":"EdDSA","typ":"JWT","kid":"{kid}"}}"#), &all.to_string(), &self.key)
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.issuer.jwks_file);
    }
}

/// The claims of a token that is valid for a minute from now.
fn for_a_minute(sub: &str, clock: &Clock) -> serde_json::Value {
    let now = clock.now().timestamp();
    serde_json::json!({"sub": sub, "iat": now, "exp": now + 60, "role": "admin"})
}

#[test]
fn a_configured_issuer_is_trusted_for_its_audience_only() {
    let (partner, clock) = (Partner::new("https://login.example", "k1"), clock());
    let verifier = TokenVerifier::new(&[], std::slice::from_ref(&partner.issuer), clock.clone()).unwrap();
    let mut claims = for_a_minute(&Uuid::nil().to_string(), &clock);
    assert_eq!(verifier.verify(&partner.token("k1", claims.clone())).unwrap().role, None, "roles are not trusted");
    claims["aud"] = "other".into();
    assert!(verifier.verify(&partner.token("k1", claims)).is_err());
    let trusting = Issuer { trust_roles: true, ..partner.issuer.clone() };
    let verifier = TokenVerifier::new(&[], &[trusting], clock.clone()).unwrap();
    let caller = verifier.verify(&partner.token("k1", for_a_minute("ada", &clock))).unwrap();
    assert_eq!(caller.role, Some(Role::Admin), "roles are trusted if configured");
}

#[test]
fn the_same_subject_of_two_issuers_is_two_users() {
    let (master, clock, user) = (MasterKey::generate(), clock(), Uuid::now_v7());
    let (one, two) = (Partner::new("https://one.example", "k1"), Partner::new("https://two.example", "k1"));
    let issuers = [one.issuer.clone(), two.issuer.clone()];
    let verifier = TokenVerifier::new(std::slice::from_ref(&master), &issuers, clock.clone()).unwrap();
    let user_of = |token: &str| verifier.verify(token).unwrap().user_id().unwrap();
    let local = TokenSigner::new(&master).sign(user, None, clock.now(), MINUTE).unwrap();
    assert_eq!(user_of(&local), user, "a user of this installation keeps their id");
    for sub in [user.to_string(), "auth0|5f7c8ec7c33c6c004bbafe82".to_owned(), "名".repeat(255)] {
        let token = one.token("k1", for_a_minute(&sub, &clock));
        let other = two.token("k1", for_a_minute(&sub, &clock));
        let ids = [user_of(&token), user_of(&other), user];
        assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2], "{sub}: {ids:?}");
        assert_eq!(ids[0], foreign_user_id("https://one.example", &sub), "the id is stable");
    }
    for sub in [String::new(), "x".repeat(256)] {
        let refused = verifier.verify(&one.token("k1", for_a_minute(&sub, &clock))).unwrap_err();
        assert!(refused.to_string().contains("`sub`"), "{refused}");
    }
    // An issuer that claims to be another one is refused.
    for claimed in ["https://two.example", ISSUER] {
        let mut claims = for_a_minute(&user.to_string(), &clock);
        claims["iss"] = claimed.into();
        assert!(verifier.verify(&one.token("k1", claims)).is_err(), "{claimed}");
    }
    // Other programs compute the same ids, and they are stored: the algorithm must not change.
    let known = foreign_user_id("https://login.example.com", "42");
    assert_eq!((known.to_string().as_str(), known.get_version_num()), ("6aed0955-0a9f-8b1a-ba8a-9fed4922e7da", 8));
}

#[test]
fn the_lifetime_of_another_issuers_token_is_bounded() {
    let (partner, clock) = (Partner::new("https://login.example", "k1"), clock());
    let verifier = TokenVerifier::new(&[], std::slice::from_ref(&partner.issuer), clock.clone()).unwrap();
    let (now, hour) = (clock.now().timestamp(), 3600);
    let verify = |claims: serde_json::Value| verifier.verify(&partner.token("k1", claims)).map_err(|p| p.to_string());
    verify(serde_json::json!({"sub": "a", "iat": now, "exp": now + 24 * hour})).unwrap();
    for (claims, says) in [
        (serde_json::json!({"sub": "a", "iat": now, "exp": now + 24 * hour + 1}), "more than 24 h"),
        (serde_json::json!({"sub": "a", "iat": now - 100 * hour, "exp": now + hour}), "more than 24 h"),
        (serde_json::json!({"sub": "a", "iat": now, "exp": i64::MAX}), "more than 24 h"),
        (serde_json::json!({"sub": "a", "iat": i64::MIN, "exp": i64::MAX}), "more than 24 h"),
        (serde_json::json!({"sub": "a", "exp": now + hour}), "`iat`"),
        (serde_json::json!({"sub": "a", "iat": now}), "`exp`"),
        (serde_json::json!({"sub": "a", "iat": now - 2 * hour, "exp": now - hour}), "expired"),
        // A token that is issued in the future would be valid for longer than its lifetime from now.
        (serde_json::json!({"sub": "a", "nbf": now, "iat": now + 99 * hour, "exp": now + 100 * hour}), "not valid yet"),
    ] {
        let refused = verify(claims.clone()).unwrap_err();
        assert!(refused.starts_with("401") && refused.contains(says), "{claims}: {refused}");
    }
    let longer = Issuer { token_hours_max: 48, ..partner.issuer.clone() };
    let verifier = TokenVerifier::new(&[], &[longer], clock.clone()).unwrap();
    let token = partner.token("k1", serde_json::json!({"sub": "a", "iat": now, "exp": now + 48 * hour}));
    verifier.verify(&token).unwrap();
}

#[test]
fn an_invalid_issuer_is_named_with_the_accepted_values() {
    let partner = Partner::new("https://login.example", "k1");
    let long = "x".repeat(256);
    for (issuer, says) in [
        (Issuer { issuer: long, ..partner.issuer.clone() }, "1 to 255 characters"),
        (Issuer { issuer: String::new(), ..partner.issuer.clone() }, "1 to 255 characters"),
        (Issuer { issuer: ISSUER.to_owned(), ..partner.issuer.clone() }, "own issuer"),
        (Issuer { token_hours_max: 0, ..partner.issuer.clone() }, "1 to 8784"),
        (Issuer { token_hours_max: 8_785, ..partner.issuer.clone() }, "1 to 8784"),
    ] {
        let error = TokenVerifier::new(&[], &[issuer], clock()).err().unwrap().to_string();
        assert!(error.contains(says) && error.len() < 500, "{error}");
    }
}
