//! Requests for e-mails, posted in the transaction of what they are about.

use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use contracts::email::{Email, EmailRequested};
use contracts::identity::{
    EMAIL_ACCOUNT_EXISTS, EMAIL_PASSWORD_CHANGED, EMAIL_PASSWORD_RESET_REQUESTED, EMAIL_VERIFICATION_REQUESTED, SOURCE,
};
use pillarbox::log::{Post, Source, post};
use serde_json::value::to_raw_value;
use uuid::Uuid;

use super::Tx;
use crate::Identity;
use crate::domain::{Account, TokenKind};
use crate::error::Error;
use crate::secrets::NewToken;
use crate::store::one_time_token;

pub(super) const MESSAGE_SOURCE: Source = Source::new(SOURCE);
/// How long an e-mail without a token is worth sending.
const NOTICE_TIME: TimeDelta = TimeDelta::hours(24);

/// An e-mail about something that has happened to an account.
#[derive(Debug, Clone, Copy)]
pub(super) enum Notice {
    /// There was an attempt to register the address again.
    AccountExists,
    PasswordChanged,
}

/// Creates a token, which replaces the previous one of its kind, and requests the e-mail with it.
pub(super) async fn send_token(
    identity: &Identity,
    tx: &mut Tx<'_>,
    account: &Account,
    kind: TokenKind,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let (topic, template, page, hours) = match kind {
        TokenKind::Verification => {
            (EMAIL_VERIFICATION_REQUESTED, "verification", "verify", identity.settings.verification_hours)
        }
        TokenKind::PasswordReset => {
            (EMAIL_PASSWORD_RESET_REQUESTED, "password_reset", "reset-password", identity.settings.password_reset_hours)
        }
    };
    let (token, expires_at) = (NewToken::generate(), now + TimeDelta::hours(i64::from(hours)));
    one_time_token::insert(tx, account.id, kind, &token.digest, expires_at).await?;
    let mut variables = BTreeMap::from([
        ("token".to_owned(), token.text.reveal().clone()),
        ("expires_in_hours".to_owned(), hours.to_string()),
    ]);
    if let Some(address) = &identity.public_url {
        variables.insert("link".to_owned(), format!("{address}/{page}?token={}", token.text.reveal()));
    }
    request(tx, account, topic, template, variables, expires_at).await
}

/// Requests an e-mail without a token.
pub(super) async fn send_notice(
    tx: &mut Tx<'_>,
    account: &Account,
    notice: Notice,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let (topic, template) = match notice {
        Notice::AccountExists => (EMAIL_ACCOUNT_EXISTS, "account_exists"),
        Notice::PasswordChanged => (EMAIL_PASSWORD_CHANGED, "password_changed"),
    };
    request(tx, account, topic, template, BTreeMap::new(), now + NOTICE_TIME).await
}

async fn request(
    tx: &mut Tx<'_>,
    account: &Account,
    topic: &str,
    template: &str,
    mut variables: BTreeMap<String, String>,
    expires_at: DateTime<Utc>,
) -> Result<(), Error> {
    variables.insert("name".to_owned(), account.name.clone());
    let payload = EmailRequested {
        idempotency_key: Uuid::now_v7().to_string(),
        user_id: Some(account.id),
        expires_at: Some(expires_at),
        data: Email {
            to: account.email.clone(),
            template: template.to_owned(),
            variables,
            locale: account.locale.clone(),
        },
    };
    let message = Post::new(topic, to_raw_value(&payload)?).with_key(account.id.to_string());
    post(tx, &MESSAGE_SOURCE, &message.confidential_until(expires_at)).await?;
    Ok(())
}
