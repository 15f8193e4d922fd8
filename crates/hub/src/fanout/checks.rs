//! The checks of events that were posted in SQL, against the catalogue of event types and the limit of their tenant.
//!
//! A post in SQL never waits for a check and never fails because of one, so the events are checked here, before the transaction
//! that fans them out begins. Most checks are cheap and made at once. An event whose check may cost more, or whose schema is not
//! compiled yet, is deferred, and with it the later events of its tenant; another thread checks it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pillarbox::consumers::Delivery;
use pillarbox::database::Database;
use pillarbox::log::Tenant;
use pillarbox::log::{LogRef, Message, load_messages};

use super::meaning::is_command;
use crate::error::NoVerdict;
use crate::event_types::cache::{CatalogueCache, CheckError, Checked, Loaded, Refusal};
use crate::event_types::schema::steps::Steps;
use crate::events::selection::EventSelection;
use crate::events::sql_events::SQL_SOURCE;

/// Steps of the checks that are made at once, for each tenant and batch: two milliseconds.
const TENANT_STEPS: u64 = 200_000;
/// Steps of the checks that are made at once in a batch.
const BATCH_STEPS: u64 = 1_000_000;
/// Events of a tenant that are checked together on other threads. Their content is in memory.
pub(super) const CHECKED_TOGETHER_MAX: usize = 20;
/// The pause before a check is repeated because the threads were busy, and how often it is.
const BUSY_PAUSE: Duration = Duration::from_millis(50);
const BUSY_MAX: usize = 100;

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct SqlChecks {
    db: Database,
    catalogue: CatalogueCache,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Counts the calls of [`SqlChecks::reset`]. A check that began before the last one has no effect.
    generation: u64,
    /// The tenants whose events are being checked on other threads.
    tenants: HashSet<String>,
    /// Verdicts about deferred events, by their ids in the log. None: accepted.
    verdicts: HashMap<i64, Option<Refusal>>,
}

/// The verdicts about a batch, by the ids in the log. Events that are accepted, or not checked, are missing.
pub(super) type Verdicts = HashMap<i64, NotAccepted>;

#[derive(Debug)]
pub(super) enum NotAccepted {
    Refused(Refusal),
    /// It has to be checked on other threads.
    Unknown,
}

/// A check on other threads. Dropping it, also in a panic, ends it without a verdict.
struct RunningCheck {
    checks: SqlChecks,
    tenant: String,
    generation: u64,
}

impl Drop for RunningCheck {
    fn drop(&mut self) {
        let mut state = self.checks.state();
        if state.generation == self.generation {
            state.tenants.remove(&self.tenant);
        }
    }
}

impl RunningCheck {
    /// Saves the verdicts, unless [`SqlChecks::reset`] was called since the check began.
    fn save(&self, verdicts: Vec<(i64, Option<Refusal>)>) {
        let mut state = self.checks.state();
        if state.generation == self.generation {
            state.verdicts.extend(verdicts);
        }
    }
}

impl SqlChecks {
    /// `db` is the one of workers: checks do not wait for requests.
    pub(crate) fn new(db: &Database, catalogue: &CatalogueCache) -> SqlChecks {
        SqlChecks { db: db.clone(), catalogue: catalogue.with_database(db), state: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all checks, and forgets their verdicts: another process may have become the one that fans out.
    pub(super) fn reset(&self) {
        let mut state = self.state();
        *state = State { generation: state.generation + 1, ..State::default() };
    }

    /// Checks the events of a batch, as far as that costs little. If the catalogue cannot be read, nothing is known about the events
    /// of that tenant; those of others do not wait for it.
    pub(super) async fn check(&self, events: &EventSelection, items: &[&Delivery]) -> Verdicts {
        let is_checked = |item: &&&Delivery| {
            item.message.source == SQL_SOURCE.as_str() && !is_command(item) && events.is_event(&item.message)
        };
        let messages: Vec<&Message> = items.iter().filter(is_checked).map(|item| &item.message).collect();
        if messages.is_empty() {
            return Verdicts::new();
        }
        self.check_messages(&messages).await
    }

    async fn check_messages(&self, messages: &[&Message]) -> Verdicts {
        let loaded = match self.catalogue.current().await {
            Ok(loaded) => loaded,
            Err(error) => {
                tracing::warn!(%error, "cannot read the event types, so events that were posted in SQL wait");
                return messages.iter().map(|message| (message.id, NotAccepted::Unknown)).collect();
            }
        };
        let (mut verdicts, mut tenants, mut left) = (Verdicts::new(), HashMap::new(), BATCH_STEPS);
        for message in messages.iter().copied() {
            let (tenant, steps) = match tenants.entry(message.tenant.as_str()) {
                std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                std::collections::hash_map::Entry::Vacant(new) => {
                    let tenant = self.checked_tenant(&loaded, &message.tenant).await;
                    new.insert((tenant, Steps::new(TENANT_STEPS)))
                }
            };
            let Some(tenant) = tenant else { continue };
            let mut within = Steps::new(steps.left().min(left));
            let before = within.left();
            let verdict = CatalogueCache::refusal_now(&loaded, tenant, checked(message), message.at, &mut within);
            let spent = before - within.left();
            left -= spent;
            let _ = steps.spend(spent);
            match verdict {
                Some(None) => {}
                Some(Some(refusal)) => drop(verdicts.insert(message.id, NotAccepted::Refused(refusal))),
                None => drop(verdicts.insert(message.id, NotAccepted::Unknown)),
            }
        }
        verdicts
    }

    /// The tenant, if its events are checked. Loads the names of its event types; if that fails, nothing is known about its events.
    async fn checked_tenant(&self, loaded: &Loaded, name: &str) -> Option<Tenant> {
        let tenant = Tenant::try_from(name.to_owned()).ok().filter(|tenant| loaded.checks(tenant))?;
        if let Some(catalogue) = loaded.applied(&tenant)
            && let Err(error) = self.catalogue.load(&catalogue).await
        {
            tracing::warn!(tenant = tenant.as_str(), %error, "cannot read the event types, so events that were posted in SQL wait");
        }
        Some(tenant)
    }

    /// Whether events of a tenant are being checked on other threads.
    pub(super) fn is_running(&self, tenant: &str) -> bool {
        self.state().tenants.contains(tenant)
    }

    /// Removes the verdict about a deferred event, and returns it; Some(None): it is accepted. None: there is none.
    pub(super) fn remove_verdict(&self, log_id: i64) -> Option<Option<Refusal>> {
        self.state().verdicts.remove(&log_id)
    }

    /// Begins a check of a tenant's events. None if one is running.
    fn begin(&self, tenant: &str) -> Option<RunningCheck> {
        let mut state = self.state();
        if !state.tenants.insert(tenant.to_owned()) {
            return None;
        }
        Some(RunningCheck { checks: self.clone(), tenant: tenant.to_owned(), generation: state.generation })
    }

    /// Checks deferred events of a tenant on other threads.
    pub(super) fn start(&self, tenant: &str, events: Vec<LogRef>) {
        let Some(running) = self.begin(tenant) else { return };
        tokio::spawn(async move {
            let RunningCheck { checks, tenant, .. } = &running;
            match checks.verdicts(tenant, &events).await {
                Ok(verdicts) => running.save(verdicts),
                // The next turn of the tenant starts the check again.
                Err(error) => {
                    tracing::warn!(tenant, %error, "cannot check events that were posted in SQL; trying again")
                }
            }
        });
    }

    async fn verdicts(&self, tenant: &str, events: &[LogRef]) -> Result<Vec<(i64, Option<Refusal>)>, CheckError> {
        let messages = load_messages(&mut *self.db.acquire().await?, events).await?;
        let mut messages: HashMap<i64, Message> = messages.into_iter().map(|message| (message.id, message)).collect();
        let mut verdicts = Vec::new();
        for event in events {
            let verdict = match (messages.remove(&event.id), Tenant::try_from(tenant.to_owned())) {
                (Some(message), Ok(tenant)) => self.refusal(&tenant, &message).await?,
                // The turn reports that the log no longer has it.
                (Some(_) | None, _) => None,
            };
            verdicts.push((event.id, verdict));
        }
        Ok(verdicts)
    }

    async fn refusal(&self, tenant: &Tenant, message: &Message) -> Result<Option<Refusal>, CheckError> {
        for _ in 0..BUSY_MAX {
            match self.catalogue.refusal(tenant, checked(message), Some(message.at)).await {
                Err(CheckError::NoVerdict(NoVerdict::Busy)) => tokio::time::sleep(BUSY_PAUSE).await,
                verdict => return verdict,
            }
        }
        Err(NoVerdict::Busy.into())
    }
}

fn checked(message: &Message) -> Checked<'_> {
    Checked { topic: &message.topic, payload: &message.payload }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event_types::cache::tests::{acme, cache_of, catalogue, rival};
    use serde_json::value::RawValue;
    use uuid::Uuid;

    fn checks() -> SqlChecks {
        // Nothing is known about the types of `acme`. `rival` has a type `order.paid`, whose numbers are at most 5.
        let cache =
            cache_of([catalogue(&acme(), None), catalogue(&rival(), Some(("order.paid", r#"{"maximum": 5}"#)))]);
        SqlChecks::new(cache.database(), &cache)
    }

    fn message(id: i64, tenant: &Tenant, payload: &str) -> Message {
        Message {
            id,
            shard: 0,
            message_id: Uuid::nil(),
            source: SQL_SOURCE.as_str().to_owned(),
            tenant: tenant.as_str().to_owned(),
            topic: "order.paid".to_owned(),
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            headers: RawValue::NULL.to_owned(),
            payload: RawValue::from_string(payload.to_owned()).unwrap(),
            at: chrono::Utc::now(),
        }
    }

    #[tokio::test]
    async fn the_events_of_a_tenant_whose_types_cannot_be_read_wait_and_those_of_another_do_not() {
        let messages =
            [message(1, &acme(), "1"), message(2, &rival(), "9"), message(3, &acme(), "9"), message(4, &rival(), "1")];
        let verdicts = checks().check_messages(&messages.each_ref()).await;
        let is_unknown = |id| matches!(verdicts.get(&id), Some(NotAccepted::Unknown));
        assert!(is_unknown(1) && is_unknown(3), "{verdicts:?}");
        assert!(matches!(verdicts.get(&2), Some(NotAccepted::Refused(_))), "{verdicts:?}");
        assert!(!verdicts.contains_key(&4), "{verdicts:?}");
    }

    #[tokio::test]
    async fn a_reset_drops_the_verdicts_of_checks_that_began_before_it() {
        let (checks, accepted) = (checks(), || vec![(1, None)]);
        let early = checks.begin("acme").unwrap();
        assert!(checks.begin("acme").is_none() && checks.is_running("acme"), "one check of a tenant at a time");
        checks.reset();
        assert!(!checks.is_running("acme"));
        let late = checks.begin("acme").unwrap();
        early.save(accepted());
        assert_eq!(checks.remove_verdict(1), None);
        drop(early);
        assert!(checks.is_running("acme"), "the end of an early check does not end the later one");
        late.save(accepted());
        drop(late);
        assert_eq!(checks.remove_verdict(1), Some(None));
        assert!(!checks.is_running("acme"));
    }
}
