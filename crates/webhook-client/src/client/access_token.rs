//! Access tokens for endpoints that require OAuth 2 (client credentials, RFC 6749 section 4.4).
//!
//! Tokens are requested by the client that sends webhooks, so its rules also hold for token endpoints. A token is used until
//! shortly before it expires. At most one request for a token of an owner is in flight in a client; requests that need the
//! token at that time share its result.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine};
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::{Client, WebhookRequest};
use crate::error::{ErrorClass, RequestError};
use crate::target::{InvalidTarget, Target};

/// Time for a request for a token.
const TIME_MAX: Duration = Duration::from_secs(10);
/// How long before its end a token is replaced, at most a tenth of its time.
const MARGIN: Duration = Duration::from_secs(30);
/// The time of a token whose end the token endpoint does not tell.
const LIFETIME_DEFAULT: Duration = Duration::from_secs(300);
const LIFETIME_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Tokens in memory. When there are more, those that have expired are dropped.
const TOKENS_MAX: usize = 10_000;
/// Characters of an error code that are shown.
const ERROR_CHARS_MAX: usize = 60;
/// What `application/x-www-form-urlencoded` leaves as it is.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'*');

/// The credentials of a client, as RFC 6749 names them.
#[derive(Clone, Copy)]
pub struct ClientCredentials<'a> {
    /// The URL of the token endpoint.
    pub token_url: &'a str,
    /// The id of the client.
    pub client_id: &'a str,
    /// The secret of the client.
    pub client_secret: &'a str,
    /// The scope that is requested.
    pub scope: Option<&'a str>,
    /// The audience that is requested.
    pub audience: Option<&'a str>,
}

/// The credentials of an endpoint, ready for requests.
#[derive(Debug)]
pub struct TokenSource {
    owner: Arc<str>,
    token_url: Target,
    /// The client's id and secret. Marked sensitive, so that it is not printed.
    authorization: HeaderValue,
    form: Bytes,
    /// Of all of it: a token of other credentials is not used.
    digest: [u8; 32],
}

/// The tokens of a client, by owner.
#[derive(Default)]
pub(crate) struct TokenCache(Mutex<HashMap<Arc<str>, Arc<Entry>>>);

struct Entry {
    digest: [u8; 32],
    /// Locked while a token is requested.
    state: tokio::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    token: Option<Token>,
    /// The end and the error of the last request, if it failed.
    failed: Option<(Instant, RequestError)>,
}

struct Token {
    /// Marked sensitive.
    header: HeaderValue,
    expires_at: Instant,
}

/// An access token.
pub struct AccessToken {
    /// The value of `Authorization`, marked sensitive.
    pub header: HeaderValue,
    /// The token was requested for this call.
    pub is_new: bool,
}

/// The response of a token endpoint. All other fields are ignored.
#[derive(Deserialize)]
struct TokenResponse {
    access_token: Option<String>,
    token_type: Option<String>,
    expires_in: Option<f64>,
    error: Option<String>,
}

/// Why tokens cannot be requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCredentials {
    /// The header cannot contain the id or the secret.
    #[error("the client's id and secret cannot be sent")]
    Unsendable,
    /// The URL of the token endpoint is not valid.
    #[error("token_url {0}")]
    TokenUrl(InvalidTarget),
}

impl TokenSource {
    /// Prepares the requests for tokens. `owner` is the only one that uses these tokens.
    ///
    /// # Errors
    /// The URL is not valid, or the credentials cannot be sent.
    pub fn new(owner: &str, credentials: &ClientCredentials<'_>) -> Result<TokenSource, InvalidCredentials> {
        let ClientCredentials { token_url, client_id, client_secret, scope, audience } = *credentials;
        let encoded = |text: &str| utf8_percent_encode(text, ENCODED).to_string();
        let user = format!("{}:{}", encoded(client_id), encoded(client_secret));
        let mut authorization = HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(user)))
            .map_err(|_| InvalidCredentials::Unsendable)?;
        authorization.set_sensitive(true);
        let mut form = "grant_type=client_credentials".to_owned();
        for (name, value) in [("scope", scope), ("audience", audience)] {
            if let Some(value) = value {
                form.push_str(&format!("&{name}={}", encoded(value)));
            }
        }
        let target = Target::parse(token_url, false).map_err(InvalidCredentials::TokenUrl)?;
        let mut digest = Sha256::new();
        for part in [token_url.as_bytes(), authorization.as_bytes(), form.as_bytes()] {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let digest = digest.finalize().into();
        Ok(TokenSource { owner: owner.into(), token_url: target, authorization, form: form.into(), digest })
    }
}

impl TokenCache {
    /// Returns a token, requested if there is none that is valid for a while. `refused` is a token that the endpoint did not
    /// accept: it is not used again. Fails if there is none until `end`.
    pub(crate) async fn token(
        &self,
        client: &Client,
        source: &TokenSource,
        refused: Option<&HeaderValue>,
        end: std::time::Instant,
    ) -> Result<AccessToken, RequestError> {
        let found = tokio::time::timeout_at(end.into(), self.find_or_request(client, source, refused)).await;
        found.unwrap_or_else(|_| Err(failed("has not answered in time")))
    }

    async fn find_or_request(
        &self,
        client: &Client,
        source: &TokenSource,
        refused: Option<&HeaderValue>,
    ) -> Result<AccessToken, RequestError> {
        let (entry, began) = (self.entry(source), Instant::now());
        let mut state = entry.state.lock().await;
        if let Some(token) = &state.token
            && token.expires_at > Instant::now()
            && refused != Some(&token.header)
        {
            return Ok(AccessToken { header: token.header.clone(), is_new: false });
        }
        // A request that failed while this attempt waited for it: another one would fail as well.
        if let Some((at, error)) = &state.failed
            && *at >= began
        {
            return Err(error.clone());
        }
        state.token = None;
        match request_token(client, source).await {
            Ok(token) => {
                let header = token.header.clone();
                *state = State { token: Some(token), failed: None };
                Ok(AccessToken { header, is_new: true })
            }
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    fn entry(&self, source: &TokenSource) -> Arc<Entry> {
        // A panic while the lock is held leaves no partial change, so a poisoned lock is usable.
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get(&source.owner).filter(|entry| entry.digest == source.digest) {
            return Arc::clone(entry);
        }
        if entries.len() >= TOKENS_MAX {
            let now = Instant::now();
            // An entry that is locked is in use.
            entries.retain(|_, entry| entry.state.try_lock().map_or(true, |state| state.is_valid(now)));
        }
        let entry = Arc::new(Entry { digest: source.digest, state: tokio::sync::Mutex::default() });
        entries.insert(Arc::clone(&source.owner), Arc::clone(&entry));
        entry
    }
}

impl State {
    fn is_valid(&self, now: Instant) -> bool {
        self.token.as_ref().is_some_and(|token| token.expires_at > now)
    }
}

async fn request_token(client: &Client, source: &TokenSource) -> Result<Token, RequestError> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    headers.insert(AUTHORIZATION, source.authorization.clone());
    let (target, body) = (&source.token_url, source.form.clone());
    let fetched = client.fetch(WebhookRequest { target, headers, body, timeout: TIME_MAX }).await;
    let (status, body) = fetched
        .map_err(|failure| failed(format!("cannot be reached ({}): {}", failure.class.as_str(), failure.text)))?;
    read_token(status, &body)
}

/// The token of a response. No part of the response but the error code is shown: it may contain a secret.
fn read_token(status: StatusCode, body: &[u8]) -> Result<Token, RequestError> {
    let response: Option<TokenResponse> = serde_json::from_slice(body).ok();
    if !status.is_success() {
        let code = response.and_then(|response| response.error).filter(|code| is_error_code(code));
        let code = code.map(|code| format!(" ({code})")).unwrap_or_default();
        return Err(failed(format!("answered {}{code}", status.as_u16())));
    }
    let unusable = || failed("answered without an `access_token` as JSON");
    let response = response.ok_or_else(unusable)?;
    if response.token_type.is_some_and(|kind| !kind.eq_ignore_ascii_case("bearer")) {
        return Err(failed("answered with a token that is not a bearer token"));
    }
    let token = response.access_token.filter(|token| !token.is_empty()).ok_or_else(unusable)?;
    let mut header = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| failed("answered with a token that cannot be sent in a header"))?;
    header.set_sensitive(true);
    let lifetime = response
        .expires_in
        .filter(|seconds| *seconds > 0.0)
        .map_or(LIFETIME_DEFAULT, |seconds| Duration::from_secs_f64(seconds.min(LIFETIME_MAX.as_secs_f64())));
    Ok(Token { header, expires_at: Instant::now() + lifetime - MARGIN.min(lifetime / 10) })
}

fn is_error_code(code: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    (1..=ERROR_CHARS_MAX).contains(&code.len()) && code.chars().all(is_plain)
}

fn failed(text: impl std::fmt::Display) -> RequestError {
    RequestError::new(ErrorClass::Oauth2, format!("no access token: the token endpoint {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(status: u16, body: &str) -> Result<Token, String> {
        read_token(StatusCode::from_u16(status).unwrap(), body.as_bytes()).map_err(|error| error.text)
    }

    #[tokio::test]
    async fn a_token_is_used_until_shortly_before_its_end() {
        for (expires_in, expected) in [("3600", 3_570), ("10", 9), ("1e12", 86_370), ("0", 270), ("null", 270)] {
            let body = format!(r#"{{"access_token":"a","token_type":"bearer","expires_in":{expires_in}}}"#);
            let token = read(200, &body).unwrap();
            let seconds = (token.expires_at - Instant::now()).as_secs_f64();
            assert!((f64::from(expected) - seconds).abs() < 1.0, "{expires_in}: {seconds}");
            assert_eq!(token.header, "Bearer a");
            assert!(!format!("{:?}", token.header).contains("Bearer"), "it is not printed");
        }
    }

    #[tokio::test]
    async fn a_failure_says_what_the_token_endpoint_did_and_quotes_nothing_of_it() {
        for (status, body, expected) in [
            (401, r#"{"error":"invalid_client","error_description":"hunter2"}"#, "answered 401 (invalid_client)"),
            (500, "hunter2", "answered 500"),
            (400, r#"{"error":"hunter2 is wrong"}"#, "answered 400"),
            (200, "hunter2", "answered without an `access_token` as JSON"),
            (200, r#"{"access_token":""}"#, "answered without an `access_token` as JSON"),
            (200, r#"{"access_token":"a\nb"}"#, "answered with a token that cannot be sent in a header"),
            (200, r#"{"access_token":"a","token_type":"mac"}"#, "answered with a token that is not a bearer token"),
        ] {
            let error = read(status, body).map(|_| ()).unwrap_err();
            assert_eq!(error, format!("no access token: the token endpoint {expected}"));
        }
    }

    #[test]
    fn a_request_has_the_grant_and_encoded_credentials() {
        let credentials = ClientCredentials {
            token_url: "https://id.example/token",
            client_id: "a:b",
            client_secret: "c d+ü",
            scope: Some("x y"),
            audience: None,
        };
        let source = TokenSource::new("a", &credentials).unwrap();
        assert_eq!(source.form, "grant_type=client_credentials&scope=x%20y");
        let basic = source.authorization.to_str().unwrap().strip_prefix("Basic ").unwrap();
        assert_eq!(BASE64_STANDARD.decode(basic).unwrap(), b"a%3Ab:c%20d%2B%C3%BC");
        assert!(!format!("{source:?}").contains("Basic"));
        let other = ClientCredentials { audience: Some("z"), ..credentials };
        assert_ne!(TokenSource::new("a", &other).unwrap().digest, source.digest);
    }
}
