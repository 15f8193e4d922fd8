//! Loads the health checks of a running server from its `/readyz`.

use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body_util::{BodyExt, Limited};
use hyper_util::rt::TokioIo;
use runtime::health::{Kind, State};
use tokio::net::TcpStream;

use crate::server_routes::Report;

/// Timeout of the request.
const TIME_MAX: Duration = Duration::from_secs(3);
/// Largest response that is read.
const BYTES_MAX: usize = 1 << 20;

/// The checks of a server, given its description in the lock file of the data folder. A server that does not respond is
/// reported as a failed check.
pub(super) async fn load(server: &str) -> Vec<State> {
    let unreachable = |error: String| {
        let error = format!("{server} does not respond at /readyz: {error}");
        vec![State { name: "readyz".to_owned(), kind: Kind::Dependency, required: true, up: false, error: Some(error) }]
    };
    let Some((_, address)) = server.rsplit_once("http://") else {
        return unreachable("its address is unknown".to_owned());
    };
    match tokio::time::timeout(TIME_MAX, get(address)).await {
        Ok(Ok(body)) => match serde_json::from_slice::<Report>(&body) {
            Ok(report) => report.checks,
            Err(error) => unreachable(error.to_string()),
        },
        Ok(Err(error)) => unreachable(error.to_string()),
        Err(_) => unreachable(format!("no response within {} s", TIME_MAX.as_secs())),
    }
}

async fn get(address: &str) -> Result<Bytes, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(address).await?;
    let (mut sending, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = axum::http::Request::get("/readyz").header("host", address).body(Body::empty())?;
    let answer = sending.send_request(request).await?;
    Ok(Limited::new(answer.into_body(), BYTES_MAX).collect().await?.to_bytes())
}
