//! Deliveries: to whom the dispatcher sends, the result of an attempt, and what dispatcher and store exchange.
//!
//! This module depends neither on the dispatcher nor on the store, so that both can depend on it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use http::HeaderMap;
use mailbox::database::Incarnation;
use serde_json::Value;
use uuid::Uuid;

use crate::access_token::TokenSource;
use crate::client_identity::{ClientIdentity, InvalidIdentity};
use crate::domain::{Batch, EndpointAuth, Format, OnExhausted, Outcome, Reason, RetryRules, Subscriber, Verdict};
use crate::health::{HealthMinute, SubscriberState};
use crate::hub_message::{DirectoryVersion, HubMessage, LaneKey};
use crate::operator_command::PendingCommand;
use crate::signature::SigningSecret;
use crate::target::Target;

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
    /// None: each message has a request of its own.
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

impl Recipient {
    /// Fails with the reason if the stored URL or headers are no longer valid.
    pub(crate) fn new(
        subscriber: Subscriber,
        secrets: Vec<(SigningSecret, Option<DateTime<Utc>>)>,
    ) -> Result<Recipient, String> {
        let snapshot = subscriber.snapshot();
        let settings = subscriber.settings;
        // The URL was checked when it was stored. If the setting `https_only` became stricter since then, sending fails.
        let target = Target::parse(&settings.url, false).map_err(|error| format!("{}: url {error}", subscriber.id))?;
        let (target, token_source) = with_auth(subscriber.id, target, settings.auth.as_ref())
            .map_err(|error| format!("{}: auth: {error}", subscriber.id))?;
        let headers = crate::headers::check(&settings.headers.into_iter().collect())
            .map_err(|refused| format!("{}: {} of its headers are not allowed", subscriber.id, refused.len()))?;
        Ok(Recipient {
            id: subscriber.id,
            tenant: subscriber.tenant.as_str().into(),
            version: subscriber.version,
            is_enabled: settings.is_active && subscriber.paused_at.is_none() && subscriber.unverified_since.is_none(),
            target,
            headers,
            token_source,
            secrets,
            format: settings.format,
            timeout: Duration::from_millis(settings.timeout_ms.into()),
            batch: settings.batch.map(|Batch { max, wait_ms }| RecipientBatch {
                max: max as usize,
                wait: Duration::from_millis(wait_ms.into()),
            }),
            limits: RecipientLimits {
                max_in_flight: settings.max_in_flight as usize,
                rate: settings.rate_limit_per_second,
            },
            retry: RecipientRetry {
                backoff: settings.retry_backoff_seconds,
                rules: settings.retry_rules,
                on_exhausted: settings.on_exhausted,
            },
            snapshot,
        })
    }
}

/// The target and the source of access tokens that an endpoint requires. Fails with the reason if the stored credentials are no
/// longer valid. A certificate that has expired since it was stored is valid here: its endpoint decides.
fn with_auth(
    subscriber: Uuid,
    target: Target,
    auth: Option<&EndpointAuth>,
) -> Result<(Target, Option<TokenSource>), String> {
    match auth {
        None => Ok((target, None)),
        Some(EndpointAuth::Oauth2(credentials)) => Ok((target, Some(TokenSource::new(subscriber, credentials)?))),
        Some(EndpointAuth::Mtls(pair)) => {
            let owner = subscriber.to_string();
            let identity = ClientIdentity::from_pem(&owner, &pair.certificate, pair.private_key.reveal());
            let (InvalidIdentity::Certificate(detail) | InvalidIdentity::PrivateKey(detail)) = match identity {
                Ok(identity) => return Ok((target.with_identity(Arc::new(identity)), None)),
                Err(invalid) => invalid,
            };
            Err(detail.to_owned())
        }
    }
}

/// The result of one attempt.
#[derive(Debug, Clone)]
pub(crate) struct AttemptResult {
    pub(crate) verdict: Verdict,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) status: Option<u16>,
    pub(crate) latency: Duration,
    pub(crate) error: Option<&'static str>,
    pub(crate) detail: Option<String>,
    pub(crate) excerpt: Option<String>,
    /// Set if no request was sent, with the reason.
    pub(crate) not_sent: Option<Reason>,
}

impl AttemptResult {
    /// The result for a message that is given up without a request.
    pub(crate) fn not_sent(reason: Reason, detail: &str) -> AttemptResult {
        AttemptResult {
            verdict: Verdict::Refused,
            retry_after: None,
            status: None,
            latency: Duration::ZERO,
            error: Some(reason.as_str()),
            detail: Some(detail.to_owned()),
            excerpt: None,
            not_sent: Some(reason),
        }
    }

    /// The detail text of the dead letter, if this result makes one.
    pub(crate) fn dead_letter_detail(&self) -> String {
        match (self.status, &self.detail) {
            (Some(status), _) => format!("answered {status}"),
            (None, Some(detail)) => detail.clone(),
            (None, None) => self.error.unwrap_or("failed").to_owned(),
        }
    }
}

/// A finished attempt, to be stored.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) at: DateTime<Utc>,
    pub(crate) subscriber: Uuid,
    pub(crate) n: i64,
    pub(crate) attempt: u16,
    pub(crate) outcome: Outcome,
    pub(crate) result: AttemptResult,
    /// The replay that has created the message.
    pub(crate) replay: Option<Uuid>,
    /// The message was a dead letter, and an operator has retried it.
    pub(crate) was_dead: bool,
    /// If it delivered the message: how long ago the event was posted. None for messages that were sent again on request.
    pub(crate) time_since_post: Option<Duration>,
}

/// A message that was given up, to be stored.
#[derive(Debug)]
pub(crate) struct NewDeadLetter {
    pub(crate) recipient: Arc<Recipient>,
    pub(crate) message: HubMessage,
    pub(crate) reason: Reason,
    pub(crate) detail: String,
    pub(crate) attempts: u16,
    pub(crate) at: DateTime<Utc>,
}

/// A subscriber whose breaker has closed, to be reported.
#[derive(Debug)]
pub(crate) struct Recovery {
    pub(crate) recipient: Arc<Recipient>,
    /// When the first of the failures happened, as far as this dispatcher knows.
    pub(crate) failing_since: Option<DateTime<Utc>>,
    pub(crate) at: DateTime<Utc>,
}

/// The database row of a detached lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LaneRow {
    /// The next message of the lane, or the last completed one while the next is not read yet. All earlier ones of the lane
    /// have a final outcome.
    pub(crate) head: i64,
    pub(crate) lane: Option<Arc<str>>,
    pub(crate) attempts: u16,
    /// None: the lane is blocked.
    pub(crate) next_at: Option<DateTime<Utc>>,
    /// The head is a dead letter that an operator retries.
    pub(crate) manual_retry: bool,
}

/// The changes of many subscriber queues, saved in one transaction.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) dead_letters: Vec<NewDeadLetter>,
    /// Subscriber and new position.
    pub(crate) positions: Vec<(Uuid, i64)>,
    /// Lane rows to delete: subscriber and head.
    pub(crate) deleted_lanes: Vec<(Uuid, i64)>,
    pub(crate) saved_lanes: Vec<(Uuid, LaneRow)>,
    /// Subscribers to switch off, each with the version that answered and the status.
    pub(crate) gone_subscribers: Vec<(Uuid, i64, u16)>,
    /// Ids of operator commands that were executed.
    pub(crate) executed_commands: Vec<i64>,
    /// Dead letters, by subscriber and message, whose retry came too late and did not happen.
    pub(crate) rejected_retries: Vec<(Uuid, i64)>,
    pub(crate) recoveries: Vec<Recovery>,
    pub(crate) health: Vec<HealthMinute>,
    pub(crate) states: Vec<SubscriberState>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        // Exhaustive, so that a new field cannot be left out.
        let Changes {
            attempts,
            dead_letters,
            positions,
            deleted_lanes,
            saved_lanes,
            gone_subscribers,
            executed_commands,
            rejected_retries,
            recoveries,
            health,
            states,
        } = self;
        attempts.is_empty()
            && dead_letters.is_empty()
            && positions.is_empty()
            && deleted_lanes.is_empty()
            && saved_lanes.is_empty()
            && gone_subscribers.is_empty()
            && executed_commands.is_empty()
            && rejected_retries.is_empty()
            && recoveries.is_empty()
            && health.is_empty()
            && states.is_empty()
    }
}

/// The stored state of one subscriber's deliveries, from which a subscriber queue starts.
#[derive(Debug, Default)]
pub(crate) struct StoredState {
    pub(crate) position: i64,
    /// Each detached lane with its first message that has no final outcome.
    pub(crate) lanes: Vec<(LaneRow, i64)>,
    /// Messages beyond the position that have a final outcome.
    pub(crate) completed: HashSet<i64>,
}

/// The result of a poll for new messages.
#[derive(Debug)]
pub(crate) struct NewMessages {
    pub(crate) directory_version: DirectoryVersion,
    pub(crate) newest: i64,
    /// Subscribers with new messages or new commands.
    pub(crate) subscribers: HashSet<Uuid>,
    /// Those of them that may have new commands.
    pub(crate) commanded: HashSet<Uuid>,
}

/// What the dispatcher reads in one round trip for many subscriber queues.
#[derive(Debug, Default, Clone)]
pub(crate) struct ReadRequest {
    pub(crate) queues: Vec<QueueReadRequest>,
    pub(crate) lanes: Vec<(Uuid, LaneReadRequest)>,
    /// Subscribers whose commands are read.
    pub(crate) commands: Vec<Uuid>,
}

/// A request for the next messages of a subscriber, of all its lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueReadRequest {
    pub(crate) subscriber: Uuid,
    pub(crate) after: i64,
    pub(crate) limit: usize,
}

/// A request for the messages of a detached lane with numbers above `after`, up to and including `to`.
#[derive(Debug, Clone)]
pub(crate) struct LaneReadRequest {
    pub(crate) key: LaneKey,
    pub(crate) after: i64,
    pub(crate) to: i64,
    pub(crate) limit: usize,
    /// The head of the lane, if it is a dead letter that an operator retries.
    pub(crate) retried_head: Option<i64>,
}

impl ReadRequest {
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.lanes.is_empty() && self.commands.is_empty()
    }
}

/// The answer to a [`ReadRequest`]. Messages are in the order of their numbers.
#[derive(Debug, Default)]
pub(crate) struct ReadResult {
    /// The incarnation of the database that the messages belong to. None if there are no messages.
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) queues: HashMap<Uuid, Vec<HubMessage>>,
    pub(crate) lanes: HashMap<(Uuid, LaneKey), Vec<HubMessage>>,
    pub(crate) commands: Vec<(Uuid, PendingCommand)>,
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

#[cfg(test)]
mod tests {
    use kit::secret::Secret;

    use super::*;
    use crate::client_identity::fixtures::pair;
    use crate::domain::{ClientCertificate, OAuth2Credentials, SubscriberSettings};

    fn recipient_with(auth: Option<EndpointAuth>) -> Result<Recipient, String> {
        let now = DateTime::UNIX_EPOCH;
        let settings = SubscriberSettings {
            name: "a".to_owned(),
            url: "https://example.com/hook".to_owned(),
            event_types: Vec::new(),
            filter: None,
            ordering_key: None,
            retry_backoff_seconds: Vec::new(),
            retry_rules: RetryRules::default(),
            on_exhausted: OnExhausted::Skip,
            timeout_ms: 1_000,
            max_in_flight: 1,
            rate_limit_per_second: None,
            headers: Vec::new(),
            auth,
            format: Format::Raw,
            batch: None,
            verify_endpoint: false,
            is_active: true,
        };
        let subscriber = Subscriber {
            id: Uuid::now_v7(),
            tenant: "main".parse().unwrap(),
            version: 1,
            settings,
            paused_at: None,
            unverified_since: None,
            inactive_reason: None,
            created_at: now,
            updated_at: now,
        };
        Recipient::new(subscriber, Vec::new())
    }

    #[test]
    fn requests_have_the_credentials_of_their_subscriber() {
        let plain = recipient_with(None).unwrap();
        assert!(plain.token_source.is_none() && plain.target.identity().is_none());
        let oauth2 = EndpointAuth::Oauth2(OAuth2Credentials {
            token_url: "https://id.example/".to_owned(),
            client_id: "a".to_owned(),
            client_secret: Secret::new("b".to_owned()),
            scope: None,
            audience: None,
        });
        assert!(recipient_with(Some(oauth2)).unwrap().token_source.is_some());
        // Expired: the endpoint decides about it.
        let (certificate, private_key) = pair((2000, 2001));
        let pair = ClientCertificate { certificate, private_key: Secret::new(private_key) };
        let of = || recipient_with(Some(EndpointAuth::Mtls(pair.clone()))).unwrap().target;
        let (one, other) = (of(), of());
        assert!(one.identity().is_some() && one.connection_key() != other.connection_key());
        assert!(one.connection_key() != plain.target.connection_key() && one.origin() == plain.target.origin());
        let damaged = ClientCertificate { certificate: String::new(), ..pair };
        assert!(recipient_with(Some(EndpointAuth::Mtls(damaged))).unwrap_err().contains("auth"));
    }
}
