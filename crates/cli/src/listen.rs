//! `listen`: receives webhooks on this machine, and tells for each whether its signature and its order are right.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use chrono::{SecondsFormat, Utc};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use tokio::net::TcpListener;
use webhook_client::signature::Verifier;
use webhook_client::{AllowedNetworks, Client, ClientSettings, IpNet, Target, WebhookRequest};

use crate::Failure;
use crate::https::extra_roots;
use crate::table::{print_json, print_note};

/// Timeout of a forwarded request: the longest time that a subscriber may allow for a response.
const FORWARD_TIME_MAX: Duration = Duration::from_secs(30);
/// Lanes whose last number is known. With more of them, all are reset, and the next webhook of each is its first one.
const LANES_MAX: usize = 100_000;
/// Missing numbers of a lane that are known, the newest.
const MISSING_MAX: usize = 1_000;
/// Headers that belong to one connection, or that the client sets itself.
const NOT_FORWARDED: [header::HeaderName; 4] =
    [header::HOST, header::CONTENT_LENGTH, header::CONNECTION, header::TRANSFER_ENCODING];

/// The verdicts on webhooks that are in order.
const GOOD: &str = "good";
const FIRST: &str = "first of its lane here";
const NO_LANE: &str = "no lane";
const REPLAY: &str = "replay: not numbered";

#[derive(Args)]
pub struct Listen {
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

/// What was accepted of each lane. The key is the path of the request and the lane: subscribers whose addresses have different
/// paths are distinguished.
#[derive(Default)]
struct Order {
    lanes: HashMap<(String, String), LaneState>,
}

/// What was accepted of one lane.
struct LaneState {
    /// The highest number.
    last: u64,
    /// The id of the message with the number 1, if it was received.
    first_id: Option<String>,
    /// Lower numbers that have not arrived.
    missing: BTreeSet<u64>,
}

/// A message of a webhook, which has one or, in a batch, several.
struct Numbered {
    id: String,
    lane: Option<String>,
    seq: Option<u64>,
    is_replay: bool,
}

/// Prints the received webhooks as lines of JSON until it is stopped. Fails if the secret or the URL is invalid, or the port is
/// in use.
pub async fn listen(listen: Listen) -> Result<(), Failure> {
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
    print_note(&format!("Listening on http://{address}. Create a subscriber with this url. Press Ctrl-C to stop."));
    if verifier.is_none() {
        print_note("Signatures are not verified; set PILLARBOX_WEBHOOK_SECRET to the subscriber's secret.");
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

/// The guard against private addresses is for subscribers; the user of a command may send to any server.
fn client_for_any_server() -> Result<Client, Failure> {
    let anywhere = ["0.0.0.0/0", "::/0"].into_iter().filter_map(|network| network.parse::<IpNet>().ok());
    let allowed_networks = AllowedNetworks::new(anywhere);
    let extra_roots = extra_roots()?;
    let settings = ClientSettings { allowed_networks, extra_roots, ..ClientSettings::default() };
    Client::new(settings).map_err(|error| Failure::Other(error.to_string()))
}

fn responder(listen: &Listen) -> Result<Responder, Failure> {
    let Some(url) = &listen.forward else {
        return Ok(Responder::Status(StatusCode::from_u16(listen.status).unwrap_or(StatusCode::OK)));
    };
    let target = Target::parse(url, false).map_err(|error| Failure::Other(format!("--forward {error}")))?;
    Ok(Responder::Forward(Box::new(Forward { client: client_for_any_server()?, target })))
}

async fn receive(State(endpoint): State<Arc<Endpoint>>, uri: Uri, headers: HeaderMap, body: Bytes) -> StatusCode {
    let now = Utc::now();
    let verified = endpoint.verifier.as_ref().map(|verifier| verifier.verify(&headers, &body, now.timestamp()));
    let (status, error) = match &verified {
        Some(Err(_)) => (StatusCode::UNAUTHORIZED, None),
        Some(Ok(())) | None => endpoint.responder.respond(&headers, &body).await,
    };
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let (lane, seq) = (text("webhook-lane"), text("webhook-seq"));
    let messages = messages_of(&headers, &body);
    let order = endpoint.order.lock().unwrap_or_else(PoisonError::into_inner).check_all(uri.path(), &messages, status);
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
    let printed = print_json(&line);
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

/// The messages of a webhook. The header `webhook-batch` distinguishes a batch; its items carry what headers carry otherwise.
fn messages_of(headers: &HeaderMap, body: &[u8]) -> Vec<Numbered> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let is_replay = headers.contains_key("webhook-replay");
    if !headers.contains_key("webhook-batch") {
        let seq = text("webhook-seq").and_then(|seq| seq.parse().ok());
        return vec![Numbered {
            id: text("webhook-id").unwrap_or_default(),
            lane: text("webhook-lane"),
            seq,
            is_replay,
        }];
    }
    let items: Vec<Value> = serde_json::from_slice(body).unwrap_or_default();
    let item = |item: &Value| {
        let field = |names: [&str; 2]| names.iter().map(|name| &item[*name]).find(|value| !value.is_null()).cloned();
        // A CloudEvent has the lane as `partitionkey`, and its number as the text `sequence`.
        let seq = field(["seq", "sequence"]).and_then(|seq| match seq {
            Value::String(text) => text.parse().ok(),
            other => other.as_u64(),
        });
        let lane = field(["lane", "partitionkey"]).and_then(|lane| lane.as_str().map(str::to_owned));
        Numbered { id: item["id"].as_str().unwrap_or_default().to_owned(), lane, seq, is_replay }
    };
    items.iter().map(item).collect()
}

impl Order {
    /// The verdict on the order of a webhook. That of a batch names the items that are not in order.
    fn check_all(&mut self, path: &str, messages: &[Numbered], status: StatusCode) -> String {
        if let [message] = messages {
            return self.check(path, message, status);
        }
        let mut verdicts = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let verdict = self.check(path, message, status);
            if ![GOOD, FIRST, NO_LANE, REPLAY].contains(&verdict.as_str()) {
                verdicts.push(format!("item {}: {verdict}", index + 1));
            }
        }
        if verdicts.is_empty() { GOOD.to_owned() } else { verdicts.join("; ") }
    }

    /// The verdict on a message within its lane. One that is not accepted is sent again, so it does not count.
    fn check(&mut self, path: &str, message: &Numbered, status: StatusCode) -> String {
        let (Some(lane), Some(seq)) = (&message.lane, message.seq) else {
            return if message.is_replay { REPLAY } else { NO_LANE }.to_owned();
        };
        let key = (path.to_owned(), lane.clone());
        if !self.lanes.contains_key(&key) && self.lanes.len() >= LANES_MAX {
            self.lanes.clear();
        }
        let Some(state) = self.lanes.get_mut(&key) else {
            if status.is_success() {
                self.lanes.insert(key, LaneState::starting_with(seq, &message.id));
            }
            return FIRST.to_owned();
        };
        let verdict = state.judge(seq, &message.id);
        if status.is_success() {
            state.accept(seq, &message.id);
        }
        verdict
    }
}

impl LaneState {
    fn starting_with(seq: u64, id: &str) -> LaneState {
        LaneState { last: seq, first_id: (seq == 1).then(|| id.to_owned()), missing: BTreeSet::new() }
    }

    /// A lane that was idle for long starts at 1 again. A 1 with the id of the former one is a repeat of it.
    fn starts_again(&self, seq: u64, id: &str) -> bool {
        seq == 1 && !self.missing.contains(&1) && self.first_id.as_deref() != Some(id)
    }

    fn judge(&self, seq: u64, id: &str) -> String {
        match seq {
            _ if seq == self.last + 1 => GOOD.to_owned(),
            _ if self.starts_again(seq, id) => "the lane starts again".to_owned(),
            _ if self.missing.contains(&seq) => format!("late: it should have been sent before {}", self.last),
            _ if seq <= self.last => "repeat".to_owned(),
            _ => format!("gap: {} missing after {}", seq - self.last - 1, self.last),
        }
    }

    fn accept(&mut self, seq: u64, id: &str) {
        if self.starts_again(seq, id) {
            *self = LaneState::starting_with(seq, id);
        }
        self.missing.remove(&seq);
        if seq > self.last {
            let first_known = seq.saturating_sub(MISSING_MAX as u64).max(self.last + 1);
            self.missing.extend(first_known..seq);
            self.last = seq;
        }
        while self.missing.len() > MISSING_MAX {
            self.missing.pop_first();
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

    fn numbered(id: &str, lane: &str, seq: u64) -> Numbered {
        Numbered { id: id.to_owned(), lane: Some(lane.to_owned()), seq: Some(seq), is_replay: false }
    }

    #[test]
    fn repeats_gaps_and_late_webhooks_are_distinguished_within_each_lane() {
        let mut order = Order::default();
        let mut check = |lane, seq: u64, status: StatusCode| {
            order.check_all("/", &[numbered(&format!("{lane}{seq}"), lane, seq)], status)
        };
        let (ok, failed) = (StatusCode::OK, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(check("a", 7, ok), "first of its lane here");
        assert_eq!(check("a", 8, failed), "good");
        assert_eq!(check("a", 8, ok), "good", "the attempt before was not accepted");
        assert_eq!(check("a", 8, ok), "repeat");
        assert_eq!(check("b", 1, ok), "first of its lane here");
        assert_eq!(check("b", 1, ok), "repeat", "it has the id of the first one");
        assert_eq!(check("a", 12, ok), "gap: 3 missing after 8");
        assert_eq!(check("a", 10, failed), "late: it should have been sent before 12");
        assert_eq!(check("a", 10, ok), "late: it should have been sent before 12");
        assert_eq!(check("a", 10, ok), "repeat");
        assert_eq!(check("a", 13, ok), "good");
        assert_eq!(check("a", 1, ok), "the lane starts again");
        assert_eq!(check("a", 1, ok), "repeat");
        assert_eq!(check("a", 2, ok), "good");
    }

    #[test]
    fn a_replay_has_no_number_and_subscribers_are_distinguished_by_their_paths() {
        let mut order = Order::default();
        let mut check = |path: &str, message: Numbered| order.check_all(path, &[message], StatusCode::OK);
        assert_eq!(check("/a", numbered("x", "k", 5)), "first of its lane here");
        assert_eq!(check("/b", numbered("x", "k", 2)), "first of its lane here");
        assert_eq!(check("/a", numbered("y", "k", 6)), "good");
        let replayed = Numbered { seq: None, is_replay: true, ..numbered("x", "k", 0) };
        assert_eq!(check("/a", replayed), "replay: not numbered");
        assert_eq!(check("/a", Numbered { lane: None, seq: None, ..numbered("x", "", 0) }), "no lane");
    }

    #[test]
    fn the_items_of_a_batch_are_checked_each() {
        let mut order = Order::default();
        let headers = HeaderMap::from_iter(
            [("webhook-batch", "3")]
                .map(|(name, value)| (header::HeaderName::from_static(name), header::HeaderValue::from_static(value))),
        );
        let mut check = |body: &str| order.check_all("/", &messages_of(&headers, body.as_bytes()), StatusCode::OK);
        let first = r#"[{"id":"1","lane":"a","seq":1},{"id":"2","lane":"a","seq":2},{"id":"3"}]"#;
        assert_eq!(check(first), "good");
        assert_eq!(check(first), "item 1: repeat; item 2: repeat");
        let second = r#"[{"id":"4","partitionkey":"a","sequence":"3"},{"id":"5","partitionkey":"a","sequence":"5"}]"#;
        assert_eq!(check(second), "item 2: gap: 1 missing after 3");
    }
}
