//! The endpoints of the demo's subscribers, on loopback. Each path is an endpoint with its own behaviour.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::commands::Failure;

/// The flaky endpoint fails in each cycle for this time, and is well for the rest.
const FAILS_FOR: Duration = Duration::from_secs(25);
const CYCLE: Duration = Duration::from_secs(75);
/// The slow endpoint answers after this time.
const SLOW: Duration = Duration::from_millis(700);
/// The strict endpoint refuses one of this many webhooks for good.
const REFUSES_ONE_OF: u64 = 12;

/// A running receiver.
pub(super) struct Receiver {
    base: String,
    state: Arc<Endpoints>,
}

#[derive(Default)]
struct Endpoints {
    accepted: AtomicU64,
    refused: AtomicU64,
    strict: AtomicU64,
}

impl Receiver {
    /// Listens on a free port until `stop`.
    pub(super) async fn start(stop: CancellationToken) -> Result<Receiver, Failure> {
        let failed = |error: std::io::Error| Failure::Other(format!("cannot listen on loopback for webhooks: {error}"));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(failed)?;
        let base = format!("http://{}", listener.local_addr().map_err(failed)?);
        let state = Arc::new(Endpoints::default());
        let started = Instant::now();
        let answer = move |State(state): State<Arc<Endpoints>>, Path(name): Path<String>| async move {
            respond(&state, &name, started.elapsed()).await
        };
        let router = Router::new().route("/{name}", post(answer)).with_state(state.clone());
        let serving = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
        tokio::spawn(async move { serving.await });
        Ok(Receiver { base, state })
    }

    /// The address of an endpoint.
    pub(super) fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.base)
    }

    /// The numbers of webhooks that were accepted and refused.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.state.accepted.load(Ordering::Relaxed), self.state.refused.load(Ordering::Relaxed))
    }
}

async fn respond(state: &Endpoints, name: &str, elapsed: Duration) -> StatusCode {
    let status = match name {
        "flaky" if elapsed.as_secs() % CYCLE.as_secs() < FAILS_FOR.as_secs() => StatusCode::INTERNAL_SERVER_ERROR,
        "slow" => {
            tokio::time::sleep(SLOW).await;
            StatusCode::OK
        }
        "strict" if state.strict.fetch_add(1, Ordering::Relaxed) % REFUSES_ONE_OF == REFUSES_ONE_OF - 1 => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        _ => StatusCode::OK,
    };
    let counter = if status.is_success() { &state.accepted } else { &state.refused };
    counter.fetch_add(1, Ordering::Relaxed);
    status
}
