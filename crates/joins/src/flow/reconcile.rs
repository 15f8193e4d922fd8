//! What the events service says it has, against what there is here.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use contracts::events::{EventRestated, EventVersions};
use contracts::joins::{COUNTED, JoinsCounted, Wanted};
use kit::clock::Clock;
use mailbox::post::{Post, post};
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use super::ledger::SOURCE;
use super::settle;
use crate::domain::{Actor, Command, News, Order, Standing, Told};
use crate::error::Error;
use crate::store::standing::standings;

/// So many are counted by one statement, so that large events keep it within its time.
const LOOK_AT_ONCE: usize = 50;

/// Answers with what differs. Nothing is changed, and nobody waits: what is to be put right is said again by the events service,
/// one event at a time.
pub(crate) async fn compare(
    tx: &mut Transaction<'_, Postgres>,
    stated: &EventVersions,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let ids: Vec<Uuid> = stated.events.iter().map(|event| event.event_id).collect();
    let mut here: HashMap<Uuid, Standing> = HashMap::new();
    for some in ids.chunks(LOOK_AT_ONCE) {
        here.extend(standings(tx, some).await?);
    }
    let (mut drifted, mut told_wrong, mut wanted) = (0, Vec::new(), Vec::new());
    for event in &stated.events {
        let here = here.get(&event.event_id);
        let found = Standing::compare(here, event, now);
        drifted += i32::from(found.is_miscounted);
        told_wrong.extend(found.is_told_wrong);
        let in_any_case = || Wanted { event_id: event.event_id, version: here.map_or(0, |here| here.event_version) };
        wanted.extend(found.wanted.or_else(|| stated.force.then(in_any_case)));
    }
    let answer = JoinsCounted {
        run: stated.run,
        part: stated.part,
        dry_run: stated.dry_run,
        force: stated.force,
        checked: stated.events.len() as i32,
        drifted,
        repaired: if stated.dry_run { 0 } else { drifted },
        events: told_wrong,
        wanted,
    };
    let answer = Post::new(COUNTED, to_raw_value(&answer)?).with_key(stated.run.to_string());
    post(tx, &SOURCE, &answer).await?;
    Ok(())
}

/// An event is said again because it was not known as it is, or its participants were not.
pub(crate) async fn put_right(
    tx: &mut Transaction<'_, Postgres>,
    clock: &Clock,
    restated: &EventRestated,
) -> Result<(), Error> {
    let news = News::from(&restated.event);
    let told = Told { active: restated.active_participants, version: restated.count_version };
    // By the rows as they are, before the news move anybody.
    let orders = [Command::Recount { told }, Command::Learn { news }]
        .map(|command| Order::new(restated.event.event_id, Actor::Events, command));
    settle(tx, clock, &orders).await
}
