//! Identity: accounts of users, their sessions, and their subscriptions to paid plans.
//!
//! Owns the schema `pillarbox_identity`.

mod settings;

use std::sync::Arc;

use kit::config::InvalidSetting;
use mailbox::service::{Service, ServiceContext};
use utoipa_axum::router::OpenApiRouter;

pub use crate::settings::IdentitySettings;

/// The identity service of one process.
pub struct Identity {}

impl Service for Identity {
    const NAME: &'static str = "identity";
    const DESCRIPTION: &'static str = "Accounts, sessions and subscriptions.";
    type Settings = IdentitySettings;

    fn build(_context: &ServiceContext, _settings: &IdentitySettings) -> Result<Identity, InvalidSetting> {
        Ok(Identity {})
    }

    fn routes() -> OpenApiRouter<Arc<Identity>> {
        OpenApiRouter::new()
    }
}
