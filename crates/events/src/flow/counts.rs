//! Stores participant counts that the joins service has published.

use std::collections::BTreeMap;

use contracts::joins::Count;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::store::event as store;

/// Saves the counts of these events. A stored count with the same or a higher version stays.
pub(crate) async fn save(tx: &mut PgConnection, newest: &BTreeMap<Uuid, Count>) -> sqlx::Result<()> {
    if newest.is_empty() { Ok(()) } else { store::save_counts(tx, newest).await }
}
