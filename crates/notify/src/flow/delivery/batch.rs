//! The writes of one transaction of the delivery: e-mails, hub events, and the results of notifications.

use pillarbox::log::{Post, Source, post_all};
use sqlx::{Postgres, Transaction};

use crate::domain::NewMail;
use crate::domain::delivery_rules::Channel;
use crate::domain::notification::{DeliveryResult, NotificationStatus};
use crate::error::DeliveryError;
use crate::store;
use crate::store::delivery::{self, NotNowCounts};

/// The writes of one transaction.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) mails: Vec<NewMail>,
    pub(super) hub_events: Vec<Post>,
    pub(super) results: Vec<(Channel, DeliveryResult)>,
    pub(super) put_off: NotNowCounts,
    /// Whether digests that are due were left to the next round.
    pub(super) has_more: bool,
}

impl Batch {
    /// Whether other processes deliver all that was read.
    pub(super) fn is_empty(&self) -> bool {
        self.results.is_empty() && self.put_off.skipped + self.put_off.postponed == 0
    }

    /// Saves the e-mails, the hub events and the results.
    pub(super) async fn save(&self, tx: &mut Transaction<'_, Postgres>) -> Result<(), DeliveryError> {
        if !self.mails.is_empty() {
            store::insert(tx, &self.mails).await?;
        }
        if !self.hub_events.is_empty() {
            post_all(tx, &Source::new(contracts::HUB_SOURCE), &self.hub_events).await?;
        }
        let results: Vec<DeliveryResult> = self.results.iter().map(|(_, result)| result.clone()).collect();
        Ok(delivery::save_results(tx, &results).await?)
    }

    /// Counts the results. No address and no text is logged.
    pub(super) fn report(&self) {
        metrics::counter!("pillarbox_notifications_skipped_total", "channel" => <&str>::from(Channel::Email))
            .increment(self.put_off.skipped);
        for (channel, result) in &self.results {
            let channel = <&str>::from(*channel);
            match result.status {
                NotificationStatus::Delivered => {
                    metrics::counter!("pillarbox_notifications_delivered_total", "channel" => channel).increment(1);
                }
                NotificationStatus::Skipped => {
                    metrics::counter!("pillarbox_notifications_skipped_total", "channel" => channel).increment(1);
                }
                NotificationStatus::Waiting if result.error.is_some() => {
                    metrics::counter!("pillarbox_notifications_failures_total", "channel" => channel).increment(1);
                }
                NotificationStatus::Waiting => {}
                NotificationStatus::Dead => {
                    metrics::counter!("pillarbox_notifications_dead_total", "channel" => channel).increment(1);
                    tracing::warn!(
                        notification = result.id,
                        channel,
                        "a notification is dead; GET /admin/v1/notifications?status=dead shows the reason"
                    );
                }
            }
        }
    }
}
