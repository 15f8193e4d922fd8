//! To whom the dispatcher sends, and how.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use http::HeaderMap;
use serde_json::Value;
use uuid::Uuid;
use webhook_client::signature::SigningSecret;
use webhook_client::{Target, TokenSource};

use crate::deliveries::domain::{Format, OnExhausted, RetryRules};

/// A subscriber as the dispatcher needs it: where and how to send.
#[derive(Debug)]
pub(crate) struct Recipient {
    pub(crate) id: Uuid,
    pub(crate) tenant: Arc<str>,
    pub(crate) version: i64,
    /// False while the subscriber is paused, switched off or not verified, or its tenant is suspended: nothing is sent.
    pub(crate) is_enabled: bool,
    pub(crate) target: Target,
    pub(crate) headers: HeaderMap,
    /// Where the access token of each request comes from, if the endpoint requires one.
    pub(crate) token_source: Option<TokenSource>,
    /// The newest first, each with its expiry.
    pub(crate) secrets: Vec<(SigningSecret, Option<DateTime<Utc>>)>,
    pub(crate) format: Format,
    pub(crate) timeout: Duration,
    /// None: each message has a separate request.
    pub(crate) batch: Option<RecipientBatch>,
    pub(crate) limits: RecipientLimits,
    pub(crate) retry: RecipientRetry,
    /// The subscriber without its secrets, for dead letters.
    pub(crate) snapshot: Value,
}

/// How many messages a request to a subscriber may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecipientBatch {
    pub(crate) max: usize,
    /// How long messages wait for others.
    pub(crate) wait: Duration,
}

/// How fast the dispatcher may send to a subscriber.
#[derive(Debug, Clone)]
pub(crate) struct RecipientLimits {
    pub(crate) max_in_flight: usize,
    /// Requests per second.
    pub(crate) rate: Option<u32>,
}

/// What happens after a failed attempt.
#[derive(Debug, Clone)]
pub(crate) struct RecipientRetry {
    /// Seconds to wait after the first, second, ... failure. After the last one the message is a dead letter.
    pub(crate) backoff: Vec<u32>,
    pub(crate) rules: RetryRules,
    pub(crate) on_exhausted: OnExhausted,
}

#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    pub(crate) fn recipient() -> Recipient {
        let backoff = vec![5, 30, 300];
        Recipient {
            id: Uuid::now_v7(),
            tenant: "main".into(),
            version: 1,
            is_enabled: true,
            target: Target::parse("http://127.0.0.1:1/", false).unwrap(),
            headers: HeaderMap::new(),
            token_source: None,
            secrets: Vec::new(),
            format: Format::Raw,
            timeout: Duration::from_secs(1),
            batch: None,
            limits: RecipientLimits { max_in_flight: 50, rate: None },
            retry: RecipientRetry { backoff, rules: RetryRules::default(), on_exhausted: OnExhausted::Skip },
            snapshot: Value::Null,
        }
    }
}
