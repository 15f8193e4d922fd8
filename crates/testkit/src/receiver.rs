//! An endpoint that webhooks are sent to: it keeps what came, and answers as it is told.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::HeaderMap;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A webhook that came.
#[derive(Debug, Clone)]
pub struct Received {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub at: Instant,
    /// What it was answered.
    pub status: u16,
}

/// What to answer.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub after: Duration,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
}

type Replying = Box<dyn FnMut(&Received) -> Reply + Send>;

/// Ends with the value.
pub struct Receiver {
    port: u16,
    received: Arc<Mutex<Vec<Received>>>,
    replying: Arc<Mutex<Replying>>,
    serving: JoinHandle<()>,
}

impl Received {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no header {name}: {self:?}"));
        value.to_str().expect("text")
    }
}

impl Reply {
    pub fn status(status: u16) -> Reply {
        Reply { status, ..Reply::default() }
    }
}

impl Receiver {
    /// Answers 200 to everything.
    pub async fn start() -> Receiver {
        Receiver::replying(|_| Reply::status(200)).await
    }

    pub async fn replying(replying: impl FnMut(&Received) -> Reply + Send + 'static) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let received = Arc::new(Mutex::new(Vec::new()));
        let replying: Arc<Mutex<Replying>> = Arc::new(Mutex::new(Box::new(replying)));
        let (kept, told) = (received.clone(), replying.clone());
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (kept, told) = (kept.clone(), told.clone());
                let _ = stream.set_nodelay(true);
                tokio::spawn(async move {
                    let service = service_fn(|request| answer(request, kept.clone(), told.clone()));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Receiver { port, received, replying, serving }
    }

    /// From now on it answers like this.
    pub fn reply(&self, replying: impl FnMut(&Received) -> Reply + Send + 'static) {
        *self.replying.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(replying);
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/hook", self.port)
    }

    /// What came so far, in order.
    pub fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn count(&self) -> usize {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn answer(
    request: Request<Incoming>,
    kept: Arc<Mutex<Vec<Received>>>,
    told: Arc<Mutex<Replying>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let mut received =
        Received { path: parts.uri.path().to_owned(), headers: parts.headers, body, at: Instant::now(), status: 0 };
    let reply = {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = told.lock().unwrap_or_else(PoisonError::into_inner)(&received);
        received.status = reply.status;
        kept.push(received);
        reply
    };
    tokio::time::sleep(reply.after).await;
    let mut response = Response::builder().status(reply.status);
    for (name, value) in reply.headers {
        response = response.header(name, value);
    }
    Ok(response.body(Full::new(Bytes::from(reply.body))).expect("a good reply"))
}
