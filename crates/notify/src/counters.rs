//! The counters of the runbook, exported at 0 from the start: a query such as `increase()` does not see the first event of a
//! counter that appears with it.

use crate::domain::delivery_rules::Channel;

/// Exports the counters with all values of their labels.
pub(crate) fn register() {
    metrics::counter!("pillarbox_mail_sent_total").increment(0);
    metrics::counter!("pillarbox_mail_dead_total").increment(0);
    for kind in ["deferred", "refused", "server"] {
        metrics::counter!("pillarbox_mail_failures_total", "kind" => kind).increment(0);
    }
    for channel in [Channel::Email, Channel::InApp, Channel::Webhook] {
        let channel = <&str>::from(channel);
        metrics::counter!("pillarbox_notifications_delivered_total", "channel" => channel).increment(0);
        metrics::counter!("pillarbox_notifications_skipped_total", "channel" => channel).increment(0);
        metrics::counter!("pillarbox_notifications_failures_total", "channel" => channel).increment(0);
        metrics::counter!("pillarbox_notifications_dead_total", "channel" => channel).increment(0);
    }
}
