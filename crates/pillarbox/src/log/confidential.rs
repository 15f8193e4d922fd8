//! Confidential messages: payloads with secrets or personal data, such as the token in an e-mail.
//!
//! A message is confidential if it was posted with [`Post::confidential_until`](super::Post::confidential_until), or if its
//! topic is `email` or below it, whichever source posted it. Only its consumers get its payload: views show a marker
//! instead, and error texts lose the parts that they have in common with it. A payload that was posted with an expiry is
//! also *blanked*, which means replaced in the database, when every consumer has processed the message
//! (`operations/confidential.rs`), when it expires, or when its key is blanked ([`blank_key`]).

use std::collections::HashSet;

use super::tenants::Tenant;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use sqlx::PgConnection;

use super::message::Message;

/// The payload of a blanked message. A consumer that reads it later, for example in a replay, gets this.
pub const BLANKED: &str = r#"{"blanked":true}"#;
/// What views show instead of a confidential payload.
pub const REDACTED: &str = r#"{"redacted":true}"#;
/// The header of a message in the log that marks it as confidential; its value is the expiry.
pub(super) const HEADER: &str = "confidential_until";
/// The same as it appears in the JSON of the headers.
const QUOTED_HEADER: &str = r#""confidential_until""#;
/// Messages with this topic, and with topics below it, are confidential.
const EMAIL: &str = "email";
/// A text that a confidential payload has in common with an error is hidden if it has this many bytes.
const PART_BYTES: usize = 6;
/// A shorter value of the payload is hidden as a whole, down to this many bytes. Values below it, such as `en`, are in any text.
const VALUE_BYTES_MIN: usize = 3;
const HIDDEN: &str = "***";

/// Whether the messages of a topic are confidential, whichever source posts them.
pub fn is_confidential_topic(topic: &str) -> bool {
    topic.split('.').next() == Some(EMAIL)
}

impl Message {
    /// Whether only consumers may see the payload.
    pub fn is_confidential(&self) -> bool {
        is_confidential_topic(&self.topic) || self.has_confidential_header()
    }

    /// When the payload expires; None if it was posted without an expiry.
    pub fn confidential_until(&self) -> Option<DateTime<Utc>> {
        #[derive(Deserialize)]
        struct Headers {
            confidential_until: DateTime<Utc>,
        }
        // Most messages have no such header, and need not be parsed.
        let headers = self.has_confidential_header().then(|| serde_json::from_str::<Headers>(self.headers.get()));
        headers?.ok().map(|headers| headers.confidential_until)
    }

    /// Whether the payload was blanked. A handler must skip such a message: what it was about is gone.
    pub fn is_blanked(&self) -> bool {
        self.payload.get() == BLANKED && self.has_confidential_header()
    }

    /// The payload as operators see it: [`REDACTED`] if it is confidential.
    pub fn shown_payload(&self) -> Box<RawValue> {
        if !self.is_confidential() || self.is_blanked() {
            return self.payload.clone();
        }
        RawValue::from_string(REDACTED.to_owned()).unwrap_or_else(|_| RawValue::NULL.to_owned())
    }

    /// The text without the parts that it has in common with a confidential payload. For errors, which may quote it.
    pub(crate) fn hide_payload_in(&self, text: String) -> String {
        if self.is_confidential() { hide(&text, self.payload.get()) } else { text }
    }

    fn has_confidential_header(&self) -> bool {
        self.headers.get().contains(QUOTED_HEADER)
    }
}

/// Blanks all confidential messages of a key at once, with their parked copies and dead letters; for an account that is
/// deleted, in the same transaction. Consumers that have not processed them yet do not get their payloads any more; their
/// status is `discarded` with this reason. Returns the number of messages.
pub async fn blank_key(tx: &mut PgConnection, tenant: &Tenant, key: &str, reason: &str) -> sqlx::Result<u64> {
    let query = "select log_id from pillarbox.confidential where tenant = $1 and key = $2 order by log_id for update";
    let ids: Vec<i64> = sqlx::query_scalar(query).bind(tenant.as_str()).bind(key).fetch_all(&mut *tx).await?;
    blank(tx, &ids, Some(reason)).await?;
    Ok(ids.len() as u64)
}

/// Blanks these messages of the log, and their copies. With a reason, records the consumers that have not processed them.
pub(crate) async fn blank(tx: &mut PgConnection, ids: &[i64], reason: Option<&str>) -> sqlx::Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let query = "select pillarbox.blank_confidential($1, $2)";
    sqlx::query(query).bind(ids).bind(reason).execute(tx).await.map(drop)
}

/// Replaces the parts of the text that are values of the payload, or parts of values.
fn hide(text: &str, payload: &str) -> String {
    let Ok(payload) = serde_json::from_str::<Value>(payload) else {
        // Nested too deeply for the parser. What it contains is unknown.
        return HIDDEN.to_owned();
    };
    let mut values = Vec::new();
    collect_values(&payload, &mut values);
    let parts: HashSet<&[u8]> = values.iter().flat_map(|value| value.as_bytes().windows(PART_BYTES)).collect();
    let mut is_hidden = vec![false; text.len()];
    for (at, part) in text.as_bytes().windows(PART_BYTES).enumerate() {
        if parts.contains(part) {
            is_hidden[at..at + PART_BYTES].fill(true);
        }
    }
    for value in values.iter().filter(|value| (VALUE_BYTES_MIN..PART_BYTES).contains(&value.len())) {
        for (at, found) in text.match_indices(value.as_str()) {
            is_hidden[at..at + found.len()].fill(true);
        }
    }
    let mut shown = String::with_capacity(text.len());
    let mut was_hidden = false;
    for (at, character) in text.char_indices() {
        let hides = is_hidden[at..at + character.len_utf8()].contains(&true);
        if !hides {
            shown.push(character);
        } else if !was_hidden {
            shown.push_str(HIDDEN);
        }
        was_hidden = is_hidden[at];
    }
    shown
}

/// Collects the texts and numbers of a payload, as they are and as JSON writes them, with its escapes.
fn collect_values(payload: &Value, values: &mut Vec<String>) {
    match payload {
        Value::Null | Value::Bool(_) => {}
        Value::Number(number) => values.push(number.to_string()),
        Value::String(text) => {
            let quoted = payload.to_string();
            values.push(quoted[1..quoted.len() - 1].to_owned());
            values.push(text.clone());
        }
        Value::Array(items) => items.iter().for_each(|item| collect_values(item, values)),
        Value::Object(fields) => fields.values().for_each(|field| collect_values(field, values)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(topic: &str, headers: &str, payload: &str) -> Message {
        Message {
            id: 1,
            shard: 0,
            message_id: uuid::Uuid::nil(),
            source: "identity".to_owned(),
            tenant: "main".to_owned(),
            topic: topic.to_owned(),
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            headers: RawValue::from_string(headers.to_owned()).unwrap(),
            payload: RawValue::from_string(payload.to_owned()).unwrap(),
            at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn the_header_and_the_topics_of_emails_make_a_message_confidential() {
        let until = r#"{"confidential_until": "2026-01-31T08:00:00Z", "traceparent": "x"}"#;
        for (topic, headers, expected) in [
            ("email", "{}", true),
            ("email.verification.requested", "{}", true),
            ("emails.sent", "{}", false),
            ("order.email", "{}", false),
            ("account.token", until, true),
            ("account.token", r#"{"traceparent": "x"}"#, false),
            ("account.token", r#"{"x": "\"confidential_until\""}"#, false),
        ] {
            let message = message(topic, headers, r#"{"token": "s3cret"}"#);
            assert_eq!(message.is_confidential(), expected, "{topic} {headers}");
            let shown = message.shown_payload();
            assert_eq!(shown.get().contains("s3cret"), !expected, "{topic} {headers}");
        }
        let expected = "2026-01-31T08:00:00Z".parse().ok();
        assert_eq!(message("a", until, "1").confidential_until(), expected);
        assert_eq!(message("email.a", "{}", "1").confidential_until(), None);
        assert!(message("a", until, BLANKED).is_blanked() && !message("a", "{}", BLANKED).is_blanked());
        assert_eq!(message("a", until, BLANKED).shown_payload().get(), BLANKED);
    }

    #[test]
    fn an_error_text_loses_what_it_quotes_of_a_confidential_payload() {
        let payload = r#"{"data": {"to": "ann@example.org", "locale": "en", "template": "verify",
                          "variables": {"code": "4711", "token": "tok-\u00e9\"1234567890", "n": 123456789}}}"#;
        let hide = |text: &str| message("email.a", "{}", payload).hide_payload_in(text.to_owned());
        for (text, expected) in [
            ("no route to host", "no route to host"),
            ("the variable `name` is missing", "the variable `name` is missing"),
            ("cannot send to ann@example.org: refused", "cannot send to ***: refused"),
            ("token tok-é\"1234567890 is too long", "token *** is too long"),
            (r#"token tok-é\"1234567890, code 4711"#, "token ***, code ***"),
            ("a part: 34567890...", "a part: ***..."),
            ("é 123456789 é", "é *** é"),
            ("ann@ex", "***"),
        ] {
            assert_eq!(hide(text), expected);
        }
        let ordinary = message("order.paid", "{}", payload).hide_payload_in("ann@example.org".to_owned());
        assert_eq!(ordinary, "ann@example.org");
        let deep = format!("{}{}", "[".repeat(1_000), "]".repeat(1_000));
        assert_eq!(message("email.a", "{}", &deep).hide_payload_in("anything".to_owned()), HIDDEN);
    }
}
