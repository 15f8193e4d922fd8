//! Tokens of issuers with RSA and elliptic-curve keys. OpenSSL made the keys and the signatures.

use std::time::Duration;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use chrono::DateTime;
use serde_json::json;
use uuid::Uuid;

use crate::auth::{Issuer, TokenVerifier};
use runtime::clock::Clock;

/// The modulus of an RSA key of 2048 bits.
const MODULUS: &str = concat!(
    "xviR6H5yXJTFBPAk8oW_m_4ZgCTw2dD0DhlGlHVLvrgn11ukyxG2xWGSyyYVOumt3VY3Quv2joaegPw7mMQ522fnQyahhXexnsrZ",
    "eYbHhmQiO4PeZ3WtOsii5lsAHO9vk2ZiL-or98Ji0eNEUD3EKa6NJ-L4BBYexUKINl3zNao3glMQub90TmVJckIHiSvml4q9YZ3G",
    "uvEV7iRz4v9C6Wyt6TtRo-n9u0aRcvU9pqkBFib9aUDPhOXgKNu_EvvFepIu7KNdGCElbjR-x2nyzjkqC0KPeJZF4Q0oKHZtrlUx",
    "Z25rm1K_u4ntHcaLeF1vzCDi5TPUWy_BAk0DX7_Gow",
);
const X: &str = "T_BSxufpJoGfKbVsTJ0dRGsptyXddlbe53Kd1m6vMSg";
const Y: &str = "OkvTLqC19VatjUahL-JjWZXi97M1rl0OKQBgIUdXIws";
const RS256: &str = concat!(
    "mlyHh22hSDLf4RG50HgQ4tPEeMdHYI27vJ8sr4nRfMAH3BNkJ8QHs9Fcsx2hF2xxeZkysv23rvlwMJ72ZqpN72y2g0vO0wXUl98B",
    "FH2WSYOZJda9jYieNbuBM0V0SaRvetJuw3ORMKPP_MIKzMDdfsnlsJfmyQ8k3J58UROlXEpMP8fXzrhn2Hh3VlxLUz8KHy1-1ZeW",
    "q2GMB1EU6GhKP_RTXg5VlDa2LpKUtR97GgKpNK6cfmOkBaS0DBtNIov_tq50DQ9P7Ic9xVV41ygnKrZHyEmXUFYN8x9t1l0SkF7k",
    "cj8wUcEwleMWVMrCZcRfui40DVnq6ZNIOHZbKtbcoQ",
);
const PS256: &str = concat!(
    "GUkRbKxD3hqog-2jB-2t67ma3glbIM8fXc45-pC9XCI71_S-VRES6FntBmyViCJsTCA3gd5v7Z4uve0sxF-2vX_MkVbeVFNsC28g",
    "xHJhjceLlYv4JmBgJgjyPvldw63IV-0TB7CvpnLVby-ViCMcSair8XBa42c6uE1gq-zpcAjpX8OZDzMdUM07T1-qOrlxL6C0Elsc",
    "oFsTynOfhwvQAoXpdbwZbYKtPXQU-huuPCJC704qKDdpG7474bq44yP15-KG2fj6gUPz8RB3rkYYpwAi-qrLI0DC193OHscx7acO",
    "00d4EBE1yhHAIFYQHHsE6eM1CD3b0w69Sf7CuxWjsA",
);
const ES256: &str = "gtbq9yzNdcwe47Lgr1YPs-BQK0uCXLUtBe1010vqNHpst-p4JZWk-r6-ifaMQRtTLuR3h-F5T6ASv5YGUPo6GA";
/// The user of the tokens.
const USER: &str = "01890a5d-ac96-774b-bcce-b302099a8057";
/// When the tokens were issued, in seconds.
const ISSUED_AT: i64 = 1_800_000_000;

fn verifier(keys: serde_json::Value) -> Result<TokenVerifier, String> {
    let file = std::env::temp_dir().join(format!("pillarbox-jwks-{}.json", Uuid::new_v4()));
    std::fs::write(&file, json!({"keys": keys}).to_string()).unwrap();
    let issuer = json!({"issuer": "https://login.example", "audience": "tickets", "jwks_file": file});
    let issuer: Issuer = serde_json::from_value(issuer).unwrap();
    let clock = Clock::manual(DateTime::from_timestamp(ISSUED_AT, 0).unwrap());
    clock.advance(Duration::from_secs(1));
    let verifier = TokenVerifier::new(&[], &[issuer], clock).map_err(|error| error.to_string());
    std::fs::remove_file(file).unwrap();
    verifier
}

fn rsa_key(algorithm: &str, modulus: &str) -> serde_json::Value {
    json!({"kty": "RSA", "alg": algorithm, "kid": algorithm, "n": modulus, "e": "AQAB"})
}

fn curve_key() -> serde_json::Value {
    json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "kid": "ES256", "x": X, "y": Y})
}

/// The signed part of the token: exactly these bytes were signed.
fn message(algorithm: &str, user: &str) -> String {
    let header = format!(r#"{{"alg":"{algorithm}","typ":"JWT","kid":"{algorithm}"}}"#);
    let claims = format!(
        r#"{{"iss":"https://login.example","aud":"tickets","sub":"{user}","iat":{ISSUED_AT},"exp":{}}}"#,
        ISSUED_AT + 60
    );
    format!("{}.{}", BASE64_URL_SAFE_NO_PAD.encode(header), BASE64_URL_SAFE_NO_PAD.encode(claims))
}

#[test]
fn tokens_of_rsa_and_elliptic_curve_issuers_are_verified() {
    let keys = json!([rsa_key("RS256", MODULUS), rsa_key("PS256", MODULUS), curve_key()]);
    let verifier = verifier(keys).unwrap();
    for (algorithm, signature) in [("RS256", RS256), ("PS256", PS256), ("ES256", ES256)] {
        let is_accepted =
            |user: &str, signature: &str| verifier.verify(&format!("{}.{signature}", message(algorithm, user))).is_ok();
        assert!(is_accepted(USER, signature), "{algorithm}");
        assert!(!is_accepted("01890a5d-ac96-774b-bcce-b302099a8058", signature), "{algorithm}: another user");
        assert!(!is_accepted(USER, ""), "{algorithm}: no signature");
        assert!(!is_accepted(USER, &signature[4..]), "{algorithm}: a shorter signature");
        let other = if algorithm == "RS256" { PS256 } else { RS256 };
        assert!(!is_accepted(USER, other), "{algorithm}: the signature of another algorithm");
    }
}

#[test]
fn a_modulus_with_a_leading_zero_is_accepted() {
    let modulus = [vec![0], BASE64_URL_SAFE_NO_PAD.decode(MODULUS).unwrap()].concat();
    let verifier = verifier(json!([rsa_key("RS256", &BASE64_URL_SAFE_NO_PAD.encode(modulus))])).unwrap();
    assert!(verifier.verify(&format!("{}.{RS256}", message("RS256", USER))).is_ok());
}

#[test]
fn an_unusable_key_of_an_issuer_stops_the_start() {
    let error = |key| verifier(json!([key])).err().unwrap();
    let modulus = BASE64_URL_SAFE_NO_PAD.decode(MODULUS).unwrap();
    let short = error(rsa_key("RS256", &BASE64_URL_SAFE_NO_PAD.encode(&modulus[..128])));
    assert!(short.contains("1024 bits") && short.contains("2048 to 8192"), "{short}");
    let mut curve = curve_key();
    curve["alg"] = "RS256".into();
    assert!(error(curve).contains("`alg`"));
    let symmetric = error(json!({"kty": "oct", "alg": "HS256", "k": "AAAA"}));
    assert!(symmetric.contains("symmetric"), "{symmetric}");
}
