//! The counters of the runbook, exported at 0 from the start: a query such as `increase()` does not see the first event of a
//! counter that appears with it.

use crate::deliveries::domain::Outcome;

/// Exports the counters with all values of their labels.
pub(crate) fn register() {
    metrics::counter!("eventhub_events_received_total").increment(0);
    metrics::counter!("pillarbox_hub_rejected_events_total").increment(0);
    metrics::counter!("pillarbox_hub_replayed_messages_total").increment(0);
    metrics::counter!("pillarbox_hub_deferred_events_lost_total").increment(0);
    for outcome in [Outcome::Delivered, Outcome::Failed, Outcome::Dead] {
        metrics::counter!("eventhub_messages_delivered_total", "outcome" => outcome.as_str()).increment(0);
    }
    // A histogram is exported when it exists, with a count of 0.
    drop(metrics::histogram!("eventhub_delivery_latency_seconds"));
}
