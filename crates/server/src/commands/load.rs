//! How the command line loads the settings.

use cli::contexts::{self, Target};
use runtime::config::{Given, InvalidSetting, Sources};
use runtime::secret::Secret;

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
    let of_context = target.map(Target::given).unwrap_or_default();
    let of_environment = environment.iter().filter_map(|(name, value)| Given::from_variable(name, value)).collect();
    let of_set = cli.set.iter().map(|(name, value)| Given::new(name, value, "set with --set")).collect();
    // A later one overrides an earlier one.
    let given = [of_context, aliases::resolve(&environment), of_environment, of_set].concat();
    let file = cli.config.as_deref().or_else(|| match target {
        // The file of the current folder may belong to another installation than the context.
        Some(target) => target.config(),
        None => default_file(),
    });
    let sources = Sources { file, given, flags: &cli.flags };
    let mut settings: Settings = sources.load()?;
    // Below the file, which says what is meant for this program.
    if settings.progress.redis_url.is_none() {
        settings.progress.redis_url = aliases::progress_redis_url(&environment)?.map(Secret::new);
    }
    settings.check().map_err(|error| sources.locate(error))?;
    Ok(settings)
}
