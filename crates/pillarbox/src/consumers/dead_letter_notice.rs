//! The message that is posted when a message becomes a dead letter after its retries, under the topic
//! `dead_letter.<consumer>`. None is posted for messages that are given up because an operator drops their consumer or
//! runs `pillarbox recover --skip`.

use chrono::{DateTime, Utc};
use runtime::json::is_too_deep;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use sqlx::{Postgres, Transaction};

use crate::log::{AggregateId, MESSAGE_BYTES_MAX, Message, Post, PostError, Source, Tenant, post};

/// The source of messages that the library itself posts.
const SOURCE: Source = Source::new("pillarbox");

/// Returns the topic of a consumer's notices. Every character that a topic does not allow is replaced with `_`.
pub(crate) fn topic_of(consumer: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '.';
    let words: String = consumer.chars().map(|c| if is_allowed(c) { c } else { '_' }).collect();
    format!("dead_letter.{words}")
}

/// Posts that a message was given up.
pub(crate) async fn post_notice(
    tx: &mut Transaction<'_, Postgres>,
    consumer: &str,
    message: &Message,
    attempts: i32,
    error: &str,
) -> sqlx::Result<()> {
    // The notice belongs to the tenant `main`, so it does not contain the payload of another tenant.
    let payload = Some(message.shown_payload()).filter(|_| message.tenant == Tenant::main().as_str());
    let notice = [payload.as_deref(), None].into_iter().find_map(|payload| {
        let notice = DeadLetterNotice {
            consumer,
            attempts,
            error,
            event_id: format!("evt_{}", message.message_id),
            event_type: &message.topic,
            timestamp: message.at,
            aggregate_type: message.aggregate_type.as_deref(),
            aggregate_id: message.aggregate_id.as_ref(),
            payload,
        };
        // A notice that is too large, or nested too deeply, is posted without the payload.
        let fits = |text: &str| text.len() <= MESSAGE_BYTES_MAX && !is_too_deep(text);
        to_raw_value(&notice).ok().filter(|text| fits(text.get()))
    });
    let Some(notice) = notice else {
        tracing::warn!(
            consumer, message_id = %message.message_id, "the notice of a dead letter is too large, so it is not posted"
        );
        return Ok(());
    };
    match post(tx, &SOURCE, &Post::new(topic_of(consumer), notice)).await {
        Ok(_) => Ok(()),
        Err(PostError::Database(error)) => Err(error),
        Err(error) => {
            tracing::warn!(consumer, %error, "the notice of a dead letter could not be posted");
            Ok(())
        }
    }
}

#[derive(Serialize)]
struct DeadLetterNotice<'a> {
    consumer: &'a str,
    attempts: i32,
    error: &'a str,
    /// `evt_<uuid>`: the id of the message, as it is shown outside of the database.
    event_id: String,
    event_type: &'a str,
    timestamp: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<&'a AggregateId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a RawValue>,
}
