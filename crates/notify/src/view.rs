//! JSON of the responses.

use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;

use crate::domain::Status;
use crate::store::MailRecord;

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Mail)]
pub(crate) struct MailView {
    id: i64,
    #[schema(example = "ada@example.org")]
    to: String,
    subject: String,
    /// Present for captured e-mails only.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// Present for captured e-mails only.
    #[serde(skip_serializing_if = "Option::is_none")]
    html: Option<String>,
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

impl From<MailRecord> for MailView {
    fn from(mail: MailRecord) -> MailView {
        let shows_bodies = mail.status.shows_bodies();
        MailView {
            id: mail.id,
            to: mail.recipient,
            subject: mail.subject,
            text: mail.text.filter(|_| shows_bodies),
            html: mail.html.filter(|_| shows_bodies),
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
