//! The door for messages of every service: its subscriptions, on the bus that the settings name.

use std::sync::Arc;

use mailbox::runtime::{Rhythm, Runtime, Subscription};
use relay::Broker;

use crate::settings::{Bus, Role, Settings};

/// Runs them, if this process has the role. The handlers cannot tell the buses apart.
pub(crate) fn subscribe(
    settings: &Settings,
    runtime: &Runtime,
    broker: Option<&Arc<Broker>>,
    subscriptions: Vec<Subscription>,
) {
    if !settings.has_role(Role::Consume) {
        return;
    }
    for subscription in subscriptions {
        match (settings.bus, broker) {
            (Bus::Rabbitmq, Some(broker)) => {
                relay::bus::subscribe(runtime, &settings.relay, broker, subscription, Rhythm::default());
            }
            // Without a broker there is no such bus: `Settings::check` says so.
            (Bus::Postgres, _) | (Bus::Rabbitmq, None) => runtime.subscribe(&subscription, Rhythm::default()),
        }
    }
}
