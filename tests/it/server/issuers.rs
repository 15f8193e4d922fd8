//! Tokens of other issuers: each issuer has its own users, and its tokens live for a bounded time.

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use chrono::Utc;
use ed25519_dalek::{Signer, SigningKey};
use http_kit::auth::Issuer;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::events::fixture::{event_id, event_path, meetup, post_action, publish_event};
use crate::joins::fixture::post_join_action;
use crate::support::{DEADLINE, text};

/// Another issuer, with its signing key and its JWKS file.
struct Partner {
    settings: Issuer,
    key: SigningKey,
}

impl Partner {
    fn new(name: &str) -> Partner {
        let key = SigningKey::from_bytes(&rand::random());
        let x = BASE64_URL_SAFE_NO_PAD.encode(key.verifying_key().as_bytes());
        let jwks =
            json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "kid": "k1", "x": x, "use": "sig"}]});
        let file = std::env::temp_dir().join(format!("pillarbox-it-jwks-{}.json", Uuid::new_v4().simple()));
        std::fs::write(&file, jwks.to_string()).unwrap();
        let settings = json!({"issuer": name, "audience": "tickets", "jwks_file": file});
        Partner { settings: serde_json::from_value(settings).unwrap(), key }
    }

    /// A token with these claims, and with `iss` and `aud` of this issuer.
    fn token(&self, mut claims: Value) -> String {
        (claims["iss"], claims["aud"]) = (json!(self.settings.issuer), json!("tickets"));
        let parts = [json!({"alg": "EdDSA", "kid": "k1"}), claims].map(|part| encode(part.to_string().as_bytes()));
        let signed = parts.join(".");
        format!("{signed}.{}", encode(&self.key.sign(signed.as_bytes()).to_bytes()))
    }

    /// A client with a token for this subject that is valid for an hour.
    fn user(&self, app: &TestApp, subject: &str) -> Client {
        let now = Utc::now().timestamp();
        let claims = json!({"sub": subject, "iat": now, "exp": now + 3600, "role": "admin"});
        app.anonymous().bearer(&self.token(claims))
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.settings.jwks_file);
    }
}

fn encode(bytes: &[u8]) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

async fn start(partners: &[&Partner]) -> (TestDatabase, TestApp) {
    let database = TestDatabase::new(&migrations()).await;
    let issuers = partners.iter().map(|partner| partner.settings.clone()).collect();
    let app = TestApp::start_with(&database, |settings| settings.issuers = issuers).await;
    (database, app)
}

#[tokio::test]
async fn an_issuer_cannot_speak_for_the_users_of_another() {
    let (one, two) = (Partner::new("https://one.example"), Partner::new("https://two.example"));
    let (_database, app) = start(&[&one, &two]).await;
    let owner_id = Uuid::now_v7();
    let owner = app.user(owner_id, None);
    let event = publish_event(&owner, meetup()).await;
    // The partner signs the id of our user.
    let forger = one.user(&app, &owner_id.to_string());
    for action in ["cancel", "unpublish"] {
        post_action(&forger, &event, action).await.assert_problem(403, "forbidden");
    }
    let history = forger.get(&format!("{}/history", event_path(&event))).await;
    assert!([403, 404].contains(&history.status), "{history:?}");
    assert_eq!(owner.get(&event_path(&event)).await.json()["status"], "published");
    assert_eq!(forger.get("/event/v1/me/events").await.json()["items"], json!([]));

    let known = format!("/join/v1/events/{}/stats", event_id(&event));
    eventually("the joins service knows the event", DEADLINE, async || owner.get(&known).await.status == 200).await;
    assert_eq!(forger.get(&known).await.status, 403, "only the owner is the organizer");
    // The same subject of three issuers, and a subject that is not a UUID, are four users with four registrations.
    let users = [owner.clone(), forger, two.user(&app, &owner_id.to_string()), one.user(&app, "auth0|5f7c8ec7")];
    let mut ids = Vec::new();
    for user in &users {
        let joined = post_join_action(user, event_id(&event), "join").await;
        assert_eq!(joined.status, 201, "{joined:?}");
        let mine = user.get("/join/v1/me/joins").await.json();
        assert_eq!(mine["items"].as_array().unwrap().len(), 1, "{mine}");
        ids.push(text(&mine["items"][0]["user_id"]).to_owned());
    }
    assert_eq!(ids[0], owner_id.to_string(), "a user of this installation keeps their id");
    let distinct: std::collections::HashSet<&String> = ids.iter().collect();
    assert_eq!(distinct.len(), 4, "{ids:?}");
    let again = one.user(&app, "auth0|5f7c8ec7").get("/join/v1/me/joins").await.json();
    assert_eq!(text(&again["items"][0]["user_id"]), ids[3], "another token of a user has the same id");
    app.stop().await;
}

#[tokio::test]
async fn a_user_whose_subject_is_no_uuid_creates_events_under_a_stable_id() {
    let partner = Partner::new("https://one.example");
    let (_database, app) = start(&[&partner]).await;
    let first = publish_event(&partner.user(&app, "auth0|5f7c8ec7"), meetup()).await;
    let second = publish_event(&partner.user(&app, "auth0|5f7c8ec7"), meetup()).await;
    let other = publish_event(&partner.user(&app, "auth0|another"), meetup()).await;
    assert_eq!(first["owner_id"], second["owner_id"], "another token of the user has the same id");
    assert_ne!(first["owner_id"], other["owner_id"]);
    // Such a user has no account here.
    partner.user(&app, "auth0|5f7c8ec7").get("/identity/v1/me").await.assert_problem(403, "forbidden");
    app.stop().await;
}

#[tokio::test]
async fn the_role_of_a_token_counts_only_if_its_issuer_is_trusted_for_roles() {
    let (one, mut two) = (Partner::new("https://one.example"), Partner::new("https://two.example"));
    two.settings.trust_roles = true;
    let (_database, app) = start(&[&one, &two]).await;
    one.user(&app, "ada").get("/admin/v1/keys").await.assert_problem(403, "forbidden");
    assert_eq!(two.user(&app, "ada").get("/admin/v1/keys").await.status, 200);
    app.stop().await;
}

#[tokio::test]
async fn a_token_of_another_issuer_lives_for_a_bounded_time() {
    let partner = Partner::new("https://one.example");
    let (_database, app) = start(&[&partner]).await;
    let (now, hour) = (Utc::now().timestamp(), 3600);
    let read = async |claims: Value| app.anonymous().bearer(&partner.token(claims)).get("/event/v1/me/events").await;
    assert_eq!(read(json!({"sub": "ada", "iat": now, "exp": now + 24 * hour})).await.status, 200);
    for (claims, says) in [
        (json!({"sub": "ada", "iat": now, "exp": now + 25 * hour}), "more than 24 h"),
        (json!({"sub": "ada", "exp": now + hour}), "`iat`"),
        (json!({"sub": "ada", "iat": now}), "`exp`"),
        (json!({"sub": "ada", "nbf": now, "iat": now + 10 * hour, "exp": now + 11 * hour}), "not valid yet"),
        (json!({"sub": "", "iat": now, "exp": now + hour}), "`sub`"),
    ] {
        let refused = read(claims.clone()).await;
        refused.assert_problem(401, "unauthorized");
        assert!(text(&refused.json()["detail"]).contains(says), "{claims}: {refused:?}");
    }
    app.stop().await;
}
