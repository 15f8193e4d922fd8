//! What the events service says it has, against what there is here.

use chrono::{DateTime, Utc};
use contracts::events::EventsStated;
use contracts::joins::{COUNTED, EventCounted, JoinsCounted};
use mailbox::post::{Post, post};
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};

use super::ledger::{Ledger, SOURCE};
use crate::domain::{Actor, Command, News, Order, Outcome};
use crate::error::Error;

/// Brings the picture of these events in line, puts their counts right by the rows, and answers with them. A dry run
/// only answers.
pub(crate) async fn reconcile(
    tx: &mut Transaction<'_, Postgres>,
    stated: &EventsStated,
    now: DateTime<Utc>,
) -> Result<(), Error> {
    let mut orders = Vec::new();
    for event in &stated.events {
        let news = News::from(&event.event);
        if !stated.dry_run {
            orders.push(Order::new(news.event_id, Actor::Events, Command::Learn { news, force: stated.force }));
        }
        orders.push(Order::new(event.event.event_id, Actor::Events, Command::Recount));
    }
    let mut ledger = Ledger::open(tx, &orders).await?;
    let agrees = |ledger: &Ledger, news: &News| {
        ledger.event(news.event_id).is_some_and(|event| event.agrees_with(news, stated.force))
    };
    let mut drifted: Vec<bool> =
        stated.events.iter().map(|event| !agrees(&ledger, &News::from(&event.event))).collect();
    for order in &orders {
        let Ok(outcome) = ledger.apply(order, now) else { continue };
        let at = stated.events.iter().position(|event| event.event.event_id == order.event_id);
        if let (Outcome::Recounted(true), Some(at)) = (outcome, at) {
            drifted[at] = true;
        }
    }
    let counted = |id| ledger.event(id).map(|event| EventCounted { event_id: id, counts: event.counts });
    let events = stated.events.iter().filter_map(|event| counted(event.event.event_id)).collect();
    let drifted = drifted.into_iter().filter(|drifted| *drifted).count() as i32;
    if drifted > 0 {
        metrics::counter!("pillarbox_reconcile_drift_total", "service" => "joins").increment(drifted as u64);
        tracing::warn!(drifted, run = %stated.run, part = stated.part, dry_run = stated.dry_run, "joins had drifted");
    }
    if !stated.dry_run {
        ledger.close(tx).await?;
    }
    let answer = JoinsCounted {
        run: stated.run,
        part: stated.part,
        dry_run: stated.dry_run,
        force: stated.force,
        drifted,
        repaired: if stated.dry_run { 0 } else { drifted },
        events,
    };
    let answer = Post::new(COUNTED, to_raw_value(&answer)?).with_key(stated.run.to_string());
    post(tx, &SOURCE, &answer).await?;
    Ok(())
}
