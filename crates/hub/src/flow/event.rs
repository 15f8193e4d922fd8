//! Events, and the messages that they became.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, Utc};
use contracts::SERVICE_SOURCES;
use kit::auth::{Principal, Tenant};
use mailbox::browse::{self, Stretch, Which};
use mailbox::log::{LogRef, Message as Logged};
use mailbox::post::{Post, post};
use serde_json::json;
use serde_json::value::to_raw_value;
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::Hub;
use crate::domain::Outcome;
use crate::error::Error;
use crate::fanout::{CONTROL, GIVE_UP_MESSAGE, SOURCE};
use crate::store::message::{self as store, Attempt, Message};
use crate::store::subscriber;
use crate::view::{EventView, EventWithOutcomes, MessageId, MessageView, OutcomeView};

/// Which events; None is any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked {
    /// This type and what is below it.
    pub(crate) event_type: Option<String>,
    pub(crate) from: Option<DateTime<Utc>>,
    pub(crate) to: Option<DateTime<Utc>>,
}

pub(crate) async fn list(
    hub: &Hub,
    tenant: &Tenant,
    asked: Asked,
    (before, limit): (Option<i64>, u32),
) -> Result<Stretch, Error> {
    let which = Which { topic: asked.event_type, from: asked.from, to: asked.to, ..of(hub, tenant) };
    Ok(browse::page(&mut *hub.db.acquire().await?, &which, before, limit).await?)
}

pub(crate) async fn show(hub: &Hub, tenant: &Tenant, id: Uuid) -> Result<EventWithOutcomes, Error> {
    let mut db = hub.db.acquire().await?;
    let event = find(&mut db, tenant, id).await?.ok_or(Error::NoEvent)?;
    let place = event.place();
    let sent = store::of_event(&mut db, tenant, place, None).await?;
    let unsent = store::unsent(&mut db, tenant, place).await?;
    // What was exported when it was fanned out stays an event, whatever is exported now.
    if sent.is_empty() && unsent.is_empty() && !of(hub, tenant).means(&event) {
        return Err(Error::NoEvent);
    }
    // One that was not sent at first can have been sent by a replay.
    let reached: HashSet<Uuid> = sent.iter().map(|message| message.subscriber).collect();
    let mut outcomes: Vec<_> = sent.into_iter().map(|message| OutcomeView::sent(id, message)).collect();
    outcomes.extend(unsent.into_iter().filter(|one| !reached.contains(&one.subscriber)).map(OutcomeView::from));
    outcomes.sort_by_key(|outcome| outcome.subscriber_id);
    Ok(EventWithOutcomes { event: EventView::whole(event), outcomes })
}

/// A subscriber's messages, newest first, and where the next ones begin.
pub(crate) async fn messages(
    hub: &Hub,
    tenant: &Tenant,
    (subscriber, wanted): (Uuid, Option<Outcome>),
    (before, limit): (Option<i64>, u32),
) -> Result<(Vec<MessageView>, Option<i64>), Error> {
    let mut db = hub.db.acquire().await?;
    if !subscriber::exists(&mut db, tenant, subscriber).await? {
        return Err(Error::NoSubscriber);
    }
    let stretch = store::list(&mut db, subscriber, wanted, (before, limit)).await?;
    let places: Vec<LogRef> = stretch.messages.iter().map(|message| message.place).collect();
    let names = browse::names(&mut db, &places).await?;
    let names: HashMap<i64, (Uuid, String)> =
        names.into_iter().map(|name| (name.place.id, (name.message_id, name.topic))).collect();
    let view = |message: Message| {
        // One event is here twice if it was sent again.
        let name = names.get(&message.place.id).cloned();
        MessageView::new(message, name)
    };
    Ok((stretch.messages.into_iter().map(view).collect(), stretch.before))
}

pub(crate) async fn message(hub: &Hub, tenant: &Tenant, id: MessageId) -> Result<MessageView, Error> {
    let mut db = hub.db.acquire().await?;
    let (event, message) = found(&mut db, tenant, id).await?;
    Ok(MessageView::new(message, Some((event.message_id, event.topic))))
}

pub(crate) async fn attempts(hub: &Hub, tenant: &Tenant, id: MessageId) -> Result<Vec<Attempt>, Error> {
    let mut db = hub.db.acquire().await?;
    let (event, _) = found(&mut db, tenant, id).await?;
    Ok(store::attempts(&mut db, id.subscriber, event.place()).await?)
}

/// Asks the owner of the subscriber's shard to give a message up; it is the one who knows whether that is still possible.
pub(crate) async fn give_up(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &Tenant,
    id: MessageId,
    by: Principal,
) -> Result<(), Error> {
    let (_, message) = found(tx, tenant, id).await?;
    // One that died and blocks its lane is passed over then.
    if message.progress.outcome.is_final() && !message.progress.blocks_lane {
        return Err(Error::Settled(message.progress.outcome));
    }
    let command = json!({"subscriber": id.subscriber, "n": message.n, "by": by.to_string()});
    let payload = to_raw_value(&command).map_err(|error| sqlx::Error::Encode(error.into()))?;
    let command = Post { tenant: tenant.clone(), ..Post::new(GIVE_UP_MESSAGE, payload) };
    post(tx, &CONTROL, &command.with_key(id.subscriber.to_string())).await?;
    tracing::info!(message = %id, %by, "asked to give a message up");
    Ok(())
}

async fn found(db: &mut PgConnection, tenant: &Tenant, id: MessageId) -> Result<(Logged, Message), Error> {
    let event = find(db, tenant, id.event).await?.ok_or(Error::NoMessage)?;
    let message = store::of_event(db, tenant, event.place(), Some(id.subscriber)).await?.pop();
    Ok((event, message.ok_or(Error::NoMessage)?))
}

/// A message of the log that can be an event of this tenant: whether it is one, the setting or what became of it tells.
async fn find(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> Result<Option<Logged>, Error> {
    let can_be = |message: &Logged| {
        message.tenant == tenant.as_str()
            && (message.source == SOURCE.as_str() || SERVICE_SOURCES.contains(&message.source.as_str()))
    };
    Ok(browse::find(db, id).await?.filter(can_be))
}

/// The events of a tenant.
fn of(hub: &Hub, tenant: &Tenant) -> Which {
    let of_tenant = Which { tenant: Some(tenant.as_str().to_owned()), ..Which::default() };
    match tenant.as_str() == Tenant::MAIN && !hub.export.is_empty() {
        true => Which { filter: Some(hub.export.filter(&[SOURCE])), ..of_tenant },
        false => Which { source: Some(SOURCE.as_str().to_owned()), ..of_tenant },
    }
}
