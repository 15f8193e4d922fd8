//! JSON of the responses. Here: e-mails.

pub(crate) mod announcements;
pub(crate) mod inbox;
pub(crate) mod notifications;
pub(crate) mod preferences;

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;

use crate::compose::fixed_headers;
use crate::domain::Status;
use crate::store::{MailRecord, StoredContent};

/// The result of a bulk retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct BulkRetry {
    /// How many are due again.
    pub count: u64,
    /// There may be more: repeat the request.
    pub more: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Email)]
pub(crate) struct MailView {
    id: i64,
    #[schema(example = "ada@example.org")]
    to: String,
    subject: String,
    #[serde(flatten)]
    captured: CapturedContent,
    status: Status,
    #[schema(example = "verification")]
    template: String,
    /// The locale of the template, which may be a fallback.
    #[schema(example = "en")]
    locale: String,
    /// How often the mail server has seen it since it was requested or last retried by an operator.
    attempts: i32,
    /// Why the last attempt failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    /// The reply of the mail server that accepted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    smtp_reply: Option<String>,
    /// Present while it is queued.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_attempt_at: Option<DateTime<Utc>>,
    /// From this time on it is not sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<DateTime<Utc>>,
    created_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sent_at: Option<DateTime<Utc>>,
}

/// The content as the recipient would read it. Present for captured e-mails only.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct CapturedContent {
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    html: Option<String>,
    /// The headers that do not depend on the sender, such as `List-Unsubscribe`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = json!({"Auto-Submitted": "auto-generated"}))]
    headers: Option<BTreeMap<String, String>>,
}

impl From<StoredContent> for CapturedContent {
    fn from(StoredContent { text, html, unsubscribe }: StoredContent) -> CapturedContent {
        let headers =
            fixed_headers(unsubscribe.as_deref()).into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        CapturedContent { text, html, headers: Some(headers) }
    }
}

impl From<MailRecord> for MailView {
    fn from(mail: MailRecord) -> MailView {
        let captured = Some(mail.content).filter(|_| mail.status.shows_bodies());
        MailView {
            id: mail.id,
            to: mail.recipient,
            subject: mail.subject,
            captured: captured.map(CapturedContent::from).unwrap_or_default(),
            status: mail.status,
            template: mail.template,
            locale: mail.locale,
            attempts: mail.attempts,
            last_error: mail.last_error,
            smtp_reply: mail.smtp_reply,
            next_attempt_at: Some(mail.next_attempt_at).filter(|_| mail.status == Status::Queued),
            expires_at: mail.expires_at,
            created_at: mail.created_at,
            sent_at: mail.sent_at,
        }
    }
}
