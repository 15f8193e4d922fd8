//! W3C trace context: one trace id from the request through the log, the broker and the webhook.

use std::fmt;
use std::future::Future;
use std::str::FromStr;

use uuid::Uuid;

/// `traceparent` of <https://www.w3.org/TR/trace-context/>, version 00.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    trace_id: u128,
    span_id: u64,
    sampled: bool,
}

tokio::task_local! {
    static CURRENT: TraceContext;
}

impl TraceContext {
    /// Returns a new trace with a random id.
    pub fn start() -> TraceContext {
        // Some bits of a UUID are always set, so that neither id is zero, which would not be valid.
        let (trace_id, span_id) = (Uuid::new_v4().as_u128(), Uuid::new_v4().as_u64_pair().1);
        TraceContext { trace_id, span_id, sampled: true }
    }

    /// Returns the trace of the current task; None outside of [`TraceContext::scope`].
    pub fn current() -> Option<TraceContext> {
        CURRENT.try_with(|trace| *trace).ok()
    }

    /// Runs `work` with this trace as the current one.
    pub fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self, work)
    }

    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    #[cfg(feature = "telemetry")]
    pub(crate) fn ids(&self) -> (u128, u64, bool) {
        (self.trace_id, self.span_id, self.sampled)
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, u8::from(self.sampled))
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not a valid `traceparent`. The specification requires a receiver to start a new trace in this case.
#[derive(Debug, PartialEq, Eq)]
pub struct MalformedTraceparent;

impl FromStr for TraceContext {
    type Err = MalformedTraceparent;

    fn from_str(text: &str) -> Result<TraceContext, MalformedTraceparent> {
        let bytes = text.as_bytes();
        if bytes.len() < 55 || [2, 35, 52].iter().any(|&at| bytes[at] != b'-') {
            return Err(MalformedTraceparent);
        }
        // A later version may append fields after another dash; version 00 may not, and ff is forbidden.
        let tail = bytes.len() == 55 || (bytes[..2] != *b"00" && bytes[55] == b'-');
        if !tail || bytes[..2] == *b"ff" {
            return Err(MalformedTraceparent);
        }
        hex(&bytes[..2])?;
        let trace_id = hex(&bytes[3..35])?;
        let span_id = hex(&bytes[36..52])? as u64;
        let sampled = hex(&bytes[53..55])? & 1 == 1;
        if trace_id == 0 || span_id == 0 {
            return Err(MalformedTraceparent);
        }
        Ok(TraceContext { trace_id, span_id, sampled })
    }
}

/// Parses lower-case hexadecimal digits only, as specified; `from_str_radix` would accept a sign and upper case.
fn hex(digits: &[u8]) -> Result<u128, MalformedTraceparent> {
    digits.iter().try_fold(0u128, |value, digit| match digit {
        b'0'..=b'9' => Ok(value << 4 | u128::from(digit - b'0')),
        b'a'..=b'f' => Ok(value << 4 | u128::from(digit - b'a' + 10)),
        _ => Err(MalformedTraceparent),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_survives_the_round_trip() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let trace: TraceContext = text.parse().unwrap();
        assert_eq!(trace.to_string(), text);
        assert_eq!(trace.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
    }

    #[test]
    fn an_invalid_traceparent_is_rejected() {
        for text in [
            "",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-0",
        ] {
            assert_eq!(text.parse::<TraceContext>(), Err(MalformedTraceparent), "{text}");
        }
    }

    #[test]
    fn a_later_version_may_have_more_fields() {
        assert!("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more".parse::<TraceContext>().is_ok());
    }
}
