//! Which subscribers and streams an event matches, cached in memory.

use std::collections::HashMap;
use std::sync::Arc;

use pillarbox::log::Message;
use uuid::Uuid;

use crate::directory::domain::{DirectoryVersion, Interest};

/// Bounds the cached matches of all tenants and event types together.
const CACHED_MAX: usize = 1_000_000;

/// The interests of all subscribers by tenant, and a cache of the matching ones by tenant and event type.
#[derive(Default)]
pub(super) struct Directory {
    /// None: nothing is loaded.
    pub(super) version: Option<DirectoryVersion>,
    interests: HashMap<String, Vec<Interest>>,
    /// Whether each one is active.
    subscribers: HashMap<Uuid, bool>,
    /// Indexes into the interests of the tenant.
    cache: HashMap<(String, String), Arc<[usize]>>,
    /// The size of `cache`: each entry counts its matches plus one.
    cached: usize,
}

impl Directory {
    pub(super) fn new(version: DirectoryVersion, all: Vec<Interest>) -> Directory {
        let subscribers = all.iter().map(|interest| (interest.subscriber, interest.is_active)).collect();
        let mut interests: HashMap<String, Vec<Interest>> = HashMap::new();
        for interest in all {
            interests.entry(interest.tenant.as_str().to_owned()).or_default().push(interest);
        }
        Directory { version: Some(version), interests, subscribers, ..Directory::default() }
    }

    /// Whether the subscriber is active. None: it does not exist.
    pub(super) fn is_active(&self, subscriber: Uuid) -> Option<bool> {
        self.subscribers.get(&subscriber).copied()
    }

    /// The interests of the message's tenant, and the indexes of those that match its event type.
    pub(super) fn matching(&mut self, message: &Message) -> (&[Interest], Arc<[usize]>) {
        self.matching_type(&message.tenant, &message.topic)
    }

    fn matching_type(&mut self, tenant: &str, topic: &str) -> (&[Interest], Arc<[usize]>) {
        let Some(interests) = self.interests.get(tenant) else { return (&[], Arc::new([])) };
        let key = (tenant.to_owned(), topic.to_owned());
        if let Some(matching) = self.cache.get(&key) {
            return (interests, matching.clone());
        }
        let matches = |interest: &Interest| interest.event_types.iter().any(|types| types.include(topic));
        let matching: Arc<[usize]> = (0..interests.len()).filter(|at| matches(&interests[*at])).collect();
        // Plus one, because an entry without matches also needs memory.
        let size = matching.len() + 1;
        if self.cached + size > CACHED_MAX {
            self.cache.clear();
            self.cached = 0;
        }
        self.cached += size;
        self.cache.insert(key, matching.clone());
        (interests, matching)
    }
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::*;
    use crate::directory::domain::fixtures::directory_version;

    fn interest(tenant: &str, types: &str) -> Interest {
        Interest {
            subscriber: Uuid::now_v7(),
            is_stream: false,
            tenant: tenant.parse().unwrap(),
            event_types: vec![types.to_owned().try_into().unwrap()],
            filter: None,
            ordering_key: None,
            is_active: true,
            since: DateTime::UNIX_EPOCH,
            backfill: None,
        }
    }

    #[test]
    fn an_event_matches_subscribers_of_its_tenant_only() {
        let acme = interest("acme", "order.*");
        let all = vec![interest("other", "order.*"), acme.clone(), interest("acme", "invoice.*")];
        let mut directory = Directory::new(directory_version(1), all);
        for _ in 0..2 {
            let (interests, matching) = directory.matching_type("acme", "order.paid");
            let found: Vec<Uuid> = matching.iter().map(|at| interests[*at].subscriber).collect();
            assert_eq!(found, [acme.subscriber]);
        }
        assert!(directory.matching_type("missing", "order.paid").1.is_empty());
        assert_eq!(directory.cache.len(), 1, "nothing is cached for a tenant without subscribers");
    }

    #[test]
    fn the_cache_is_bounded_by_matches() {
        let mut directory = Directory::new(directory_version(1), (0..1_000).map(|_| interest("acme", "*")).collect());
        for number in 0..3_000 {
            assert_eq!(directory.matching_type("acme", &format!("type.{number}")).1.len(), 1_000);
            let cached: usize = directory.cache.values().map(|matching| matching.len() + 1).sum();
            assert_eq!(cached, directory.cached);
            assert!(cached <= CACHED_MAX);
        }
    }
}
