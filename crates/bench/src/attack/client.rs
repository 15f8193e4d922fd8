//! HTTP requests of attackers and bystanders, and a count of their answers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use crate::Outcome;

/// Longer than the server's `request_timeout_ms`, so that its own answer arrives first.
pub(super) const ANSWER_TIME_MAX: Duration = Duration::from_secs(40);

/// A client with connections of its own. Cheap to clone; clones share the connections.
#[derive(Clone)]
pub(super) struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    address: String,
    token: String,
}

/// A request of a client.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) method: &'static str,
    pub(super) path: String,
    pub(super) body: Bytes,
    pub(super) idempotency_key: Option<String>,
    /// Whether the body of the answer is ignored, as that of a stream.
    is_head_only: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Bytes,
}

impl Client {
    /// A client of the server at `address`, with a bearer token unless it is empty. Its connections begin at the address
    /// `from`: an anonymous caller is known by it.
    pub(super) fn new(address: &str, token: &str, from: IpAddr) -> Client {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_local_address(Some(from));
        let http = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Client { http, address: address.to_owned(), token: token.to_owned() }
    }

    pub(super) async fn send(&self, request: &Request) -> Outcome<Answer> {
        let mut builder = hyper::Request::builder()
            .method(request.method)
            .uri(format!("http://{}{}", self.address, request.path))
            .header("content-type", "application/json");
        if !self.token.is_empty() {
            builder = builder.header("authorization", format!("Bearer {}", self.token));
        }
        if let Some(key) = &request.idempotency_key {
            builder = builder.header("idempotency-key", key);
        }
        let is_head_only = request.is_head_only;
        let request = builder.body(Full::new(request.body.clone()))?;
        let answering = async {
            let answer = self.http.request(request).await?;
            let status = answer.status().as_u16();
            if is_head_only {
                return Ok(Answer { status, body: Bytes::new() });
            }
            Outcome::Ok(Answer { status, body: answer.into_body().collect().await?.to_bytes() })
        };
        tokio::time::timeout(ANSWER_TIME_MAX, answering).await.map_err(|_| "no answer in time")?
    }

    /// Sends a request that has to succeed, and returns the JSON of the answer.
    pub(super) async fn expect(&self, request: &Request) -> Outcome<Value> {
        let Answer { status, body } = self.send(request).await?;
        if !(200..300).contains(&status) {
            let body = String::from_utf8_lossy(&body);
            return Err(format!("{} {}: {status}: {body}", request.method, request.path).into());
        }
        Ok(serde_json::from_slice(&body).unwrap_or_default())
    }
}

impl Request {
    pub(super) fn get(path: impl Into<String>) -> Request {
        Request::with_body("GET", path, "")
    }

    pub(super) fn post(path: impl Into<String>, body: impl ToString) -> Request {
        Request::with_body("POST", path, body)
    }

    pub(super) fn with_body(method: &'static str, path: impl Into<String>, body: impl ToString) -> Request {
        let body = body.to_string().into();
        Request { method, path: path.into(), body, idempotency_key: None, is_head_only: false }
    }

    pub(super) fn head_only(self) -> Request {
        Request { is_head_only: true, ..self }
    }

    pub(super) fn with_key(self, key: impl ToString) -> Request {
        Request { idempotency_key: Some(key.to_string()), ..self }
    }
}

/// Counts answers by their status. Cheap to clone; clones share the counts.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally(Arc<Mutex<BTreeMap<String, u64>>>);

impl Tally {
    pub(super) fn add(&self, what: impl ToString) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what.to_string()).or_default() += 1;
    }

    /// Counts an answer by its status, and a request without an answer as `none`.
    pub(super) fn add_answer(&self, answer: &Outcome<Answer>) {
        match answer {
            Ok(answer) => self.add(answer.status),
            Err(_) => self.add("none"),
        }
    }

    pub(super) fn counts(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
