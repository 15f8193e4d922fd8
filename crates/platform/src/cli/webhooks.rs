//! `send` and `listen`: try webhooks by hand.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use chrono::{SecondsFormat, Utc};
use clap::Args;
use hub::address::{AllowedNetworks, Network};
use hub::client::{Client, ClientSettings, WebhookRequest};
use hub::signature::Verifier;
use hub::target::Target;
use kit::secret::Secret;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use tokio::net::TcpListener;

use super::Failure;
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

/// A line that `listen` prints for a webhook.
#[derive(Serialize)]
struct ReceivedLine<'a> {
    at: String,
    id: Option<&'a str>,
    #[serde(rename = "type")]
    event_type: Option<&'a str>,
    lane: Option<&'a str>,
    seq: Option<&'a str>,
    signature: String,
    /// JSON byte for byte as it arrived; anything else as a string.
    body: &'a RawValue,
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
    /// The address of the server [default: the setting listen]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// The API key [default: the setting admin_key]. Better as a variable: other users can see the arguments of a process
    #[arg(long, value_name = "KEY", env = "PILLARBOX_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

#[derive(Args)]
pub(super) struct Listen {
    /// The port on this machine; 0 selects a free port
    #[arg(long, default_value_t = 9000)]
    port: u16,
    /// The subscriber's secret (whsec_… or whpk_…); requests without a valid signature are refused. Better as a variable:
    /// other users can see the arguments of a process
    #[arg(long, value_name = "SECRET", env = "PILLARBOX_WEBHOOK_SECRET", hide_env_values = true)]
    secret: Option<String>,
    /// The status code of the responses
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(200..=599))]
    status: u16,
    /// Stop after this number of requests
    #[arg(long, value_name = "COUNT")]
    count: Option<usize>,
}

/// Posts an event over HTTP, as a producer does. Fails if an argument is invalid, there is no API key, or the server does not
/// accept the event.
pub(super) async fn send(settings: &Settings, send: Send) -> Result<(), Failure> {
    let payload: Box<RawValue> = serde_json::from_str(&send.payload)
        .map_err(|error| Failure::Other(format!("the payload is not JSON: {error}")))?;
    let server = send.server.unwrap_or_else(|| format!("http://{}", settings.listen));
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
    // The guard against private addresses is for subscribers; the user may send to any server.
    let anywhere = ["0.0.0.0/0", "::/0"].into_iter().filter_map(|network| network.parse::<Network>().ok());
    let client =
        Client::new(ClientSettings { allowed_networks: AllowedNetworks::new(anywhere), ..ClientSettings::default() });
    let client = client.map_err(Failure::Other)?;
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

/// The state of the webhook endpoint.
struct Endpoint {
    verifier: Option<Verifier>,
    status: StatusCode,
    received: tokio::sync::mpsc::Sender<()>,
}

/// Prints the received webhooks as lines of JSON until it is stopped. Fails if the secret is invalid or the port is in use.
pub(super) async fn listen(listen: Listen) -> Result<(), Failure> {
    let verifier = listen.secret.as_deref().map(Verifier::parse).transpose();
    let verifier = verifier.map_err(|_| {
        Failure::Other(
            "--secret or PILLARBOX_WEBHOOK_SECRET must be the subscriber's secret as it was shown: whsec_… or whpk_… followed by base64".to_owned(),
        )
    })?;
    let listener = TcpListener::bind(("127.0.0.1", listen.port))
        .await
        .map_err(|error| Failure::Other(format!("port {}: {error}; choose another with --port", listen.port)))?;
    let address = listener
        .local_addr()
        .map_err(|error| Failure::Other(format!("the address of the listener cannot be determined: {error}")))?;
    eprintln!("Listening on http://{address}. Create a subscriber with this url. Press Ctrl-C to stop.");
    if verifier.is_none() {
        eprintln!("Signatures are not verified; set PILLARBOX_WEBHOOK_SECRET to the subscriber's secret.");
    }
    let status = StatusCode::from_u16(listen.status).unwrap_or(StatusCode::OK);
    let (received, mut requests) = tokio::sync::mpsc::channel(1);
    let router = Router::new().fallback(receive).with_state(Arc::new(Endpoint { verifier, status, received }));
    let limit_reached = async {
        match listen.count {
            Some(count) => {
                for _ in 0..count {
                    requests.recv().await;
                }
            }
            None => while requests.recv().await.is_some() {},
        }
    };
    tokio::select! {
        served = async { axum::serve(listener, router).await } => {
            served.map_err(|error| Failure::Other(format!("cannot receive webhooks: {error}")))?;
        }
        () = limit_reached => {}
        stopped = tokio::signal::ctrl_c() => {
            stopped.map_err(|error| Failure::Other(format!("cannot receive Ctrl-C: {error}")))?;
        }
    }
    Ok(())
}

async fn receive(State(endpoint): State<Arc<Endpoint>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let now = Utc::now();
    let verified = endpoint.verifier.as_ref().map(|verifier| verifier.verify(&headers, &body, now.timestamp()));
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let line = ReceivedLine {
        at: now.to_rfc3339_opts(SecondsFormat::Millis, true),
        id: text("webhook-id"),
        event_type: text("webhook-event-type"),
        lane: text("webhook-lane"),
        seq: text("webhook-seq"),
        signature: match &verified {
            None => "not verified".to_owned(),
            Some(Ok(())) => "good".to_owned(),
            Some(Err(error)) => format!("bad: {error}"),
        },
        body: &printable_body(&body),
    };
    let printed = serde_json::to_string(&line).map_err(io::Error::from);
    let printed = printed.and_then(|line| writeln!(io::stdout(), "{line}"));
    let _ = endpoint.received.send(()).await;
    match (verified, printed) {
        (Some(Err(_)), _) => StatusCode::UNAUTHORIZED,
        (_, Err(_)) => StatusCode::INTERNAL_SERVER_ERROR,
        _ => endpoint.status,
    }
}

/// The body as JSON: unchanged if it is JSON, otherwise as a string.
fn printable_body(body: &[u8]) -> Box<RawValue> {
    serde_json::from_slice(body).or_else(|_| to_raw_value(&String::from_utf8_lossy(body))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers beyond 64 bits, repeated keys and white space.
    const PAYLOAD: &str = "{\"a\": 12345678901234567890.123,  \"a\":1.0, \"b\":[1e400,\n -0]}";

    #[test]
    fn a_payload_is_sent_and_printed_byte_for_byte() {
        let payload: Box<RawValue> = serde_json::from_str(PAYLOAD).unwrap();
        let event = NewEvent { event_type: "t", payload: &payload, ordering_key: None };
        let body = serde_json::to_string(&event).unwrap();
        assert_eq!(body, format!(r#"{{"event_type":"t","payload":{PAYLOAD}}}"#));
        assert_eq!(printable_body(PAYLOAD.as_bytes()).get(), PAYLOAD);
        assert_eq!(printable_body(b"not JSON \xff").get(), "\"not JSON \u{fffd}\"");
    }
}
