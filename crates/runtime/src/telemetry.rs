//! Telemetry: sets up logs, metrics and traces, once per process.

mod lines;
mod otlp;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub use metrics_exporter_prometheus::PrometheusHandle;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use metrics_util::MetricKindMask;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

pub use self::lines::LogFormat;
pub use self::otlp::REQUEST_TARGET;
use crate::MetricHelp;
use crate::trace::TraceContext;

/// The upper bounds of the histograms, in seconds: from a cached read to a slow webhook.
const DURATION_BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// A gauge that was not set for this time is removed: its object, such as a deleted consumer, no longer exists.
/// Counters and histograms stay, because code caches their handles.
const GAUGE_TIME_MAX: Duration = Duration::from_secs(120);

/// Targets that are never logged, because their events contain the payloads of messages.
const SILENCED_TARGETS: [&str; 3] = ["lapin::returned_messages", "lapin::channels", "lapin::frames"];

/// The trace exporter, which must be flushed before the process exits.
pub struct Traces(Option<SdkTracerProvider>);

/// Telemetry cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("setting `log`: {0}; it must be a level (info) or levels by target (info,pillarbox=debug)")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    #[error("setting `otlp_endpoint`: {0}; it must be an address such as http://127.0.0.1:4318")]
    Endpoint(otlp::InvalidEndpoint),
    #[error("metrics: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
}

/// Starts the log on standard error and, if there is an endpoint, the export of traces. Must be called within a tokio
/// runtime.
pub fn start_logs(filter: &str, format: LogFormat, otlp_endpoint: Option<&str>) -> Result<Traces, TelemetryError> {
    let filter = SILENCED_TARGETS.iter().try_fold(EnvFilter::try_new(filter)?, |filter, target| {
        Ok::<_, TelemetryError>(filter.add_directive(format!("{target}=off").parse()?))
    })?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Pretty => {
            let has_colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            let line = tracing_subscriber::fmt::format().with_target(false).with_ansi(has_colours);
            lines.with_ansi(has_colours).event_format(lines::WithTraceId::new(line, format)).boxed()
        }
        LogFormat::Json => {
            let line = tracing_subscriber::fmt::format().json().flatten_event(true);
            lines.json().event_format(lines::WithTraceId::new(line, format)).boxed()
        }
    };
    let provider = otlp_endpoint.map(otlp::provider).transpose().map_err(TelemetryError::Endpoint)?;
    let spans = provider.as_ref().map(otlp::layer);
    tracing_subscriber::registry().with(lines.with_filter(filter)).with(spans).init();
    Ok(Traces(provider))
}

/// Adds help texts to `/metrics`. The kind of a metric is known when it is first recorded.
pub fn describe_metrics(metrics: &[MetricHelp]) {
    for (name, help) in metrics {
        metrics::describe_counter!(*name, *help);
    }
}

/// Returns the metrics of the process; the first call installs the recorder.
pub fn metrics() -> Result<PrometheusHandle, TelemetryError> {
    static STARTED: Mutex<Option<PrometheusHandle>> = Mutex::new(None);
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*started {
        return Ok(handle.clone());
    }
    let durations = Matcher::Suffix("_seconds".to_owned());
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(durations, &DURATION_BUCKETS)?
        .idle_timeout(MetricKindMask::GAUGE, Some(GAUGE_TIME_MAX))
        .install_recorder()?;
    Ok(started.insert(handle).clone())
}

impl Traces {
    /// Exports the remaining spans, for at most 3 seconds.
    pub async fn flush(self) {
        let Some(provider) = self.0 else { return };
        let flushing = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(Duration::from_secs(3)));
        if let Ok(Err(error)) = flushing.await {
            tracing::warn!(%error, "some traces were not exported");
        }
    }
}

/// Makes `span` a child of `trace` in the exported traces.
pub fn join_trace(span: &tracing::Span, trace: TraceContext) {
    if span.is_disabled() {
        return;
    }
    let (trace_id, span_id, sampled) = trace.ids();
    let flags = if sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace_id, span_id) = (TraceId::from(trace_id), SpanId::from(span_id));
    let remote = SpanContext::new(trace_id, span_id, flags, true, TraceState::NONE);
    // Fails when the export of traces is off; then there is nothing to join.
    let _ = span.set_parent(opentelemetry::Context::new().with_remote_span_context(remote));
}
