//! Delivers the notifications that are due: an e-mail is rendered and queued, a webhook becomes a hub event.
//!
//! A round is one transaction: the locked notifications, the e-mails, the hub events and the results commit together, so a
//! crash leaves all of them or none, and nothing is delivered twice. The e-mails of a digest are collected under the lock of
//! the user's contact, so that two processes do not send one each, and so are webhooks, so that two processes do not post
//! those of a user out of order. A notification that cannot be rendered fails alone.

mod batch;
mod contacts;
mod emails;
mod pace;
mod plan;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use contracts::MESSAGE_BYTES_MAX;
use contracts::notify::{NOTIFICATION_TOPIC_PREFIX, NotificationPosted};
use pillarbox::database::{Database, cluster_identity, redacted_error, time};
use pillarbox::log::Post;
use pillarbox::log::Tenant;
use runtime::backoff::Backoff;
use runtime::worker::Round;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use tokio::sync::Mutex;
use uuid::Uuid;

use self::batch::Batch;
pub(crate) use self::emails::EmailTexts;
use self::emails::Member;
use self::pace::Pace;
use self::plan::Plan;
use crate::domain::business_event::BusinessEvent;
use crate::domain::delivery_rules::{Channel, Rules, UserSettings};
use crate::domain::notification::{self, Contact, DeliveryOutcome, DueNotification, NotNow};
use crate::error::DeliveryError;
use crate::store::delivery::{self, Candidate, ClaimedId, Collected, DigestGroup, DigestLimits};
use crate::store::preferences;
use crate::templates::notification as texts;

/// If other processes deliver all that was read, the next ones are read, this often.
const PAGES_MAX: usize = 5;
/// The limits of each digest that one transaction loads.
const DIGEST_LIMITS: DigestLimits =
    DigestLimits { collected: 1_000, shown: texts::DIGEST_ITEMS_MAX as i64, payload_bytes: 512 * 1024 };
/// The payloads of other e-mails that one transaction loads, in bytes, and as much of those of webhooks. So its texts fit into
/// memory, and are rendered long before PostgreSQL ends a transaction that does nothing.
const PAYLOAD_BYTES_MAX: i64 = 4 * 1024 * 1024;
/// After this time, no further text of a batch is rendered, and no further digest. The rest remains due.
const RENDER_TIME_MAX: Duration = Duration::from_secs(1);
/// The pause while other processes deliver everything that is due.
const CONTENDED_PAUSE: Duration = Duration::from_millis(50);

/// The delivery of one process.
pub(crate) struct Deliverer {
    db: Database,
    default_rules: Rules,
    renderer: Arc<Renderer>,
    /// Locked during a round.
    pace: Mutex<Pace>,
}

/// Decides about each notification and renders its text. It does not use the database.
struct Renderer {
    emails: EmailTexts,
    backoff: Backoff,
}

/// The result of a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeliveryRound {
    pub(crate) round: Round,
    /// Whether there are new e-mails for the sender.
    pub(crate) has_mails: bool,
}

/// The data that decides about a batch, read before it is delivered.
struct Known {
    now: DateTime<Utc>,
    rules: HashMap<String, Rules>,
    user_settings: HashMap<Uuid, UserSettings>,
}

impl Deliverer {
    pub(crate) fn new(db: Database, default_rules: Rules, emails: EmailTexts, backoff: Backoff) -> Deliverer {
        let renderer = Arc::new(Renderer { emails, backoff });
        Deliverer { db, default_rules, renderer, pace: Mutex::default() }
    }

    /// Delivers some of the notifications that are due. After a failure the next rounds deliver fewer, until the one
    /// that fails is alone: then only that one fails.
    pub(crate) async fn round(&self) -> Result<DeliveryRound, DeliveryError> {
        let mut pace = self.pace.lock().await;
        let failed = match pace.start() {
            Some(culprit) => Some((culprit, "its delivery takes too long".to_owned())),
            None => match self.deliver_some(&mut pace).await {
                Ok(round) => {
                    pace.succeeded();
                    return Ok(round);
                }
                Err(error) => match pace.failed(&error) {
                    Some(culprit) => Some((culprit, redacted_error(&error))),
                    None => return Err(error),
                },
            },
        };
        if let Some((culprit, error)) = failed {
            self.save_failure(&culprit, &error).await?;
            pace.succeeded();
        }
        Ok(DeliveryRound { round: Round::Busy, has_mails: false })
    }

    async fn deliver_some(&self, pace: &mut Pace) -> Result<DeliveryRound, DeliveryError> {
        let mut tx = self.db.begin().await?;
        // A copy of the database must not send what the original sends.
        if cluster_identity::is_restored(&mut tx).await? {
            return Ok(DeliveryRound { round: Round::Idle, has_mails: false });
        }
        let (mut after, mut is_contended) = (None, false);
        let mut only_direct = pace.prefers_direct();
        for _ in 0..PAGES_MAX {
            let mut candidates = delivery::candidates(&mut tx, only_direct, after, pace.size()).await?;
            if candidates.is_empty() && only_direct {
                (only_direct, after) = (false, None);
                candidates = delivery::candidates(&mut tx, only_direct, after, pace.size()).await?;
            }
            let Some(last) = candidates.last() else { break };
            after = Some((last.due_at, last.id));
            pace.delivers(&candidates);
            let batch = self.deliver(&mut tx, &candidates, pace.size()).await?;
            if batch.is_empty() {
                is_contended = true;
                continue;
            }
            batch.save(&mut tx).await?;
            tx.commit().await?;
            batch.report();
            let is_full = only_direct || candidates.len() as i64 == pace.size() || batch.has_more;
            let round = if is_full { Round::Busy } else { Round::Idle };
            return Ok(DeliveryRound { round, has_mails: !batch.mails.is_empty() });
        }
        let round = if is_contended { Round::IdleFor(CONTENDED_PAUSE) } else { Round::Idle };
        Ok(DeliveryRound { round, has_mails: false })
    }

    /// Locks and delivers those of the candidates that no other process delivers.
    async fn deliver(
        &self,
        tx: &mut Transaction<'_, Postgres>,
        candidates: &[Candidate],
        limit: i64,
    ) -> Result<Batch, DeliveryError> {
        let types: Vec<String> = candidates.iter().filter_map(|candidate| candidate.event_type.clone()).collect();
        let mut rules = preferences::rules_of(tx, &types, &self.default_rules).await?;
        let Plan { unreachable, alone, mut webhook_users, digests: mut groups, has_more } =
            Plan::new(candidates, &rules);
        let mut batch = Batch { has_more, ..Batch::default() };
        if !unreachable.is_empty() {
            let are_many = candidates.len() as i64 == limit && unreachable.len() * 2 >= candidates.len();
            batch.put_off = contacts::put_off(tx, &unreachable, are_many).await?;
        }
        let mut users: Vec<Uuid> = groups.iter().map(|group| group.user_id).chain(webhook_users.clone()).collect();
        users.sort_unstable();
        users.dedup();
        let locked = if users.is_empty() { users } else { delivery::lock_contacts(tx, &users).await? };
        groups.retain(|group| locked.binary_search(&group.user_id).is_ok());
        webhook_users.sort_unstable();
        webhook_users.dedup();
        webhook_users.retain(|user| locked.binary_search(user).is_ok());
        let mut claimed =
            if alone.is_empty() { Vec::new() } else { delivery::claim(tx, &alone, PAYLOAD_BYTES_MAX).await? };
        batch.has_more |= has_reached_limit(&claimed);
        if !webhook_users.is_empty() {
            let webhooks = delivery::claim_webhooks(tx, &webhook_users, limit, PAYLOAD_BYTES_MAX).await?;
            batch.has_more |= has_reached_limit(&webhooks);
            claimed.extend(webhooks);
        }
        let of_claimed = claimed.iter().filter_map(|notification| notification.event.as_ref());
        let types: Vec<String> = of_claimed.map(|event| event.event_type.clone()).collect();
        if types.iter().any(|event_type| !rules.contains_key(event_type)) {
            rules.extend(preferences::rules_of(tx, &types, &self.default_rules).await?);
        }
        let of_groups = groups.iter().map(|group| group.user_id);
        let users: Vec<Uuid> = claimed.iter().map(|notification| notification.user_id).chain(of_groups).collect();
        let user_settings = preferences::load_users(tx, &users).await?.settings;
        let known = Known { now: time::now(tx).await?, rules, user_settings };
        let digests = collect_digests(tx, groups, &known, &mut batch).await?;
        self.render(claimed, digests, known, batch).await
    }

    /// Renders texts on a thread for such work: requests do not wait for a large digest. Neither does a process that stops:
    /// the next round renders the texts that take too long.
    async fn render(
        &self,
        claimed: Vec<DueNotification>,
        digests: Vec<Vec<DueNotification>>,
        known: Known,
        mut batch: Batch,
    ) -> Result<Batch, DeliveryError> {
        let renderer = Arc::clone(&self.renderer);
        let rendering = tokio::task::spawn_blocking(move || {
            let started = Instant::now();
            let rendered = claimed.iter().take_while(|_| started.elapsed() < RENDER_TIME_MAX);
            let rendered = rendered.map(|one| renderer.deliver_alone(one, &known, &mut batch)).count();
            batch.has_more |= rendered < claimed.len();
            let started = Instant::now();
            let rendered = digests.iter().take_while(|_| started.elapsed() < RENDER_TIME_MAX);
            let rendered = rendered.map(|digest| renderer.deliver_digest(digest, &known, &mut batch)).count();
            batch.has_more |= rendered < digests.len();
            batch
        });
        rendering.await.map_err(|error| DeliveryError::Rendering(error.to_string()))
    }

    /// Saves that a notification has made its transaction fail. If a digest would have collected it, all e-mails of the
    /// digest fail with it, and become separate ones.
    async fn save_failure(&self, culprit: &Candidate, error: &str) -> Result<(), DeliveryError> {
        tracing::warn!(notification = culprit.id, error, "a notification makes the transaction fail that delivers it");
        let mut tx = self.db.begin().await?;
        let now = time::now(&mut tx).await?;
        let types = Vec::from_iter(culprit.event_type.clone());
        let rules = preferences::rules_of(&mut tx, &types, &self.default_rules).await?;
        let plan = Plan::new(std::slice::from_ref(culprit), &rules);
        let failed = match (plan.digests.first(), plan.webhook_users.first()) {
            (Some(group), _) => delivery::claim_digest_ids(&mut tx, group, DIGEST_LIMITS.collected).await?,
            (None, Some(user)) => delivery::claim_first_webhook_id(&mut tx, *user).await?,
            (None, None) => delivery::claim_id(&mut tx, culprit.id).await?,
        };
        let mut batch = Batch::default();
        for ClaimedId { id, attempts } in failed {
            let outcome = DeliveryOutcome::Failed(error.to_owned());
            let result = notification::after(id, attempts, outcome, now, self.renderer.backoff, rand::random());
            batch.results.push((culprit.channel, result));
        }
        batch.save(&mut tx).await?;
        tx.commit().await?;
        batch.report();
        Ok(())
    }
}

/// Whether more payloads may be left than one transaction loads: another one of the largest size would not fit.
fn has_reached_limit(claimed: &[DueNotification]) -> bool {
    let sizes = claimed.iter().filter_map(|notification| Some(notification.event.as_ref()?.payload.get().len()));
    sizes.sum::<usize>() + MESSAGE_BYTES_MAX > PAYLOAD_BYTES_MAX as usize
}

/// Loads digests, except those that are not wanted now.
async fn collect_digests(
    tx: &mut Transaction<'_, Postgres>,
    groups: Vec<DigestGroup>,
    known: &Known,
    batch: &mut Batch,
) -> Result<Vec<Vec<DueNotification>>, DeliveryError> {
    let (mut wanted, mut settled) = (Vec::new(), Vec::new());
    for group in groups {
        match known.check_user_settings(group.user_id, &group.event_type, Channel::Email) {
            Ok(()) => wanted.push(group),
            Err(outcome) => settled.push((group, outcome)),
        }
    }
    if !settled.is_empty() {
        batch.put_off.add(delivery::put_off(tx, &settled, DIGEST_LIMITS.collected).await?);
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    Ok(grouped(delivery::collect(tx, &wanted, DIGEST_LIMITS).await?).collect())
}

impl Renderer {
    fn deliver_alone(&self, notification: &DueNotification, known: &Known, batch: &mut Batch) {
        let outcome = match (notification.channel, known.check(notification)) {
            (_, Err(outcome)) => outcome,
            (Channel::Email, Ok((event, contact))) => {
                let draft = self.emails.draft(notification, event, contact, known.is_critical(event));
                match draft.and_then(|draft| self.emails.single(&draft, known.now)) {
                    Ok(mail) => {
                        batch.mails.push(mail);
                        DeliveryOutcome::Delivered
                    }
                    Err(outcome) => outcome,
                }
            }
            (Channel::Webhook, Ok((event, contact))) => match hub_event(notification, event, contact) {
                Ok(event) => {
                    batch.hub_events.push(event);
                    DeliveryOutcome::Delivered
                }
                Err(outcome) => outcome,
            },
            (Channel::InApp, Ok(_)) => DeliveryOutcome::Delivered,
        };
        self.finish(notification, outcome, known, batch);
    }

    /// Delivers the notifications of one user and one event type as one e-mail. Those that fail do so alone. If the e-mail
    /// cannot be rendered, each becomes a separate e-mail, and those that were only counted are left to the next round.
    fn deliver_digest(&self, group: &[DueNotification], known: &Known, batch: &mut Batch) {
        if let [only] = group {
            return self.deliver_alone(only, known, batch);
        }
        let (shown, counted): (Vec<_>, Vec<_>) = group.iter().partition(|notification| notification.event.is_some());
        let mut members: Vec<Member<'_>> = Vec::new();
        for notification in shown {
            let member = known.check(notification).and_then(|(event, contact)| {
                let draft = self.emails.draft(notification, event, contact, known.is_critical(event))?;
                self.emails.member(draft)
            });
            match member {
                Ok(member) => members.push(member),
                Err(outcome) => self.finish(notification, outcome, known, batch),
            }
        }
        let digest = match members.as_slice() {
            [] => return,
            [_] if counted.is_empty() => None,
            _ => match self.emails.digest(&members, counted.len(), known.now) {
                Ok(mail) => Some(mail),
                Err(error) => {
                    tracing::warn!(%error, "a digest cannot be rendered: its notifications become separate e-mails");
                    None
                }
            },
        };
        if let Some(mail) = digest {
            batch.mails.push(mail);
            for notification in members.iter().map(|member| member.draft.notification).chain(counted) {
                self.finish(notification, DeliveryOutcome::Delivered, known, batch);
            }
            return;
        }
        for Member { draft, .. } in &members {
            let outcome = match self.emails.single(draft, known.now) {
                Ok(mail) => {
                    batch.mails.push(mail);
                    DeliveryOutcome::Delivered
                }
                Err(outcome) => outcome,
            };
            self.finish(draft.notification, outcome, known, batch);
        }
    }

    fn finish(&self, notification: &DueNotification, outcome: DeliveryOutcome, known: &Known, batch: &mut Batch) {
        let result = notification.after(outcome, known.now, self.backoff, rand::random());
        batch.results.push((notification.channel, result));
    }
}

impl Known {
    /// Checks again what may have changed since the notification was created. Fails with what follows if it is not
    /// delivered now.
    fn check<'n>(
        &self,
        notification: &'n DueNotification,
    ) -> Result<(&'n BusinessEvent, &'n Contact), DeliveryOutcome> {
        if notification.has_deleted_account {
            return Err(DeliveryOutcome::Skipped("the account was deleted"));
        }
        let event = notification.event.as_ref().ok_or(DeliveryOutcome::Skipped("the event was deleted"))?;
        self.check_user_settings(notification.user_id, &event.event_type, notification.channel)?;
        match &notification.contact {
            Some(contact) => Ok((event, contact)),
            // It was deleted after the notification was read.
            None => Err(DeliveryOutcome::Postponed(self.now)),
        }
    }

    fn is_critical(&self, event: &BusinessEvent) -> bool {
        self.rules.get(&event.event_type).is_some_and(|rules| rules.critical)
    }

    /// Checks whether the event type still has the channel, and whether the user wants it, now.
    fn check_user_settings(&self, user: Uuid, event_type: &str, channel: Channel) -> Result<(), NotNow> {
        let rules = self.rules.get(event_type);
        if rules.is_some_and(|rules| !rules.channels.contains(&channel)) {
            return Err(NotNow::Skipped("the event type no longer has this channel"));
        }
        if !rules.is_some_and(|rules| rules.critical)
            && let Some(user_settings) = self.user_settings.get(&user)
        {
            if !user_settings.wants(event_type, channel) {
                return Err(NotNow::Skipped("the user has muted it"));
            }
            if channel == Channel::Email
                && let Some(end) = user_settings.quiet_until(self.now)
            {
                return Err(NotNow::Postponed(end));
            }
        }
        Ok(())
    }
}

/// The hub event of a notification. Fails if it cannot be posted.
fn hub_event(
    notification: &DueNotification,
    event: &BusinessEvent,
    contact: &Contact,
) -> Result<Post, DeliveryOutcome> {
    let tenant = contact.tenant.as_deref().ok_or(DeliveryOutcome::Skipped("the user has no tenant"))?;
    let tenant: Tenant = tenant.parse().map_err(|_| DeliveryOutcome::Skipped("the tenant of the user is invalid"))?;
    if !contact.is_tenant_known {
        return Err(DeliveryOutcome::Skipped("the tenant of the user does not exist: create it, then retry"));
    }
    let failed = |error: &dyn std::fmt::Display| DeliveryOutcome::Failed(error.to_string());
    let payload = to_raw_value(&NotificationPosted {
        event_id: contracts::EventId(event.id),
        event_type: event.event_type.clone(),
        aggregate_type: event.aggregate_type.clone(),
        aggregate_id: event.aggregate_id,
        user_id: notification.user_id,
        payload: event.payload.clone(),
    });
    let topic = format!("{NOTIFICATION_TOPIC_PREFIX}{}", event.event_type);
    let mut post =
        Post::new(topic, payload.map_err(|error| failed(&error))?).with_key(notification.user_id.to_string());
    post.tenant = tenant;
    // Here, because an invalid message would fail the whole batch.
    post.check().map_err(|error| failed(&error))?;
    Ok(post)
}

/// The notifications by user and event type, each in the order of their ids.
fn grouped(collected: Vec<Collected>) -> impl Iterator<Item = Vec<DueNotification>> {
    let mut groups: BTreeMap<(Uuid, String), Vec<DueNotification>> = BTreeMap::new();
    for Collected { group, notification } in collected {
        groups.entry((group.user_id, group.event_type)).or_default().push(notification);
    }
    groups.into_values()
}
