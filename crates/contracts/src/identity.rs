//! Messages of the identity service. The key of a message is the id of its user.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The source of these messages.
pub const SOURCE: &str = "identity";

/// The source of [`ACCOUNT_CONTACT_CHANGED`] alone: no other route and no export lists it, so that addresses are
/// published only by the route that belongs to them.
pub const CONTACTS_SOURCE: &str = "identity.contacts";

/// Requests to send an e-mail; see [`crate::email::EmailRequested`].
pub const EMAIL_VERIFICATION_REQUESTED: &str = "email.verification.requested";
pub const EMAIL_PASSWORD_RESET_REQUESTED: &str = "email.password_reset.requested";
pub const EMAIL_PASSWORD_CHANGED: &str = "email.password.changed";
/// A registration was attempted with the address of an account.
pub const EMAIL_ACCOUNT_EXISTS: &str = "email.account.exists";

/// An account was deleted. Every service deletes the personal data of the user.
pub const ACCOUNT_DELETED: &str = "account.deleted";

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AccountDeleted {
    pub user_id: Uuid,
}

/// The address of an account was verified, or the user has changed the name or the locale. It contains personal data, so it is
/// posted as a confidential message, with [`CONTACTS_SOURCE`].
pub const ACCOUNT_CONTACT_CHANGED: &str = "account.contact_changed";

/// How to reach a user. The message with the highest `version` is correct.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContactChanged {
    pub user_id: Uuid,
    /// Increases with every change of the account.
    pub version: i64,
    /// The verified address.
    pub email: String,
    pub name: String,
    /// The language of the user, such as `en` or `pt-BR`.
    pub locale: String,
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
