//! Requests to send an e-mail. Identity posts them to the topics `email.*`, and the mail part of notify sends them.
//!
//! They contain personal data and secrets, such as the token of a verification. They are posted as confidential messages:
//! see `pillarbox::log::Post::confidential_until`.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A request to send one e-mail.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EmailRequested {
    /// The same for all requests that must lead to one e-mail only.
    pub idempotency_key: String,
    /// The user that the e-mail is for. When the account is deleted, so is every record of the e-mail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<Uuid>,
    /// From this time on the e-mail is of no use and is not sent, for example because its token has expired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<DateTime<Utc>>,
    pub data: Email,
}

/// The e-mail itself. Its JSON is the whole body of a message on the old exchange `smtp_send_email_exc`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Email {
    pub to: String,
    /// The name of the template, such as `verification`.
    pub template: String,
    /// The values that the template uses.
    pub variables: BTreeMap<String, String>,
    /// The language of the recipient, such as `en` or `pt-BR`.
    pub locale: String,
}
