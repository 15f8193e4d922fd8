//! The format of log lines: each line contains the id of its trace, so that the trace id in a problem leads to the
//! log.

use std::fmt;

use serde::{Deserialize, Serialize};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::trace::TraceContext;

/// The format of log lines (setting `log_format`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Pretty,
    Json,
}

/// Formats a line with `line` and appends the current trace id.
pub(super) struct WithTraceId<F> {
    line: F,
    format: LogFormat,
}

impl<F> WithTraceId<F> {
    pub(super) fn new(line: F, format: LogFormat) -> WithTraceId<F> {
        WithTraceId { line, format }
    }
}

impl<S, N, F> FormatEvent<S, N> for WithTraceId<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some(trace) = TraceContext::current() else { return self.line.format_event(context, writer, event) };
        let mut line = String::new();
        self.line.format_event(context, Writer::new(&mut line), event)?;
        let (line, trace_id) = (line.trim_end(), trace.trace_id());
        match (self.format, line.strip_suffix('}')) {
            (LogFormat::Json, Some(line)) => writeln!(writer, r#"{line},"trace_id":"{trace_id}"}}"#),
            (LogFormat::Json, None) | (LogFormat::Pretty, _) => writeln!(writer, "{line} trace_id={trace_id}"),
        }
    }
}
