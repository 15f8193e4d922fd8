//! A webhook endpoint that records requests and responds as the test configures it.

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

/// A request that the receiver has recorded.
#[derive(Debug, Clone)]
pub struct Received {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub at: Instant,
    /// The status of the response.
    pub status: u16,
}

/// A response that the receiver sends.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    /// The time between the request and the response.
    pub delay: Duration,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
}

type ReplyFn = Box<dyn FnMut(&Received) -> Reply + Send>;

/// A running webhook endpoint. Dropping it stops the server.
pub struct Receiver {
    port: u16,
    received: Arc<Mutex<Vec<Received>>>,
    reply: Arc<Mutex<ReplyFn>>,
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
    /// Responds with 200 to every request.
    pub async fn start() -> Receiver {
        Receiver::with_reply(|_| Reply::status(200)).await
    }

    /// Responds to each request with the result of `reply`.
    pub async fn with_reply(reply: impl FnMut(&Received) -> Reply + Send + 'static) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let received = Arc::new(Mutex::new(Vec::new()));
        let reply: Arc<Mutex<ReplyFn>> = Arc::new(Mutex::new(Box::new(reply)));
        let (log, reply_fn) = (received.clone(), reply.clone());
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (log, reply_fn) = (log.clone(), reply_fn.clone());
                let _ = stream.set_nodelay(true);
                tokio::spawn(async move {
                    let service = service_fn(|request| respond(request, log.clone(), reply_fn.clone()));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Receiver { port, received, reply, serving }
    }

    /// Responds to each later request with the result of `reply`.
    pub fn set_reply(&self, reply: impl FnMut(&Received) -> Reply + Send + 'static) {
        *self.reply.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(reply);
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/hook", self.port)
    }

    /// All requests so far, in the order of their arrival.
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

async fn respond(
    request: Request<Incoming>,
    log: Arc<Mutex<Vec<Received>>>,
    reply_fn: Arc<Mutex<ReplyFn>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let mut received =
        Received { path: parts.uri.path().to_owned(), headers: parts.headers, body, at: Instant::now(), status: 0 };
    let reply = {
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = reply_fn.lock().unwrap_or_else(PoisonError::into_inner)(&received);
        received.status = reply.status;
        log.push(received);
        reply
    };
    tokio::time::sleep(reply.delay).await;
    let mut response = Response::builder().status(reply.status);
    for (name, value) in reply.headers {
        response = response.header(name, value);
    }
    Ok(response.body(Full::new(Bytes::from(reply.body))).expect("a valid reply"))
}
