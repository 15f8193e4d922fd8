//! Creating, showing, cancelling and changing subscriptions.

use chrono::{DateTime, Utc};
use contracts::identity::{SUBSCRIPTION_CANCELLED, SUBSCRIPTION_CREATED, SUBSCRIPTION_STATUS_CHANGED};
use http_kit::etag::IfMatch;
use pillarbox::log::{AggregateId, Post, post};
use serde_json::value::to_raw_value;
use uuid::Uuid;

use super::Tx;
use super::email::MESSAGE_SOURCE;
use crate::Identity;
use crate::domain::{Status, Subscription};
use crate::error::Error;
use crate::store::{account, subscription as store};

const AGGREGATE_TYPE: &str = "SUBSCRIPTION";
/// The number of subscriptions of a user that have not ended.
const LIVE_MAX: i64 = 20;

/// Who may act on a subscription.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Actor {
    /// On their own ones only. Those of others do not exist for them.
    User(Uuid),
    Operator,
}

impl Actor {
    fn sees(self, subscription: &Subscription) -> bool {
        match self {
            Actor::User(user) => subscription.user_id == user,
            Actor::Operator => true,
        }
    }
}

/// Creates a subscription. Fails if the user has a live one to the same plan.
pub(crate) async fn create(
    tx: &mut Tx<'_>,
    user: Uuid,
    plan: String,
    now: DateTime<Utc>,
) -> Result<Subscription, Error> {
    // The lock makes the number exact, and the account exists until the end of the transaction.
    account::lock(tx, user).await?.ok_or(Error::SessionEnded)?;
    if store::count_live(tx, user).await? >= LIVE_MAX {
        return Err(Error::TooManySubscriptions(LIVE_MAX));
    }
    let new = Subscription::new(Uuid::now_v7(), user, plan, now);
    if !store::insert(tx, &new).await? {
        return Err(Error::SubscriptionExists);
    }
    post_change(tx, SUBSCRIPTION_CREATED, &new, None).await?;
    Ok(new)
}

pub(crate) async fn show(identity: &Identity, actor: Actor, id: Uuid) -> Result<Subscription, Error> {
    let found = store::find(&mut *identity.db.acquire().await?, id).await?;
    found.filter(|found| actor.sees(found)).ok_or(Error::SubscriptionNotFound)
}

/// The subscriptions of a user, newest first.
pub(crate) async fn list(
    identity: &Identity,
    user: Uuid,
    before: Option<(DateTime<Utc>, Uuid)>,
    limit: u32,
) -> Result<Vec<Subscription>, Error> {
    Ok(store::list(&mut *identity.db.acquire().await?, user, before, limit).await?)
}

/// Changes the status. The status that it has already changes nothing, because billing systems repeat their messages; but a user
/// cannot cancel twice. Fails if the subscription has changed since `if_match`, or its status does not allow it.
pub(crate) async fn change_status(
    tx: &mut Tx<'_>,
    actor: Actor,
    id: Uuid,
    status: Status,
    if_match: &IfMatch,
    now: DateTime<Utc>,
) -> Result<Subscription, Error> {
    let old = store::lock(tx, id).await?.filter(|found| actor.sees(found)).ok_or(Error::SubscriptionNotFound)?;
    if_match.check(old.version, old.updated_at).map_err(Error::PreconditionFailed)?;
    if matches!(actor, Actor::Operator) && old.status == status {
        return Ok(old);
    }
    let new = old.change_to(status, now)?;
    store::update(tx, &new).await?;
    let topic = match status {
        Status::Cancelled => SUBSCRIPTION_CANCELLED,
        Status::Trialing | Status::Active | Status::PastDue | Status::Paused | Status::Expired => {
            SUBSCRIPTION_STATUS_CHANGED
        }
    };
    post_change(tx, topic, &new, Some(old.status)).await?;
    Ok(new)
}

/// Posts a message about a subscription. Its key is the user's id, so that the messages about a user stay in order.
pub(super) async fn post_change(
    tx: &mut Tx<'_>,
    topic: &str,
    subscription: &Subscription,
    previous: Option<Status>,
) -> Result<(), Error> {
    let payload = to_raw_value(&subscription.to_message(previous))?;
    let mut message = Post::new(topic, payload).with_key(subscription.user_id.to_string());
    message.aggregate_type = Some(AGGREGATE_TYPE.to_owned());
    message.aggregate_id = Some(AggregateId::Text(subscription.id.to_string()));
    post(tx, &MESSAGE_SOURCE, &message).await?;
    Ok(())
}
