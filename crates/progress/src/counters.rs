//! The counters of the runbook, exported at 0 from the start: a query such as `increase()` does not see the first event of a
//! counter that appears with it.

/// Exports the counters.
pub(crate) fn register() {
    metrics::counter!("pillarbox_progress_lost_total").increment(0);
    metrics::counter!("pillarbox_progress_completed_total").increment(0);
}
