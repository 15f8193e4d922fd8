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

/// A subscription to a paid plan was created, was cancelled, or has another status. The messages contain ids only, and no
/// personal data.
pub const SUBSCRIPTION_CREATED: &str = "subscription.created";
pub const SUBSCRIPTION_CANCELLED: &str = "subscription.cancelled";
pub const SUBSCRIPTION_STATUS_CHANGED: &str = "subscription.status_changed";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SubscriptionStatus {
    Trialing,
    Active,
    PastDue,
    Paused,
    Cancelled,
    Expired,
}

/// The payload of all messages about subscriptions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SubscriptionChanged {
    pub user_id: Uuid,
    pub subscription_id: Uuid,
    pub plan: String,
    pub status: SubscriptionStatus,
    /// Absent in `subscription.created`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_status: Option<SubscriptionStatus>,
}
