//! How the command line loads the settings.

use kit::config::{ENV_PREFIX, InvalidSetting, Sources};
use kit::secret::Secret;

use super::contexts::{self, Target};
use super::{Cli, aliases, secret_flags};
use crate::settings::{Settings, default_file};

/// Loads and checks the settings. Fails with the name of the invalid setting.
pub(super) fn load(cli: &Cli, target: Option<&Target>) -> Result<Settings, InvalidSetting> {
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| !secret_flags::is_option_variable(name) && !contexts::is_context_variable(name))
        .collect();
    load_with(cli, environment, target)
}

pub(super) fn load_with(
    cli: &Cli,
    environment: Vec<(String, String)>,
    target: Option<&Target>,
) -> Result<Settings, InvalidSetting> {
    // A later variable overrides an earlier one.
    let of_context = target.map(Target::variables).unwrap_or_default();
    let mut environment = [of_context, aliases::resolve(&environment), environment].concat();
    // `--set` works like an environment variable that overrides the real ones: the same names, the same parsing.
    let from_set = cli
        .set
        .iter()
        .map(|(name, value)| (format!("{ENV_PREFIX}{}", name.to_uppercase().replace('.', "__")), value.clone()));
    environment.extend(from_set);
    let file = cli.config.as_deref().or_else(|| match target {
        // The file of the current folder may belong to another installation than the context.
        Some(target) => target.config(),
        None => default_file(),
    });
    let sources = Sources { file, environment, flags: &cli.flags };
    let mut settings: Settings = sources.load()?;
    // Below the file, which says what is meant for this program.
    if settings.progress.redis_url.is_none() {
        settings.progress.redis_url = aliases::progress_redis_url(&sources.environment)?.map(Secret::new);
    }
    settings.check()?;
    Ok(settings)
}
