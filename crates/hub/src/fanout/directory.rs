//! Who is sent what.

use std::collections::HashMap;
use std::sync::Arc;

use mailbox::log::Message;

use crate::domain::Interest;

/// Of all tenants and types together, so many matches are remembered.
const REMEMBERED_MAX: usize = 1_000_000;

/// Who is sent what, by tenant, and by tenant and type which of them are meant.
#[derive(Default)]
pub(super) struct Directory {
    pub(super) version: i64,
    interests: HashMap<String, Vec<Interest>>,
    meant: HashMap<(String, String), Arc<[usize]>>,
    /// How many there are in `meant`.
    remembered: usize,
}

impl Directory {
    pub(super) fn new(version: i64, all: Vec<Interest>) -> Directory {
        let mut interests: HashMap<String, Vec<Interest>> = HashMap::new();
        for interest in all {
            interests.entry(interest.tenant.as_str().to_owned()).or_default().push(interest);
        }
        Directory { version, interests, ..Directory::default() }
    }

    /// The interests of the message's tenant, and which of them mean it.
    pub(super) fn meant(&mut self, message: &Message) -> (&[Interest], Arc<[usize]>) {
        self.meant_by(&message.tenant, &message.topic)
    }

    fn meant_by(&mut self, tenant: &str, topic: &str) -> (&[Interest], Arc<[usize]>) {
        let Some(interests) = self.interests.get(tenant) else { return (&[], Arc::new([])) };
        let key = (tenant.to_owned(), topic.to_owned());
        if let Some(meant) = self.meant.get(&key) {
            return (interests, meant.clone());
        }
        let is_meant = |interest: &Interest| interest.event_types.iter().any(|types| types.include(topic));
        let meant: Arc<[usize]> = (0..interests.len()).filter(|at| is_meant(&interests[*at])).collect();
        // One that means nobody takes room as well.
        let size = meant.len() + 1;
        if self.remembered + size > REMEMBERED_MAX {
            self.meant.clear();
            self.remembered = 0;
        }
        self.remembered += size;
        self.meant.insert(key, meant.clone());
        (interests, meant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;
    use uuid::Uuid;

    fn interest(tenant: &str, types: &str) -> Interest {
        Interest {
            subscriber: Uuid::now_v7(),
            tenant: tenant.parse().unwrap(),
            event_types: vec![types.to_owned().try_into().unwrap()],
            filter: None,
            ordering_key: None,
            is_active: true,
            since: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn what_one_tenant_is_sent_is_found_among_its_own() {
        let acme = interest("acme", "order.*");
        let all = vec![interest("other", "order.*"), acme.clone(), interest("acme", "invoice.*")];
        let mut directory = Directory::new(1, all);
        for _ in 0..2 {
            let (interests, meant) = directory.meant_by("acme", "order.paid");
            let found: Vec<Uuid> = meant.iter().map(|at| interests[*at].subscriber).collect();
            assert_eq!(found, [acme.subscriber]);
        }
        assert!(directory.meant_by("nobody", "order.paid").1.is_empty());
        assert_eq!(directory.meant.len(), 1, "of who has no subscribers nothing is remembered");
    }

    #[test]
    fn what_is_remembered_is_bounded_by_matches() {
        let mut directory = Directory::new(1, (0..1_000).map(|_| interest("acme", "*")).collect());
        for number in 0..3_000 {
            assert_eq!(directory.meant_by("acme", &format!("type.{number}")).1.len(), 1_000);
            let remembered: usize = directory.meant.values().map(|meant| meant.len() + 1).sum();
            assert_eq!(remembered, directory.remembered);
            assert!(remembered <= REMEMBERED_MAX);
        }
    }
}
