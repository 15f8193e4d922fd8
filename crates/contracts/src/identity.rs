//! Messages of the identity service. The key of a message is the id of its user.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The source of these messages.
pub const SOURCE: &str = "identity";

/// Requests to send an e-mail; see [`crate::email::EmailRequested`].
pub const EMAIL_VERIFICATION_REQUESTED: &str = "email.verification.requested";
pub const EMAIL_PASSWORD_RESET_REQUESTED: &str = "email.password_reset.requested";
pub const EMAIL_PASSWORD_CHANGED: &str = "email.password.changed";
/// Somebody tried to register with the address of an account.
pub const EMAIL_ACCOUNT_EXISTS: &str = "email.account.exists";

/// An account was deleted. Every service deletes the personal data of the user.
pub const ACCOUNT_DELETED: &str = "account.deleted";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AccountDeleted {
    pub user_id: Uuid,
}
