//! Notifications for operators: the list, and the retry of one.

use pillarbox::database::Database;
use pillarbox::log::message_id_of;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::domain::notification::NotificationStatus;
use crate::error::Error;
use crate::store::notifications::{self as store, NotificationFilter, NotificationRecord};

/// Notifications, newest first, before the id `before`.
pub(crate) async fn list(
    db: &Database,
    filter: &NotificationFilter,
    before: Option<i64>,
    limit: u32,
) -> Result<Vec<NotificationRecord>, Error> {
    Ok(store::list(&mut *db.acquire().await?, filter, before, limit).await?)
}

/// The ids that an event with this id may have here: the id itself, with or without `evt_`, and the one that is derived from the
/// id of a producer.
pub(crate) async fn event_ids_of(db: &Database, event_id: &str) -> Result<Vec<Uuid>, Error> {
    let derived = message_id_of(&mut *db.acquire().await?, event_id).await?;
    let own = event_id.strip_prefix("evt_").unwrap_or(event_id).parse().ok();
    Ok(own.into_iter().chain([derived]).collect())
}

/// Makes a dead or skipped notification due again. Fails if it is neither.
pub(crate) async fn retry(tx: &mut Transaction<'_, Postgres>, id: i64) -> Result<(), Error> {
    match store::lock(tx, id).await?.ok_or(Error::NotificationNotFound)? {
        NotificationStatus::Dead | NotificationStatus::Skipped => Ok(store::retry(tx, id).await?),
        NotificationStatus::Waiting | NotificationStatus::Delivered => Err(Error::NotificationNotDead),
    }
}
