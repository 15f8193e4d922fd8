//! The caller of a request: its principal, tenant and role, and the extractors that give it to a handler.
//!
//! Each role includes the previous one: `ingest`, `manage`, `admin`. A caller acts within its tenant; only an admin of
//! [`Tenant::main`] is an operator of the whole installation.

use std::fmt;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use http::StatusCode;
use http::request::Parts;
use pillarbox::log::{Tenant, TenantStanding};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::problem::Problem;

/// The permissions of a caller. Each role includes the previous ones.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ToSchema,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[schema(as = ApiKeyRole)]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownRole, parse_err_fn = unknown_role)]
pub enum Role {
    /// Post events.
    Ingest,
    /// Manage the resources of a tenant: subscribers, dead letters, replays.
    Manage,
    /// Manage API keys and operate the installation.
    Admin,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A text that does not name a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be ingest, manage or admin")]
pub struct UnknownRole;

fn unknown_role(_: &str) -> UnknownRole {
    UnknownRole
}

/// The identity of a caller: a user, an API key or a portal token. As text: `user:<id>`, `key:<id>` or `portal:<id>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub enum Principal {
    User(Uuid),
    Key(Uuid),
    Portal(Uuid),
}

impl Principal {
    /// Returns the id of the user, of the key or of the portal token.
    pub fn id(self) -> Uuid {
        match self {
            Principal::User(id) | Principal::Key(id) | Principal::Portal(id) => id,
        }
    }

    pub fn is_key(self) -> bool {
        matches!(self, Principal::Key(_))
    }
}

/// A text that does not identify a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be user:, key: or portal: followed by a UUID")]
pub struct InvalidPrincipal;

impl TryFrom<String> for Principal {
    type Error = InvalidPrincipal;

    fn try_from(text: String) -> Result<Principal, InvalidPrincipal> {
        let parsed = text.split_once(':').and_then(|(kind, id)| {
            let id = id.parse().ok()?;
            match kind {
                "user" => Some(Principal::User(id)),
                "key" => Some(Principal::Key(id)),
                "portal" => Some(Principal::Portal(id)),
                _ => None,
            }
        });
        parsed.ok_or(InvalidPrincipal)
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Principal::User(id) => write!(f, "user:{id}"),
            Principal::Key(id) => write!(f, "key:{id}"),
            Principal::Portal(id) => write!(f, "portal:{id}"),
        }
    }
}

/// What a portal token allows within the routes that act for a tenant.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, strum::EnumString, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownAccess, parse_err_fn = unknown_access)]
pub enum PortalAccess {
    /// Read the resources of the tenant.
    Read,
    /// Read and change them.
    Manage,
}

impl PortalAccess {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A text that does not name what a portal token allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be read or manage")]
pub struct UnknownAccess;

fn unknown_access(_: &str) -> UnknownAccess {
    UnknownAccess
}

/// An authenticated caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub principal: Principal,
    /// The tenant that the request acts for.
    pub tenant: Tenant,
    /// None for an ordinary user, who may access only their own resources, and for a portal token.
    pub role: Option<Role>,
    /// The session of a user who has signed in to this installation. None for API keys and for other tokens.
    pub session: Option<Uuid>,
    /// What the portal token allows. None for every other caller.
    pub portal: Option<PortalAccess>,
    pub standing: TenantStanding,
}

impl Caller {
    /// Returns a caller without a session, whose tenant has the default limits.
    pub fn new(principal: Principal, tenant: Tenant, role: Option<Role>) -> Caller {
        Caller { principal, tenant, role, session: None, portal: None, standing: TenantStanding::default() }
    }

    /// Fails with 403 if the tenant is suspended.
    pub fn require_active_tenant(&self) -> Result<(), Problem> {
        if self.standing.is_suspended { Err(tenant_suspended(&self.tenant)) } else { Ok(()) }
    }

    /// Fails with 403 unless the caller has this role or one that includes it.
    pub fn require(&self, role: Role) -> Result<(), Problem> {
        if self.role >= Some(role) {
            return Ok(());
        }
        // A person has a token at hand, and needs to know that it is the wrong credential.
        let hint = match (self.user_id(), role) {
            (Some(_), Role::Ingest | Role::Manage) => ": use an API key that has it, not a user's token",
            (Some(_), Role::Admin) | (None, _) => "",
        };
        Err(Problem::forbidden(format!("this request requires the role {role}{hint}")))
    }

    /// Returns true for an admin of the whole installation; an admin of another tenant is not an operator.
    pub fn is_operator(&self) -> bool {
        self.role == Some(Role::Admin) && self.tenant == Tenant::main()
    }

    /// Returns the id of the user; None if the caller uses an API key.
    pub fn user_id(&self) -> Option<Uuid> {
        match self.principal {
            Principal::User(id) => Some(id),
            Principal::Key(_) | Principal::Portal(_) => None,
        }
    }
}

/// The problem of a request for a tenant that an operator has suspended.
pub fn tenant_suspended(tenant: &Tenant) -> Problem {
    let detail = format!(
        "the tenant `{}` is suspended, so it neither sends nor receives: an operator can resume it with POST \
         /admin/v1/tenants/{{tenant}}/resume",
        tenant.as_str()
    );
    Problem::new(StatusCode::FORBIDDEN, "tenant-suspended", detail)
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Caller, Problem> {
        let missing = || Problem::unauthorized("send `Authorization: Bearer <JWT or API key>`");
        parts.extensions.get::<Caller>().cloned().ok_or_else(missing)
    }
}

/// For routes that work without authentication and return more to an authenticated caller.
impl<S: Send + Sync> OptionalFromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Option<Caller>, Problem> {
        Ok(parts.extensions.get::<Caller>().cloned())
    }
}

/// The extractor for routes that only users may call. As the first extractor of a handler it rejects other callers
/// before the path, the query and the body are parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User(pub Uuid);

impl<S: Send + Sync> FromRequestParts<S> for User {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<User, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        let not_a_user = || Problem::forbidden("only users may do this: use a user's token instead of an API key");
        caller.user_id().map(User).ok_or_else(not_a_user)
    }
}

/// The extractor for routes that only callers with the role `admin` may call, of any tenant. As the first extractor of a
/// handler it rejects other callers before the path, the query and the body are parsed.
#[derive(Debug, Clone)]
pub struct Admin(pub Caller);

impl<S: Send + Sync> FromRequestParts<S> for Admin {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Admin, Problem> {
        let caller = <Caller as FromRequestParts<S>>::from_request_parts(parts, state).await?;
        caller.require(Role::Admin)?;
        Ok(Admin(caller))
    }
}

/// The extractor for routes that only operators may call. As the first extractor of a handler it rejects other callers
/// before the path, the query and the body are parsed.
#[derive(Debug, Clone)]
pub struct Operator(pub Caller);

impl<S: Send + Sync> FromRequestParts<S> for Operator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Operator, Problem> {
        let Admin(caller) = Admin::from_request_parts(parts, state).await?;
        if !caller.is_operator() {
            return Err(Problem::forbidden("only operators may do this: admins of the tenant main"));
        }
        Ok(Operator(caller))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(role: Option<Role>) -> Caller {
        Caller::new(Principal::Key(Uuid::nil()), Tenant::main(), role)
    }

    #[test]
    fn a_role_includes_the_previous_ones_and_a_user_has_none() {
        assert!(caller(Some(Role::Admin)).require(Role::Ingest).is_ok());
        assert!(caller(Some(Role::Ingest)).require(Role::Manage).is_err());
        assert!(caller(None).require(Role::Ingest).is_err());
    }

    #[test]
    fn the_text_of_a_principal_can_be_parsed() {
        let id = Uuid::now_v7();
        for principal in [Principal::User(id), Principal::Key(id), Principal::Portal(id)] {
            assert_eq!(Principal::try_from(principal.to_string()), Ok(principal));
        }
        for text in ["", "user", "user:", "user:7", "admin:01890a5d-ac96-774b-bcce-b302099a8057"] {
            assert!(Principal::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_role_has_the_same_name_as_text_and_as_json() {
        for (role, name) in [(Role::Ingest, "ingest"), (Role::Manage, "manage"), (Role::Admin, "admin")] {
            assert_eq!((role.as_str(), role.to_string().as_str(), name.parse()), (name, name, Ok(role)));
            assert_eq!(serde_json::to_value(role).unwrap(), name);
        }
        for unknown in ["", "Admin", "admin ", "root"] {
            assert_eq!(unknown.parse::<Role>(), Err(UnknownRole));
        }
    }

    #[test]
    fn an_admin_of_another_tenant_is_not_an_operator() {
        let caller = Caller { tenant: "acme".parse().unwrap(), ..caller(Some(Role::Admin)) };
        assert!(!caller.is_operator());
    }
}
