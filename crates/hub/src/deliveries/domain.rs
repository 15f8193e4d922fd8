//! How messages are delivered, and what becomes of them. No I/O, no async, no clock.

mod auth;
mod outcome;
mod retry;

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};
use utoipa::ToSchema;

pub(crate) use self::auth::{AuthKind, ClientCertificate, EndpointAuth, OAuth2Credentials};
pub(crate) use self::outcome::{EventOutcome, EventStatus, FanOutProgress, Outcome, Reason};
pub(crate) use self::retry::{RetryAction, RetryRules, RetrySchedule, StatusPattern, Verdict, backoff, verdict};

/// Several messages in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = BatchLimits)]
pub(crate) struct Batch {
    /// The number of messages in a request, at most.
    pub(crate) max: u32,
    /// How long messages wait for others, in milliseconds.
    pub(crate) wait_ms: u32,
}

/// What happens to a lane when its head becomes a dead letter after its last retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(crate) enum OnExhausted {
    /// The lane continues with the next message.
    Skip,
    /// The lane waits until an operator retries or dead-letters the message.
    Block,
}

/// The format of the request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
#[schema(as = WebhookFormat)]
pub(crate) enum Format {
    /// The payload, byte for byte.
    Raw,
    /// Standard Webhooks: `{type, timestamp, data}`.
    Standard,
    /// CloudEvents in structured mode: `{specversion, id, source, type, time, data}`.
    Cloudevents,
}

impl OnExhausted {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

impl Format {
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}
