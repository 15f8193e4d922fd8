//! Deleted accounts: the projects of their users are deleted.

use contracts::identity::AccountDeleted;
use kit::auth::Principal;
use mailbox::log::Message;
use sqlx::{Postgres, Transaction};

use crate::Progress;
use crate::error::Error;
use crate::store::project as store;

/// Projects per statement.
const BATCH: i64 = 1_000;

/// Deletes the projects of the user whose account was deleted, unfinished ones and archived ones. They have no owner from now on,
/// and retention deletes them with their items next. Counts in Redis are deleted first: if that fails, the message is tried again.
pub(crate) async fn delete_projects(
    progress: &Progress,
    tx: &mut Transaction<'static, Postgres>,
    message: &Message,
) -> Result<(), Error> {
    let deleted: AccountDeleted = serde_json::from_str(message.payload.get())?;
    let owner = Principal::User(deleted.user_id).to_string();
    loop {
        let ids = store::disown(tx, &owner, BATCH).await?;
        progress.state.delete(&ids).await?;
        for id in &ids {
            progress.projects.invalidate(id).await;
        }
        if (ids.len() as i64) < BATCH {
            return Ok(());
        }
    }
}
