//! Which of the notifications that are due are delivered alone, and which together.

use std::collections::HashMap;

use uuid::Uuid;

use crate::domain::delivery_rules::{Channel, Rules};
use crate::store::delivery::{Candidate, DigestGroup};

/// Digests of one transaction.
const GROUPS_MAX: usize = 20;

/// How candidates are delivered.
#[derive(Default)]
pub(super) struct Plan {
    /// Notifications to users without a contact.
    pub(super) unreachable: Vec<i64>,
    pub(super) alone: Vec<i64>,
    pub(super) webhook_users: Vec<Uuid>,
    pub(super) digests: Vec<DigestGroup>,
    /// Whether digests that are due are left to the next round.
    pub(super) has_more: bool,
}

impl Plan {
    pub(super) fn new(candidates: &[Candidate], rules: &HashMap<String, Rules>) -> Plan {
        let mut plan = Plan::default();
        for candidate in candidates {
            let event_type = candidate.event_type.as_ref();
            // A failure must not end the collection of the others early.
            let is_digest = candidate.channel == Channel::Email
                && !candidate.was_tried
                && event_type.and_then(|event_type| rules.get(event_type)).is_some_and(Rules::is_digest);
            match event_type {
                Some(_) if !candidate.has_contact => plan.unreachable.push(candidate.id),
                Some(event_type) if is_digest => {
                    let group = DigestGroup { user_id: candidate.user_id, event_type: event_type.clone() };
                    if plan.digests.contains(&group) {
                        continue;
                    }
                    if plan.digests.len() < GROUPS_MAX {
                        plan.digests.push(group);
                    } else {
                        plan.has_more = true;
                    }
                }
                Some(_) if candidate.channel == Channel::Webhook => {
                    plan.webhook_users.push(candidate.user_id);
                }
                Some(_) | None => plan.alone.push(candidate.id),
            }
        }
        plan
    }
}
