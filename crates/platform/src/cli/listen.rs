//! `listen`: receives webhooks on this machine, and tells for each whether its signature and its order are right.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use chrono::{SecondsFormat, Utc};
use clap::Args;
use hub::client::{Client, WebhookRequest};
use hub::signature::Verifier;
use hub::target::Target;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use tokio::net::TcpListener;

use super::Failure;
use super::webhooks::client_for_any_server;

/// Timeout of a forwarded request: the longest time that a subscriber may allow for a response.
const FORWARD_TIME_MAX: Duration = Duration::from_secs(30);
/// Lanes whose last number is known. With more of them, all are forgotten, and the next webhook of each is its first one.
const LANES_MAX: usize = 100_000;
/// Headers that belong to one connection, or that the client sets itself.
const NOT_FORWARDED: [header::HeaderName; 4] =
    [header::HOST, header::CONTENT_LENGTH, header::CONNECTION, header::TRANSFER_ENCODING];

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
    /// Sends each webhook on to your program, with the same headers and the same body, and responds with its status
    #[arg(long, value_name = "URL", conflicts_with = "status")]
    forward: Option<String>,
    /// Stop after this number of requests
    #[arg(long, value_name = "COUNT")]
    count: Option<usize>,
}

/// A line that is printed for a webhook.
#[derive(Serialize)]
struct ReceivedLine<'a> {
    at: String,
    id: Option<&'a str>,
    #[serde(rename = "type")]
    event_type: Option<&'a str>,
    lane: Option<&'a str>,
    seq: Option<&'a str>,
    signature: String,
    order: String,
    /// The status of the response, which is that of the program to which the webhook was forwarded.
    status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// JSON byte for byte as it arrived; anything else as a string.
    body: &'a RawValue,
}

/// The state of the webhook endpoint.
struct Endpoint {
    verifier: Option<Verifier>,
    responder: Responder,
    order: Mutex<Order>,
    received: tokio::sync::mpsc::Sender<()>,
}

/// What decides about the response to a webhook with a valid signature.
enum Responder {
    Status(StatusCode),
    Forward(Box<Forward>),
}

/// The program that decides about responses.
struct Forward {
    client: Client,
    target: Target,
}

/// The number of the last webhook of each lane that was accepted.
#[derive(Default)]
struct Order {
    last: HashMap<String, u64>,
}

/// Prints the received webhooks as lines of JSON until it is stopped. Fails if the secret or the URL is invalid, or the port is
/// in use.
pub(super) async fn listen(listen: Listen) -> Result<(), Failure> {
    let verifier = listen.secret.as_deref().map(Verifier::parse).transpose();
    let verifier = verifier.map_err(|_| {
        Failure::Other(
            "--secret or PILLARBOX_WEBHOOK_SECRET must be the subscriber's secret as it was shown: whsec_… or whpk_… followed by base64".to_owned(),
        )
    })?;
    let responder = responder(&listen)?;
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
    let (received, mut requests) = tokio::sync::mpsc::channel(1);
    let endpoint = Arc::new(Endpoint { verifier, responder, order: Mutex::default(), received });
    let router = Router::new().fallback(receive).with_state(endpoint);
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

fn responder(listen: &Listen) -> Result<Responder, Failure> {
    let Some(url) = &listen.forward else {
        return Ok(Responder::Status(StatusCode::from_u16(listen.status).unwrap_or(StatusCode::OK)));
    };
    let target = Target::parse(url, false).map_err(|error| Failure::Other(format!("--forward {error}")))?;
    Ok(Responder::Forward(Box::new(Forward { client: client_for_any_server()?, target })))
}

async fn receive(State(endpoint): State<Arc<Endpoint>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let now = Utc::now();
    let verified = endpoint.verifier.as_ref().map(|verifier| verifier.verify(&headers, &body, now.timestamp()));
    let (status, error) = match &verified {
        Some(Err(_)) => (StatusCode::UNAUTHORIZED, None),
        Some(Ok(())) | None => endpoint.responder.respond(&headers, &body).await,
    };
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let (lane, seq) = (text("webhook-lane"), text("webhook-seq"));
    let order = endpoint.order.lock().unwrap_or_else(PoisonError::into_inner).check(lane, seq, status);
    let line = ReceivedLine {
        at: now.to_rfc3339_opts(SecondsFormat::Millis, true),
        id: text("webhook-id"),
        event_type: text("webhook-event-type"),
        lane,
        seq,
        signature: match &verified {
            None => "not verified".to_owned(),
            Some(Ok(())) => "good".to_owned(),
            Some(Err(error)) => format!("bad: {error}"),
        },
        order,
        status: status.as_u16(),
        error,
        body: &printable_body(&body),
    };
    let printed = serde_json::to_string(&line).map_err(io::Error::from);
    let printed = printed.and_then(|line| writeln!(io::stdout(), "{line}"));
    let _ = endpoint.received.send(()).await;
    if printed.is_ok() { status } else { StatusCode::INTERNAL_SERVER_ERROR }
}

impl Responder {
    /// The status of the response. A program that does not respond is reported with its error and 502.
    async fn respond(&self, headers: &HeaderMap, body: &Bytes) -> (StatusCode, Option<String>) {
        let forward = match self {
            Responder::Status(status) => return (*status, None),
            Responder::Forward(forward) => forward,
        };
        let mut headers = headers.clone();
        for name in NOT_FORWARDED {
            headers.remove(name);
        }
        let (target, body) = (&forward.target, body.clone());
        let request = WebhookRequest { target, headers, body, timeout: FORWARD_TIME_MAX };
        match forward.client.post(request).await {
            Ok(response) => (response.status, None),
            Err(failure) => (StatusCode::BAD_GATEWAY, Some(format!("cannot forward: {failure}"))),
        }
    }
}

impl Order {
    /// The verdict on the order of a webhook within its lane. One that is not accepted is sent again, so it does not count.
    fn check(&mut self, lane: Option<&str>, seq: Option<&str>, status: StatusCode) -> String {
        let Some((lane, seq)) = lane.zip(seq.and_then(|seq| seq.parse::<u64>().ok())) else {
            return "no lane".to_owned();
        };
        let last = self.last.get(lane).copied();
        // A lane that was idle for long starts at 1 again.
        if status.is_success() && last.is_none_or(|last| seq > last || seq == 1) {
            if self.last.len() >= LANES_MAX {
                self.last.clear();
            }
            self.last.insert(lane.to_owned(), seq);
        }
        match last {
            None => "first of its lane here".to_owned(),
            Some(last) if seq == last + 1 => "good".to_owned(),
            Some(_) if seq == 1 => "the lane starts again".to_owned(),
            Some(last) if seq <= last => "repeat".to_owned(),
            Some(last) => format!("gap: {} missing after {last}", seq - last - 1),
        }
    }
}

/// The body as JSON: unchanged if it is JSON, otherwise as a string.
fn printable_body(body: &[u8]) -> Box<RawValue> {
    serde_json::from_slice(body).or_else(|_| to_raw_value(&String::from_utf8_lossy(body))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_printed_byte_for_byte() {
        let body = "{\"a\": 12345678901234567890.123,  \"a\":1.0, \"b\":[1e400,\n -0]}";
        assert_eq!(printable_body(body.as_bytes()).get(), body);
        assert_eq!(printable_body(b"not JSON \xff").get(), "\"not JSON \u{fffd}\"");
    }

    #[test]
    fn repeats_and_gaps_are_distinguished_within_each_lane() {
        let mut order = Order::default();
        let mut check = |lane, seq, status: StatusCode| order.check(Some(lane), Some(seq), status);
        let (ok, failed) = (StatusCode::OK, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(check("a", "7", ok), "first of its lane here");
        assert_eq!(check("a", "8", failed), "good");
        assert_eq!(check("a", "8", ok), "good", "the attempt before was not accepted");
        assert_eq!(check("a", "8", ok), "repeat");
        assert_eq!(check("b", "1", ok), "first of its lane here");
        assert_eq!(check("a", "12", ok), "gap: 3 missing after 8");
        assert_eq!(check("a", "9", ok), "repeat");
        assert_eq!(check("a", "13", ok), "good");
        assert_eq!(check("a", "1", ok), "the lane starts again");
        assert_eq!(check("a", "2", ok), "good");
        assert_eq!(order.check(None, Some("1"), ok), "no lane");
        assert_eq!(order.check(Some("a"), Some("x"), ok), "no lane");
    }
}
