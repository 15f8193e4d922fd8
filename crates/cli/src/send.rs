//! `send`: posts an event by hand.

use clap::Args;
use http::Method;
use pillarbox::log::Tenant;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::table::print_line;

/// The request body of `send`. The payload is embedded byte for byte: a JSON value in between would change numbers that it
/// cannot represent, and drop repeated keys.
#[derive(Serialize)]
struct NewEvent<'a> {
    event_type: &'a str,
    payload: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<&'a str>,
}

#[derive(Args)]
pub struct Send {
    /// The type of the event, such as order.paid
    event_type: String,
    /// The payload: any JSON
    #[arg(default_value = "{}")]
    payload: String,
    /// The ordering key; events with the same key are delivered in order
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// A repeated request with the same idempotency key has no further effect
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// The tenant
    #[arg(long, value_name = "NAME", default_value = "main")]
    pub tenant: Tenant,
    #[command(flatten)]
    pub server: ServerArgs,
}

/// Posts an event over HTTP, as a producer does. Fails if an argument is invalid, there is no API key, or the server does not
/// accept the event.
pub async fn run(api: &Api, send: Send) -> Result<(), Failure> {
    let payload: Box<RawValue> = serde_json::from_str(&send.payload)
        .map_err(|error| Failure::Other(format!("the payload is not JSON: {error}")))?;
    let event = NewEvent { event_type: &send.event_type, payload: &payload, ordering_key: send.key.as_deref() };
    let body = serde_json::to_string(&event);
    let body = body.map_err(|error| Failure::Other(format!("the event is not JSON: {error}")))?;
    let answer = api.send_text(Method::POST, "/hub/v1/events", Some(body), send.idempotency_key.as_deref()).await?;
    Ok(print_line(&String::from_utf8_lossy(&answer))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers beyond 64 bits, repeated keys and white space.
    const PAYLOAD: &str = "{\"a\": 12345678901234567890.123,  \"a\":1.0, \"b\":[1e400,\n -0]}";

    #[test]
    fn a_payload_is_sent_byte_for_byte() {
        let payload: Box<RawValue> = serde_json::from_str(PAYLOAD).unwrap();
        let event = NewEvent { event_type: "t", payload: &payload, ordering_key: None };
        let body = serde_json::to_string(&event).unwrap();
        assert_eq!(body, format!(r#"{{"event_type":"t","payload":{PAYLOAD}}}"#));
    }
}
