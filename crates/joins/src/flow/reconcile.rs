//! Reconciliation: compares what the events service reports with the registrations of this service.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use contracts::events::{EventRestated, EventVersions};
use contracts::joins::{COUNTED, JoinsCounted, RestateRequest};
use pillarbox::log::{Post, post};
use runtime::clock::Clock;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::command_batch::{SOURCE, execute, new_command};
use crate::domain::{Actor, CommandKind, EventUpdate, KnownEvent, ReportedCount};
use crate::error::Error;
use crate::store::reconciliation::load_known_events;

/// Maximum number of events that one statement counts, so that large events do not exceed the statement timeout.
const EVENTS_PER_STATEMENT: usize = 50;

/// Compares one part of a reconciliation run and posts the differences. Changes and locks no event: the events service
/// restates the events that differ, one at a time, and [`repair`] handles each of them. Fails if the database
/// fails or the reply cannot be posted.
pub(crate) async fn compare(
    tx: &mut Transaction<'_, Postgres>,
    reported: &EventVersions,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let ids: Vec<Uuid> = reported.events.iter().map(|event| event.event_id).collect();
    let mut known: HashMap<Uuid, KnownEvent> = HashMap::new();
    for chunk in ids.chunks(EVENTS_PER_STATEMENT) {
        known.extend(load_known_events(tx, chunk).await?.into_iter().map(|event| (event.event_id, event)));
    }
    let (mut drifted, mut corrections, mut restates) = (0, Vec::new(), Vec::new());
    for event in &reported.events {
        let known = known.get(&event.event_id);
        let found = KnownEvent::compare(known, event, now);
        drifted += i32::from(found.is_miscounted);
        corrections.extend(found.correction);
        let forced =
            || RestateRequest { event_id: event.event_id, version: known.map_or(0, |known| known.event_version) };
        restates.extend(found.restate.or_else(|| reported.force.then(forced)));
    }
    let reply = JoinsCounted {
        run: reported.run,
        part: reported.part,
        dry_run: reported.dry_run,
        force: reported.force,
        checked: reported.events.len() as i32,
        drifted,
        repaired: if reported.dry_run { 0 } else { drifted },
        events: corrections,
        wanted: restates,
    };
    let reply = Post::new(COUNTED, to_raw_value(&reply)?).with_key(reported.run.to_string());
    post(tx, &SOURCE, &reply).await?;
    Ok(())
}

/// Repairs one event after the events service has restated it: corrects the counts and applies the event's current
/// state. Fails if the database fails or a message cannot be posted.
pub(crate) async fn repair(
    tx: &mut Transaction<'_, Postgres>,
    clock: &Clock,
    restated: &EventRestated,
) -> Result<(), Error> {
    let update = EventUpdate::from(&restated.event);
    let reported = ReportedCount { active: restated.active_participants, version: restated.count_version };
    // Recount first: the rows were counted before the update promotes or expires registrations.
    let commands = [CommandKind::Recount { reported }, CommandKind::UpdateEvent { update }]
        .map(|kind| new_command(restated.event.event_id, Actor::Events, kind));
    execute(tx, clock, &commands).await
}
