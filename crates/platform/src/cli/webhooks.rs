//! `send`: posts an event by hand.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use clap::Args;
use hub::address::{AllowedNetworks, Network};
use hub::client::{Client, ClientSettings, WebhookRequest};
use hub::target::Target;
use kit::secret::Secret;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::Failure;
use super::api::local_address;
use super::table::print_line;
use crate::settings::Settings;

/// Timeout of the request of `send`.
const SEND_TIME_MAX: Duration = Duration::from_secs(30);

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
pub(super) struct Send {
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
    /// The address of the server [default: the server of the data folder, or the setting listen]
    #[arg(long, value_name = "URL")]
    pub(super) server: Option<String>,
    /// The API key [default: the setting admin_key]. Better as a variable: other users can see the arguments of a process
    #[arg(long, value_name = "KEY", env = "PILLARBOX_API_KEY", hide_env_values = true)]
    pub(super) api_key: Option<String>,
}

/// Posts an event over HTTP, as a producer does. Fails if an argument is invalid, there is no API key, or the server does not
/// accept the event.
pub(super) async fn send(settings: &Settings, send: Send) -> Result<(), Failure> {
    let payload: Box<RawValue> = serde_json::from_str(&send.payload)
        .map_err(|error| Failure::Other(format!("the payload is not JSON: {error}")))?;
    let server = match send.server {
        Some(server) => server,
        None => local_address(settings)?,
    };
    let target = Target::parse(&format!("{}/hub/v1/events", server.trim_end_matches('/')), false)
        .map_err(|error| Failure::Other(format!("--server {error}")))?;
    let key = send.api_key.map(Secret::new).or_else(|| settings.admin_key.clone());
    let key = key.ok_or_else(|| {
        Failure::Other(
            "an API key is required: set PILLARBOX_API_KEY (create one with `pillarbox key create --role ingest`)"
                .to_owned(),
        )
    })?;
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::AUTHORIZATION, header_value("the API key", &format!("Bearer {}", key.reveal()))?);
    if let Some(key) = &send.idempotency_key {
        headers.insert("idempotency-key", header_value("--idempotency-key", key)?);
    }
    let event = NewEvent { event_type: &send.event_type, payload: &payload, ordering_key: send.key.as_deref() };
    let body = serde_json::to_vec(&event).map_err(|error| Failure::Other(format!("the event is not JSON: {error}")))?;
    let client = client_for_any_server()?;
    let request = WebhookRequest { target: &target, headers, body: body.into(), timeout: SEND_TIME_MAX };
    let sent = client.post(request).await;
    let response = sent.map_err(|failure| {
        Failure::Other(format!(
            "{server}: {failure}. Is it running? Start it with `pillarbox up`, or give another address with --server URL"
        ))
    })?;
    match response.status {
        StatusCode::ACCEPTED => Ok(print_line(&response.excerpt)?),
        status => Err(Failure::Other(format!("{server} responded with {status}: {}", problem_text(&response.excerpt)))),
    }
}

/// The guard against private addresses is for subscribers; the user of a command may send to any server.
pub(super) fn client_for_any_server() -> Result<Client, Failure> {
    let anywhere = ["0.0.0.0/0", "::/0"].into_iter().filter_map(|network| network.parse::<Network>().ok());
    let settings = ClientSettings { allowed_networks: AllowedNetworks::new(anywhere), ..ClientSettings::default() };
    Client::new(settings).map_err(Failure::Other)
}

/// The detail and the field errors of a problem document; any other response unchanged.
pub(super) fn problem_text(response: &str) -> String {
    let problem: Value = serde_json::from_str(response).unwrap_or_default();
    let Some(detail) = problem["detail"].as_str() else { return response.to_owned() };
    let fields = problem["errors"].as_array().into_iter().flatten();
    let field = |error: &Value| Some(format!("; {}: {}", error["pointer"].as_str()?, error["detail"].as_str()?));
    fields.filter_map(field).fold(detail.to_owned(), |text, field| text + &field)
}

fn header_value(flag: &str, text: &str) -> Result<HeaderValue, Failure> {
    let mut value = HeaderValue::from_str(text)
        .map_err(|_| Failure::Other(format!("{flag} must be printable ASCII characters")))?;
    value.set_sensitive(true);
    Ok(value)
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
