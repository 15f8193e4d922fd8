//! The export of traces to a collector by OTLP over HTTP.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Handle;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;

/// The target of the spans and events of HTTP requests.
pub const REQUEST_TARGET: &str = "pillarbox::request";

/// The time limit of one export.
const EXPORT_TIME_MAX: Duration = Duration::from_secs(5);

/// Why traces cannot be exported to an endpoint.
#[derive(Debug, thiserror::Error)]
pub enum InvalidEndpoint {
    #[error("{0}")]
    NotAUri(http::uri::InvalidUri),
    #[error("is not a plain http address")]
    NotPlainHttp,
    #[error("{0}")]
    Exporter(opentelemetry_otlp::ExporterBuildError),
}

/// Builds the exporter.
pub(super) fn provider(endpoint: &str) -> Result<SdkTracerProvider, InvalidEndpoint> {
    let endpoint = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    let address: http::Uri = endpoint.parse().map_err(InvalidEndpoint::NotAUri)?;
    if address.scheme_str() != Some("http") || address.host().is_none() {
        return Err(InvalidEndpoint::NotPlainHttp);
    }
    let client =
        RuntimeClient { runtime: Handle::current(), client: Client::builder(TokioExecutor::new()).build_http() };
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_endpoint(endpoint)
        .with_timeout(EXPORT_TIME_MAX)
        .build()
        .map_err(InvalidEndpoint::Exporter)?;
    let resource = Resource::builder().with_service_name("pillarbox").build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

/// Returns the layer that exports spans.
pub(super) fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(provider: &SdkTracerProvider) -> impl Layer<S> + use<S> {
    // The span of a request and the event of its response have the level debug: they are meant for traces, and the
    // log includes them only when debugging.
    let targets = Targets::new().with_default(LevelFilter::INFO).with_target(REQUEST_TARGET, LevelFilter::DEBUG);
    tracing_opentelemetry::layer().with_tracer(provider.tracer("pillarbox")).with_filter(targets)
}

/// An HTTP client for the exporter, which runs on its own thread: the requests run on the tokio runtime of the
/// process.
#[derive(Debug)]
struct RuntimeClient {
    runtime: Handle,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl HttpClient for RuntimeClient {
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        let client = self.client.clone();
        let sending = self.runtime.spawn(async move {
            let exchange = async {
                let (parts, body) = client.request(request.map(Full::new)).await?.into_parts();
                Ok::<_, HttpError>(Response::from_parts(parts, body.collect().await?.to_bytes()))
            };
            tokio::time::timeout(EXPORT_TIME_MAX, exchange).await?
        });
        Box::pin(async move { sending.await? })
    }
}
