//! JSON of the responses.

use chrono::{DateTime, Utc};
use runtime::secret::Secret;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::{Account, Role, SessionView, Status, Subscription};

/// The answer to a request that is processed later. It is the same for every address.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AcceptedRequest)]
pub(crate) struct Accepted {
    /// `accepted`
    status: &'static str,
    /// The next step for the user.
    detail: &'static str,
}

impl Default for Accepted {
    fn default() -> Accepted {
        Accepted { status: "accepted", detail: "if the address can be used for this, an e-mail is on its way" }
    }
}

/// The answer to the verification of an address.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AddressVerification)]
pub(crate) struct Verification {
    /// Whether the user must set a password with the token of another e-mail before signing in, because the address was
    /// registered more than once.
    pub(crate) password_reset_required: bool,
}

/// The tokens of a session. The refresh token can be used once.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SessionTokens)]
pub(crate) struct Tokens {
    /// For the header `Authorization: Bearer`.
    #[schema(value_type = String)]
    pub(crate) access_token: Secret<String>,
    /// For `POST /identity/v1/refresh`, once.
    #[schema(value_type = String)]
    pub(crate) refresh_token: Secret<String>,
    /// `Bearer`
    pub(crate) token_type: &'static str,
    /// The lifetime of the access token in seconds.
    pub(crate) expires_in: u32,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Account)]
pub(crate) struct AccountView {
    id: Uuid,
    email: String,
    name: String,
    /// The language of e-mails.
    locale: String,
    role: Role,
    is_verified: bool,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    version: i64,
}

impl From<Account> for AccountView {
    fn from(account: Account) -> AccountView {
        AccountView {
            id: account.id,
            email: account.email,
            name: account.name,
            locale: account.locale,
            role: account.role,
            is_verified: account.verified_at.is_some(),
            created_at: account.created_at,
            updated_at: account.updated_at,
            version: account.version,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Session)]
pub(crate) struct SessionItem {
    id: Uuid,
    /// The name that the client gave itself when it signed in.
    #[serde(skip_serializing_if = "Option::is_none")]
    user_agent: Option<String>,
    created_at: DateTime<Utc>,
    /// When its tokens were last refreshed.
    last_used_at: DateTime<Utc>,
    expires_at: DateTime<Utc>,
    /// Whether it is the session of this request.
    is_current: bool,
}

impl SessionItem {
    pub(crate) fn new(view: SessionView, current: Uuid) -> SessionItem {
        let SessionView { session, last_used_at } = view;
        SessionItem {
            id: session.id,
            user_agent: session.user_agent,
            created_at: session.created_at,
            last_used_at,
            expires_at: session.expires_at,
            is_current: session.id == current,
        }
    }
}

/// The role of a user after a change.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = UserRoleChange)]
pub(crate) struct RoleView {
    pub(crate) id: Uuid,
    pub(crate) role: Role,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Subscription)]
pub(crate) struct SubscriptionView {
    id: Uuid,
    user_id: Uuid,
    plan: String,
    status: Status,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    /// When it was cancelled or has expired.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_at: Option<DateTime<Utc>>,
    version: i64,
}

impl From<Subscription> for SubscriptionView {
    fn from(subscription: Subscription) -> SubscriptionView {
        let Subscription { id, user_id, plan, status, created_at, updated_at, ended_at, version } = subscription;
        SubscriptionView { id, user_id, plan, status, created_at, updated_at, ended_at, version }
    }
}

/// The information with which a program verifies our tokens: a part of OpenID Connect Discovery. There are no other endpoints of OpenID
/// Connect.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OpenIdConfiguration {
    /// The `iss` of the tokens.
    pub(crate) issuer: String,
    /// The address of the public keys. It is relative to this server if `public_url` is not set.
    pub(crate) jwks_uri: String,
    /// `public`: `sub` is the id of the user.
    pub(crate) subject_types_supported: [&'static str; 1],
    pub(crate) claims_supported: [&'static str; 8],
}

/// A set of public keys (RFC 7517).
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = JsonWebKeySet)]
pub(crate) struct KeySet {
    keys: Vec<serde_json::Value>,
}
