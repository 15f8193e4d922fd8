//! Which server a command talks to, and with which credentials.

use std::time::Duration;

use admin::portal_tokens::{NewPortalToken, flow as portal_tokens};
use chrono::Utc;
use cli::api::{Api, ServerArgs, is_on_this_machine};
use http_kit::auth::{Caller, PortalAccess, Principal, Role, TokenSigner};
use pillarbox::log::Tenant;
use runtime::secret::Secret;
use sqlx::PgPool;
use uuid::Uuid;

use super::Failure;
use super::installation::{connect, master_keys, print_target};
use super::one_installation::require_one_installation;
use crate::data_dir::DataDir;
use crate::settings::Settings;

/// How long the credentials of one command are valid, if it ends without deleting them.
const TOKEN_SECONDS: i64 = 600;

/// Access to the hub as one tenant, for one command.
pub(super) struct HubSession {
    pub(super) api: Api,
    /// The portal token that was created for this command.
    token: Option<(PgPool, Tenant, Uuid)>,
}

impl HubSession {
    /// Uses the given API key, or the admin key of the settings. Without either, a user who has access to the installation's
    /// database gets a portal token, which [`HubSession::close_after`] deletes. Fails if there is no server or no such tenant.
    pub(super) async fn open(settings: &Settings, server: &ServerArgs, tenant: &Tenant) -> Result<HubSession, Failure> {
        let base = target_url(settings, server).await?;
        check_credential_target(settings, server)?;
        if let Some(key) = server.api_key.clone().map(Secret::new).or_else(|| settings.admin_key.clone()) {
            return Ok(HubSession { api: Api::new(&base, key)?.for_tenant(tenant), token: None });
        }
        let db = connect(settings)?;
        let caller = Caller::new(Principal::Key(Uuid::nil()), tenant.clone(), Some(Role::Admin));
        let name = Some("command line".to_owned());
        let new = NewPortalToken { name, access: PortalAccess::Manage, expires_in_seconds: TOKEN_SECONDS };
        let created = portal_tokens::create(&mut *db.acquire().await?, &caller, new).await;
        let (token, secret) = created.map_err(|error| Failure::Other(error.to_string()))?;
        Ok(HubSession { api: Api::new(&base, secret)?, token: Some((db, tenant.clone(), token.id)) })
    }

    /// Runs a command, and deletes its credentials. If that fails they expire.
    pub(super) async fn close_after<T>(
        &self,
        command: impl Future<Output = Result<T, cli::Failure>>,
    ) -> Result<T, Failure> {
        let result = command.await;
        if let Some((db, tenant, id)) = &self.token
            && let Ok(mut db) = db.acquire().await
        {
            let _ = portal_tokens::revoke(&mut db, tenant, *id).await;
        }
        Ok(result?)
    }
}

/// Access to the operator's API: with the given key, the admin key of the settings, or a token that the secret key of the data
/// folder signs.
pub(super) async fn operator_api(settings: &Settings, server: &ServerArgs) -> Result<Api, Failure> {
    let base = target_url(settings, server).await?;
    check_credential_target(settings, server)?;
    let key = server.api_key.clone().map(Secret::new).or_else(|| settings.admin_key.clone());
    let key = match key {
        Some(key) => key,
        None => sign_token(settings, Uuid::now_v7(), Some(Role::Admin), Duration::from_secs(TOKEN_SECONDS as u64))?,
    };
    Ok(Api::new(&base, key)?)
}

/// Access to the hub's API as a producer. Fails without an API key: a portal token posts no events.
pub(super) async fn producer_api(settings: &Settings, server: &ServerArgs, tenant: &Tenant) -> Result<Api, Failure> {
    check_credential_target(settings, server)?;
    let key = server.api_key.clone().map(Secret::new).or_else(|| settings.admin_key.clone()).ok_or_else(|| {
        Failure::Other(
            "an API key is required: set PILLARBOX_API_KEY (create one with `pillarbox key create --role ingest`)"
                .to_owned(),
        )
    })?;
    Ok(Api::new(&target_url(settings, server).await?, key)?.for_tenant(tenant))
}

/// Signs a user's token with the secret key of the installation. Fails if the data folder belongs to another one.
pub(super) fn sign_token(
    settings: &Settings,
    user: Uuid,
    role: Option<Role>,
    ttl: Duration,
) -> Result<Secret<String>, Failure> {
    let keys = master_keys(settings, &DataDir::at(&settings.data_dir)?)?;
    let key = keys.first().ok_or_else(|| Failure::Other("the installation has no secret key".to_owned()))?;
    let signer = match &settings.public_url {
        Some(address) => TokenSigner::new(key).with_issuer(address),
        None => TokenSigner::new(key),
    };
    let token = signer.sign(user, role, Utc::now(), ttl);
    token.map(Secret::new).map_err(|error| Failure::Other(format!("the token cannot be signed: {error}")))
}

/// Fails if a credential of this installation would be sent to another machine, because `--server` names one without a key.
fn check_credential_target(settings: &Settings, server: &ServerArgs) -> Result<(), Failure> {
    let Some(url) = server.server.as_deref().filter(|_| server.api_key.is_none()) else { return Ok(()) };
    if is_on_this_machine(url) || url.trim_end_matches('/') == local_address(settings)? {
        return Ok(());
    }
    Err(Failure::Other(format!(
        "{url} is not the server of this installation, whose credentials are not sent elsewhere: set PILLARBOX_API_KEY to a key of \
         that server"
    )))
}

/// As [`base_url`]. If the settings name a database, prints the address, and fails if the server belongs to another installation.
async fn target_url(settings: &Settings, server: &ServerArgs) -> Result<String, Failure> {
    let base = base_url(settings, server)?;
    print_target(settings, &format!("server {base}"));
    require_one_installation(settings, &base).await?;
    Ok(base)
}

/// The address of the server: the given one, that of the server in the data folder, or the setting `listen`.
fn base_url(settings: &Settings, server: &ServerArgs) -> Result<String, Failure> {
    if let Some(url) = &server.server {
        return Ok(url.clone());
    }
    let holder = DataDir::at(&settings.data_dir)?.holder().filter(|_| settings.database_url.is_none());
    let address = holder.as_deref().and_then(|holder| holder.rsplit_once("http://")).map(|(_, address)| address);
    Ok(match address {
        Some(address) => format!("http://{address}"),
        None => format!("http://{}", settings.listen),
    })
}

pub(super) fn local_address(settings: &Settings) -> Result<String, Failure> {
    base_url(settings, &ServerArgs { server: None, api_key: None })
}
