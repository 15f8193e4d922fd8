//! Requests of other services: an e-mail is rendered and recorded; everything about a deleted account is deleted.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::email::EmailRequested;
use contracts::identity::AccountDeleted;
use pillarbox::database::time;
use pillarbox::log::Tenant;
use pillarbox::log::{Message, blank_key};
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::address;
use crate::domain::{NewMail, Status};
use crate::error::RequestError;
use crate::store;
use crate::templates::Templates;

const IDEMPOTENCY_KEY_CHARS_MAX: usize = 255;

/// Turns requests into e-mails.
pub(crate) struct Recorder {
    pub(crate) templates: Templates,
    /// The status of a new e-mail: queued, captured or shadowed.
    pub(crate) status: Status,
    /// How long an e-mail is retried.
    pub(crate) retry_time: TimeDelta,
}

/// Renders and records the requested e-mails. Fails with the first request that is invalid.
pub(crate) async fn record(
    tx: &mut Transaction<'static, Postgres>,
    recorder: &Recorder,
    messages: &[&Message],
) -> Result<(), RequestError> {
    let now = time::now(tx).await?;
    let mut mails = Vec::with_capacity(messages.len());
    for message in messages {
        if let Some(request) = parse(message)? {
            mails.push(recorder.new_mail(message, request, now)?);
        }
    }
    Ok(store::insert(tx, &mails).await?)
}

/// Deletes everything about the accounts that the messages are about, and blanks the requests for e-mails to them.
pub(crate) async fn delete_accounts(
    tx: &mut Transaction<'static, Postgres>,
    messages: &[&Message],
) -> Result<(), RequestError> {
    let parse = |message: &&Message| serde_json::from_str::<AccountDeleted>(message.payload.get());
    let deleted: Result<Vec<AccountDeleted>, _> = messages.iter().map(parse).collect();
    let users: Vec<Uuid> =
        deleted.map_err(|_| RequestError::NoAccount)?.into_iter().map(|deleted| deleted.user_id).collect();
    // Identity has blanked its own log. With a broker, this database has a separate log, with copies of the requests.
    for user in &users {
        blank_key(tx, &Tenant::main(), &user.to_string(), "the account was deleted").await?;
    }
    Ok(store::accounts::delete_accounts(tx, &users).await?)
}

impl Recorder {
    fn new_mail(
        &self,
        message: &Message,
        request: EmailRequested,
        now: DateTime<Utc>,
    ) -> Result<NewMail, RequestError> {
        let EmailRequested { idempotency_key, user_id, expires_at, data } = request;
        if !(1..=IDEMPOTENCY_KEY_CHARS_MAX).contains(&idempotency_key.chars().count()) {
            return Err(RequestError::IdempotencyKey);
        }
        let recipient = address::parse(&data.to)?.to_string();
        let sender = user_id.map_or_else(|| recipient.clone(), |user| user.to_string());
        let content = self.templates.render(&data.template, &data.locale, &data.variables)?;
        let is_expired = expires_at.is_some_and(|expires_at| expires_at <= now);
        Ok(NewMail {
            message_id: message.message_id,
            source: message.source.clone(),
            idempotency_key,
            user_id,
            recipient,
            template: data.template,
            content,
            unsubscribe: None,
            sender,
            status: if is_expired { Status::Expired } else { self.status },
            created_at: now,
            give_up_at: now + self.retry_time,
            expires_at,
        })
    }
}

/// Parses a request. Returns None if its payload was blanked: there is nothing to send any more.
fn parse(message: &Message) -> Result<Option<EmailRequested>, RequestError> {
    if message.is_blanked() {
        return Ok(None);
    }
    // The parser's error may quote a value, which may be a secret.
    serde_json::from_str(message.payload.get()).map(Some).map_err(|_| RequestError::NoRequest)
}

#[cfg(test)]
mod tests {
    use pillarbox::log::BLANKED;
    use serde_json::value::RawValue;

    use super::*;

    fn message(headers: &str, payload: &str) -> Message {
        Message {
            id: 1,
            shard: 0,
            message_id: Uuid::nil(),
            source: "identity".to_owned(),
            tenant: "main".to_owned(),
            topic: "email.verification.requested".to_owned(),
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            headers: RawValue::from_string(headers.to_owned()).unwrap(),
            payload: RawValue::from_string(payload.to_owned()).unwrap(),
            at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn only_a_blanked_request_is_skipped_and_any_other_payload_is_an_error_without_its_content() {
        let confidential = r#"{"confidential_until": "2026-01-31T08:00:00Z"}"#;
        assert!(parse(&message(confidential, BLANKED)).unwrap().is_none());
        for headers in [confidential, "{}"] {
            for invalid in [
                "null",
                "{}",
                "7",
                "[]",
                r#""hunter2""#,
                r#"{"redacted":true}"#,
                r#"{"data": null}"#,
                r#"{"idempotency_key": 1, "data": "hunter2"}"#,
            ] {
                let error = parse(&message(headers, invalid)).unwrap_err().to_string();
                assert!(error.contains("idempotency_key") && !error.contains("hunter2"), "{error}");
            }
        }
        parse(&message("{}", BLANKED)).unwrap_err();
    }
}
