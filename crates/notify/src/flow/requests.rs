//! Requests of other services: an e-mail is rendered and recorded; the e-mails of a deleted account are deleted.

use chrono::{DateTime, TimeDelta, Utc};
use contracts::email::EmailRequested;
use contracts::identity::AccountDeleted;
use mailbox::database::time;
use mailbox::log::Message;
use serde_json::Value;
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
        if let Some(request) = parse(message.payload.get())? {
            mails.push(recorder.new_mail(message, request, now)?);
        }
    }
    Ok(store::insert(tx, &mails).await?)
}

/// Deletes every e-mail of the accounts that the messages are about.
pub(crate) async fn delete_accounts(
    tx: &mut Transaction<'static, Postgres>,
    messages: &[&Message],
) -> Result<(), RequestError> {
    let parse = |message: &&Message| serde_json::from_str::<AccountDeleted>(message.payload.get());
    let deleted: Result<Vec<AccountDeleted>, _> = messages.iter().map(parse).collect();
    let users: Vec<Uuid> =
        deleted.map_err(|_| RequestError::NoAccount)?.into_iter().map(|deleted| deleted.user_id).collect();
    Ok(store::delete_accounts(tx, &users).await?)
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
            status: if is_expired { Status::Expired } else { self.status },
            created_at: now,
            give_up_at: now + self.retry_time,
            expires_at,
        })
    }
}

/// Parses a request. Returns None if its payload was blanked after its time: there is nothing to send any more.
fn parse(payload: &str) -> Result<Option<EmailRequested>, RequestError> {
    // The parser's error may quote a value, which may be a secret.
    let payload: Value = serde_json::from_str(payload).map_err(|_| RequestError::NoRequest)?;
    let is_blanked = match &payload {
        Value::Null => true,
        Value::Object(fields) => !fields.contains_key("data"),
        _ => false,
    };
    if is_blanked {
        return Ok(None);
    }
    serde_json::from_value(payload).map(Some).map_err(|_| RequestError::NoRequest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blanked_payload_is_no_request_and_an_invalid_one_an_error_without_its_content() {
        for blanked in ["null", "{}", r#"{"redacted": true}"#] {
            assert!(parse(blanked).unwrap().is_none(), "{blanked}");
        }
        for invalid in ["7", "[]", r#""hunter2""#, r#"{"data": null}"#, r#"{"idempotency_key": 1, "data": "hunter2"}"#]
        {
            let error = parse(invalid).unwrap_err().to_string();
            assert!(error.contains("idempotency_key") && !error.contains("hunter2"), "{error}");
        }
    }
}
