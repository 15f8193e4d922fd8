//! A person with an account, who gets e-mails: that of the registration, and those about urgent business events.

use std::time::Duration;

use axum::http::Method;
use cli::api::{Api, ApiError};
use runtime::secret::random_text;
use serde_json::{Value, json};

use super::Demo;
use cli::table::print_note;

/// The type of business events whose e-mails wait for no digest. Its rules are removed at the end.
pub(super) const URGENT: &str = "DEMO_TABLE_FREE";
/// How often the e-mail of the registration is looked up, and how many times.
const EMAIL_PAUSE: Duration = Duration::from_millis(500);
const EMAIL_POLLS_MAX: usize = 20;

/// The manager of a restaurant.
pub(super) struct Manager {
    pub(super) id: String,
    email: String,
    password: String,
}

impl Manager {
    /// Registers the manager and verifies the address with the e-mail that an installation without a mail server captures.
    /// Fails if the installation does not run the service identity, or if the e-mail does not come.
    pub(super) async fn register(demo: &Demo) -> Result<Manager, ApiError> {
        let email = format!("demo-{}@example.org", random_text(8).to_lowercase());
        let password = random_text(20);
        let account = json!({"email": email, "password": password, "name": "Mara Demo"});
        demo.operator.post("/identity/v1/register", &account).await?;
        let token = captured_token(demo, &email).await?;
        demo.operator.post("/identity/v1/verify", &json!({ "token": token })).await?;
        let mut manager = Manager { id: String::new(), email, password };
        let account = manager.sign_in(demo).await?.get("/identity/v1/me").await?;
        manager.id = account["id"].as_str().unwrap_or_default().to_owned();
        let rules = json!({"critical": true, "channels": ["email", "in_app"]});
        demo.operator.send(Method::PUT, &format!("/notify/v1/event-types/{URGENT}"), Some(&rules)).await?;
        Ok(manager)
    }

    /// Access tokens expire within minutes, so there is a new one for each use.
    async fn sign_in(&self, demo: &Demo) -> Result<Api, ApiError> {
        let credentials = json!({"email": self.email, "password": self.password});
        let tokens = demo.operator.post("/identity/v1/login", &credentials).await?;
        let token = tokens["access_token"].as_str().unwrap_or_default().to_owned();
        Ok(demo.operator.with_bearer(runtime::secret::Secret::new(token)))
    }

    /// Deletes the account, and with it the e-mails and the inbox.
    pub(super) async fn remove(&self, demo: &Demo) {
        let rules = demo.operator.send(Method::DELETE, &format!("/notify/v1/event-types/{URGENT}"), None).await;
        if let Err(error) = rules {
            print_note(&format!("warning: the rules of the event type {URGENT} are not removed: {error}"));
        }
        let deletion = json!({ "password": self.password });
        let deleted =
            async { self.sign_in(demo).await?.send(Method::DELETE, "/identity/v1/me", Some(&deletion)).await };
        if let Err(error) = deleted.await {
            print_note(&format!("warning: the account {} is not deleted: {error}", self.email));
        }
    }
}

/// The token in the captured e-mail of the registration.
async fn captured_token(demo: &Demo, email: &str) -> Result<String, ApiError> {
    for _ in 0..EMAIL_POLLS_MAX {
        let mails = demo.operator.get(&format!("/admin/v1/mail?to={email}&status=captured")).await?;
        if let Some(token) = mails["items"][0]["text"].as_str().and_then(token_in) {
            return Ok(token);
        }
        // Also when the demo ends first: an account that is not verified could not be deleted.
        tokio::time::sleep(EMAIL_PAUSE).await;
    }
    Err(ApiError::Invalid("the e-mail of the registration was not captured".to_owned()))
}

/// The token is the longest word of the e-mail, alone or at the end of a link.
fn token_in(text: &str) -> Option<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let words = text.split(|c: char| !is_part(c)).filter(|word| word.len() >= 30);
    words.max_by_key(|word| word.len()).map(str::to_owned)
}

/// A business event about a table that is free.
pub(super) fn urgent_event(number: usize, restaurant: u64) -> Value {
    json!({"event_id": format!("demo-{}", random_text(16)), "event_type": URGENT, "aggregate_type": "RESTAURANT",
        "aggregate_id": restaurant, "payload": {"table": 1 + number % 12}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_found_alone_and_in_a_link() {
        let token = "a".repeat(30) + "-_9";
        assert_eq!(token_in(&format!("Hello\n\n{token}\n")), Some(token.clone()));
        assert_eq!(token_in(&format!("Open https://example.org/verify?token={token} now")), Some(token));
        assert_eq!(token_in("no token"), None);
    }
}
