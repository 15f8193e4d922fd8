//! Lines of the log: each names the trace that it belongs to, so that a caller who was told of it can be helped.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::LogFormat;
use crate::trace::TraceContext;

/// Lines of another format, with the current trace at their end.
pub(super) struct Traced<F> {
    line: F,
    format: LogFormat,
}

impl<F> Traced<F> {
    pub(super) fn new(line: F, format: LogFormat) -> Traced<F> {
        Traced { line, format }
    }
}

impl<S, N, F> FormatEvent<S, N> for Traced<F>
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
