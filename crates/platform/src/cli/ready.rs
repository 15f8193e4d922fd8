//! Asking a server that runs how it is.

use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body_util::{BodyExt, Limited};
use hyper_util::rt::TokioIo;
use kit::health::{Kind, State};
use tokio::net::TcpStream;

use super::Failure;
use crate::data_dir::DataDir;
use crate::edges::Report;
use crate::settings::Settings;

const TIME_MAX: Duration = Duration::from_secs(3);
const BYTES_MAX: usize = 1 << 20;

/// What `/readyz` of the server that runs from the data folder says; nothing when none does, or the database is another.
pub(super) async fn ask_local(settings: &Settings) -> Result<Vec<State>, Failure> {
    let holder = DataDir::at(&settings.data_dir)?.holder().filter(|_| settings.database_url.is_none());
    Ok(match holder {
        Some(holder) => ask(&holder).await,
        None => Vec::new(),
    })
}

/// The same of the holder of a data folder, as it described itself. That it does not answer is a state, too.
pub(super) async fn ask(holder: &str) -> Vec<State> {
    let silent = |error: String| {
        let error = format!("{holder} does not answer at /readyz: {error}");
        vec![State { name: "readyz".to_owned(), kind: Kind::Dependency, required: true, up: false, error: Some(error) }]
    };
    let Some((_, address)) = holder.rsplit_once("http://") else { return silent("it does not say where".to_owned()) };
    match tokio::time::timeout(TIME_MAX, get(address)).await {
        Ok(Ok(body)) => match serde_json::from_slice::<Report>(&body) {
            Ok(report) => report.checks,
            Err(error) => silent(error.to_string()),
        },
        Ok(Err(error)) => silent(error.to_string()),
        Err(_) => silent(format!("not within {} s", TIME_MAX.as_secs())),
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
