//! The counters of the runbook, exported at 0 from the start: a query such as `increase()` does not see the first event of a
//! counter that appears with it.

/// Exports the counters with all values of their labels.
pub(crate) fn register() {
    for service in ["events", "joins"] {
        metrics::counter!("pillarbox_reconcile_drift_total", "service" => service).increment(0);
    }
}
