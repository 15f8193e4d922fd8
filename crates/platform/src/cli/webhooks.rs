//! Trying webhooks by hand: send an event, and listen for what comes of it.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use chrono::{SecondsFormat, Utc};
use clap::Args;
use hub::address::{Allowed, Network};
use hub::client::{Client, ClientSettings, Outgoing};
use hub::signature::Verifier;
use hub::target::Target;
use kit::secret::Secret;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::Failure;
use super::operate::say;
use crate::settings::Settings;

const SEND_TIME_MAX: Duration = Duration::from_secs(30);

#[derive(Args)]
pub(super) struct Send {
    /// The type of the event, such as order.paid
    event_type: String,
    /// Its payload: any JSON
    #[arg(default_value = "{}")]
    payload: String,
    /// Events of one key arrive in order
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Repeating it with the same key does nothing more
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// The server [default: where this installation listens]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// The API key to call with [default: the setting admin_key]
    #[arg(long, value_name = "KEY", env = "PILLARBOX_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

#[derive(Args)]
pub(super) struct Listen {
    /// Where on this machine to listen; 0 takes a free port
    #[arg(long, default_value_t = 9000)]
    port: u16,
    /// The subscriber's secret (whsec_…, or whpk_…): signatures are verified, and what is not signed with it is refused
    #[arg(long, value_name = "SECRET", env = "PILLARBOX_WEBHOOK_SECRET", hide_env_values = true)]
    secret: Option<String>,
    /// What to answer
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(200..=599))]
    status: u16,
    /// End after so many
    #[arg(long, value_name = "COUNT")]
    count: Option<usize>,
}

/// Posts an event as a producer does, by HTTP.
pub(super) async fn send(settings: &Settings, send: Send) -> Result<(), Failure> {
    let payload: Box<RawValue> = serde_json::from_str(&send.payload)
        .map_err(|error| Failure::Other(format!("the payload is not JSON: {error}")))?;
    let server = send.server.unwrap_or_else(|| format!("http://{}", settings.listen));
    let target = Target::parse(&format!("{}/hub/v1/events", server.trim_end_matches('/')), false)
        .map_err(|error| Failure::Other(format!("--server {error}")))?;
    let key = send.api_key.map(Secret::new).or_else(|| settings.admin_key.clone());
    let key = key.ok_or_else(|| {
        Failure::Other(
            "give an API key: --api-key or PILLARBOX_API_KEY (`pillarbox key create --role ingest`)".to_owned(),
        )
    })?;
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::AUTHORIZATION, header_value("--api-key", &format!("Bearer {}", key.reveal()))?);
    if let Some(key) = &send.idempotency_key {
        headers.insert("idempotency-key", header_value("--idempotency-key", key)?);
    }
    let mut event = json!({"event_type": send.event_type, "payload": payload});
    if let Some(key) = send.key {
        event["ordering_key"] = key.into();
    }
    // Its own server may be anywhere: the guard is for addresses that others choose.
    let anywhere = ["0.0.0.0/0", "::/0"].into_iter().filter_map(|network| network.parse::<Network>().ok());
    let client = Client::new(ClientSettings { allowed_networks: Allowed::new(anywhere), ..ClientSettings::default() });
    let client = client.map_err(Failure::Other)?;
    let body = Bytes::from(event.to_string());
    let sent = client.post(Outgoing { target: &target, headers, body, timeout: SEND_TIME_MAX }).await;
    let answer = sent.map_err(|failure| {
        Failure::Other(format!("{server}: {failure}; start it with `pillarbox up`, or name another with --server URL"))
    })?;
    match answer.status {
        StatusCode::ACCEPTED => Ok(say(&answer.excerpt)?),
        status => Err(Failure::Other(format!("{server} answered {status}: {}", told(&answer.excerpt)))),
    }
}

/// What a problem says, and of which fields; another answer as it is.
fn told(answer: &str) -> String {
    let problem: Value = serde_json::from_str(answer).unwrap_or_default();
    let Some(detail) = problem["detail"].as_str() else { return answer.to_owned() };
    let fields = problem["errors"].as_array().into_iter().flatten();
    let field = |error: &Value| Some(format!("; {}: {}", error["pointer"].as_str()?, error["detail"].as_str()?));
    fields.filter_map(field).fold(detail.to_owned(), |told, field| told + &field)
}

fn header_value(flag: &str, text: &str) -> Result<HeaderValue, Failure> {
    let mut value = HeaderValue::from_str(text).map_err(|_| Failure::Other(format!("{flag} takes printable ASCII")))?;
    value.set_sensitive(true);
    Ok(value)
}

struct Listening {
    verifier: Option<Verifier>,
    status: StatusCode,
    heard: tokio::sync::mpsc::Sender<()>,
}

/// Prints what comes as lines of JSON, until it is stopped.
pub(super) async fn listen(listen: Listen) -> Result<(), Failure> {
    let verifier = listen.secret.as_deref().map(Verifier::parse).transpose();
    let verifier = verifier.map_err(|_| {
        Failure::Other(
            "--secret takes the subscriber's secret: whsec_… or whpk_… and base64, as it was shown".to_owned(),
        )
    })?;
    let listener = TcpListener::bind(("127.0.0.1", listen.port))
        .await
        .map_err(|error| Failure::Other(format!("port {}: {error}; --port takes another", listen.port)))?;
    let address = listener.local_addr()?;
    eprintln!("Listening on http://{address}: make a subscriber with this url. Ctrl-C ends it.");
    if verifier.is_none() {
        eprintln!("Signatures are not verified: give the subscriber's secret with --secret.");
    }
    let status = StatusCode::from_u16(listen.status).unwrap_or(StatusCode::OK);
    let (heard, mut hearing) = tokio::sync::mpsc::channel(1);
    let router = Router::new().fallback(hear).with_state(Arc::new(Listening { verifier, status, heard }));
    let enough = async {
        match listen.count {
            Some(count) => {
                for _ in 0..count {
                    hearing.recv().await;
                }
            }
            None => while hearing.recv().await.is_some() {},
        }
    };
    tokio::select! {
        served = async { axum::serve(listener, router).await } => served?,
        () = enough => {}
        stopped = tokio::signal::ctrl_c() => stopped?,
    }
    Ok(())
}

async fn hear(State(listening): State<Arc<Listening>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let now = Utc::now();
    let verified = listening.verifier.as_ref().map(|verifier| verifier.verify(&headers, &body, now.timestamp()));
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let line = json!({
        "at": now.to_rfc3339_opts(SecondsFormat::Millis, true),
        "id": text("webhook-id"),
        "lane": text("webhook-lane"),
        "seq": text("webhook-seq"),
        "signature": match &verified {
            None => Value::from("not verified"),
            Some(Ok(())) => Value::from("good"),
            Some(Err(error)) => Value::from(format!("bad: {error}")),
        },
        "body": serde_json::from_slice::<Value>(&body).unwrap_or_else(|_| String::from_utf8_lossy(&body).into()),
    });
    let printed = writeln!(std::io::stdout(), "{line}");
    let _ = listening.heard.send(()).await;
    match (verified, printed) {
        (Some(Err(_)), _) => StatusCode::UNAUTHORIZED,
        (_, Err(_)) => StatusCode::INTERNAL_SERVER_ERROR,
        _ => listening.status,
    }
}
