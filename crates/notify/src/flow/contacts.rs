//! How to reach users: from the messages of identity, or imported.

use contracts::identity::ContactChanged;
use pillarbox::log::Message;
use sqlx::{PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::error::EventError;
use crate::store::recipients::{self as store, NewContact};
use crate::store::unreachable;

/// Of the notifications that wait for the contact of a user, so many are due when it arrives, and the others when they are
/// read for the last time: one transaction must not update a million of them.
const WOKEN_MAX: i64 = 1_000;

/// Saves the contacts of accounts. Of several messages about one account, the one with the highest version counts.
pub(crate) async fn save_contacts(
    tx: &mut Transaction<'static, Postgres>,
    messages: &[&Message],
) -> Result<(), EventError> {
    let mut contacts = Vec::with_capacity(messages.len());
    // A blanked message was processed before, or not in time.
    for message in messages.iter().filter(|message| !message.is_blanked()) {
        // The parser's error may quote a value.
        let changed: ContactChanged = serde_json::from_str(message.payload.get()).map_err(|_| EventError::NoContact)?;
        contacts.push(NewContact {
            user_id: changed.user_id,
            email: Some(changed.email),
            name: Some(changed.name),
            locale: Some(changed.locale),
            tenant: None,
            version: changed.version,
        });
    }
    contacts.sort_by_key(|contact| (contact.user_id, std::cmp::Reverse(contact.version)));
    contacts.dedup_by_key(|contact| contact.user_id);
    wake_waiting(tx, &contacts).await?;
    Ok(store::save_contacts(tx, &contacts).await?)
}

/// Makes what waits for these contacts due. They are saved afterwards, in the same transaction.
pub(super) async fn wake_waiting(db: &mut PgConnection, contacts: &[NewContact]) -> sqlx::Result<()> {
    let users: Vec<Uuid> = contacts.iter().map(|contact| contact.user_id).collect();
    unreachable::wake(db, &users, WOKEN_MAX).await
}
