//! System events: what the hub itself reports about subscribers and messages. Their types begin with `hub.`, which no other source
//! may post.
//!
//! One about a subscriber is never sent to that subscriber ([`is_about`]).

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use pillarbox::log::{Message, Post, Source};
use serde_json::json;
use serde_json::value::to_raw_value;
use uuid::Uuid;

/// The source of the events that the hub itself posts.
pub(crate) const SYSTEM_SOURCE: Source = Source::new("hub.system");

pub(crate) const SUBSCRIBER_RECOVERED: &str = "hub.subscriber.recovered";

pub(crate) fn is_system_source(source: &str) -> bool {
    source == SYSTEM_SOURCE.as_str()
}

/// Whether an event reports something about this subscriber. The key of such an event is the id of the subscriber.
pub(crate) fn is_about(message: &Message, subscriber: Uuid) -> bool {
    is_system_source(&message.source)
        && message.key.as_deref().and_then(|key| key.parse().ok()).is_some_and(|about: Uuid| about == subscriber)
}

/// The event about a subscriber that the hub had switched off and that is active again.
pub(crate) fn enabled(tenant: &Tenant, subscriber: Uuid, name: &str, now: DateTime<Utc>) -> Post {
    let payload = json!({
        "subscriber_id": subscriber, "subscriber_name": name, "cause": "enabled",
        "failing_since": null, "recovered_at": now,
    });
    let mut post = Post::new(SUBSCRIBER_RECOVERED, to_raw_value(&payload).unwrap_or_default());
    (post.tenant, post.key) = (tenant.clone(), Some(subscriber.to_string()));
    post
}
