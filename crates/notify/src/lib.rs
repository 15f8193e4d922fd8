//! Notify: tells people what concerns them. Its mail part sends the e-mails that other services request.
//!
//! Owns the schema `pillarbox_notify`.

mod settings;

use std::sync::Arc;

use kit::config::InvalidSetting;
use mailbox::service::{Service, ServiceContext};
use utoipa_axum::router::OpenApiRouter;

pub use crate::settings::MailSettings;

/// The notify service of one process.
pub struct Notify {}

impl Service for Notify {
    const NAME: &'static str = "notify";
    const DESCRIPTION: &'static str = "E-mails and notifications.";
    type Settings = MailSettings;

    fn build(_context: &ServiceContext, _settings: &MailSettings) -> Result<Notify, InvalidSetting> {
        Ok(Notify {})
    }

    fn routes() -> OpenApiRouter<Arc<Notify>> {
        OpenApiRouter::new()
    }
}
