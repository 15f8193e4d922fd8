//! Which context a command uses, and what the context gives to it.

use std::path::Path;

use clap::ArgMatches;
use runtime::config::{ENV_PREFIX, Given, InvalidSetting};

use super::GivenOptions;
use super::file::{Context, Contexts, ContextsFile, FILE_VARIABLE};
use crate::Failure;
use crate::table::print_note;

/// The variable that selects a context.
const NAME_VARIABLE: &str = "PILLARBOX_CONTEXT";
/// The settings that name an installation. A context is one target as a whole: half of one installation combined with half
/// of another would be an accident, so a context is not used when one of them is given.
const INSTALLATION: [&str; 2] = ["data_dir", "database_url"];
/// The commands that change nothing. Every other command prints its context, so that a new command is safe by default.
pub const READ_ONLY: &[&str] = &[
    "cursors",
    "cursors list",
    "dead-letters list",
    "dead-letters show",
    "deliveries list",
    "deliveries show",
    "event-types export",
    "event-types list",
    "event-types show",
    "key list",
    "mail list",
    "mail show",
    "parked list",
    "replay list",
    "replay webhooks list",
    "replay webhooks watch",
    "status",
    "streams list",
    "streams show",
    "subscribers list",
    "subscribers show",
    "tail",
    "tenants list",
    "tenants show",
    "token",
    "webhook-dead-letters list",
    "webhook-dead-letters show",
];
/// The commands that use HTTP alone.
pub const WITHOUT_DATABASE: &[&str] = &[
    "cursors",
    "dead-letters",
    "deliveries",
    "event-types",
    "key list",
    "key revoke",
    "mail",
    "notifications",
    "parked",
    "replay",
    "send",
    "streams",
    "subscribers",
    "tail",
    "tenants",
    "webhook-dead-letters",
];

/// Whether the variable is about contexts. It is not a setting, although it has the prefix of one.
pub fn is_context_variable(name: &str) -> bool {
    [NAME_VARIABLE, FILE_VARIABLE].contains(&name)
}

/// An environment variable that is set and not empty.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The names of the command and its subcommands, such as `key list`.
pub fn command_path(matches: &ArgMatches) -> String {
    let mut names = Vec::new();
    let mut command = matches.subcommand();
    while let Some((name, matches)) = command {
        names.push(name);
        command = matches.subcommand();
    }
    names.join(" ")
}

/// What selected a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Flag,
    Variable,
    File,
}

impl Origin {
    pub(super) fn describe(self) -> &'static str {
        match self {
            Origin::Flag => "selected by --context",
            Origin::Variable => "selected by the variable PILLARBOX_CONTEXT",
            Origin::File => "selected by `pillarbox context use`",
        }
    }
}

/// The name of the selected context: of the flag, of the variable, or of the file.
pub(super) fn selected_name(
    flag: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
    contexts: &Contexts,
) -> Option<(String, Origin)> {
    let of_flag = flag.map(|name| (name.to_owned(), Origin::Flag));
    let of_variable = || Some((variable(NAME_VARIABLE)?, Origin::Variable));
    of_flag.or_else(of_variable).or_else(|| Some((contexts.selected.clone()?, Origin::File)))
}

/// The context of one command.
#[derive(Debug)]
pub struct Target {
    name: String,
    context: Context,
}

impl Target {
    /// The context that this command uses; `None` if it uses none. Prints the name for commands that change something. Fails
    /// if the context does not exist, or has not what the command needs.
    pub fn of_command(given: &GivenOptions, path: &str) -> Result<Option<Target>, Failure> {
        // A context must not make a server start on another database.
        if matches!(path, "" | "up" | "serve" | "migrate") {
            return match &given.context {
                Some(name) => Err(Failure::Other(format!(
                    "--context {name}: a command that runs or migrates a server uses no context; name its settings with \
                     --config FILE or --data-dir DIR"
                ))),
                None => Ok(None),
            };
        }
        let is_explicit = selected_name(given.context.as_deref(), variable, &Contexts::default()).is_some();
        let file = match ContextsFile::find(variable) {
            Some(file) => file,
            None if is_explicit => ContextsFile::of_user(variable)?,
            None => return Ok(None),
        };
        let (target, note) = Target::choose(given, path, variable, &file)?;
        if let Some(note) = note {
            print_note(&note);
        }
        Ok(target)
    }

    /// As [`Target::of_command`], with the line to print.
    pub fn choose(
        given: &GivenOptions,
        path: &str,
        variable: impl Fn(&str) -> Option<String>,
        file: &ContextsFile,
    ) -> Result<(Option<Target>, Option<String>), Failure> {
        let installation = given_installation(given, &variable);
        let explicit = selected_name(given.context.as_deref(), &variable, &Contexts::default());
        if let Some(option) = installation {
            // A context that was selected for this command alone is not dropped silently.
            let note = |(name, _)| format!("context {name} is not used: {option} names the installation");
            return Ok((None, explicit.map(note)));
        }
        let contexts = file.read()?;
        let Some((name, _)) = selected_name(given.context.as_deref(), &variable, &contexts) else {
            return Ok((None, None));
        };
        let context = contexts.get(&name, file)?.clone();
        let target = Target { name, context };
        if !target.context.has_installation() && !uses_http_alone(path) {
            return Err(Failure::Other(format!(
                "context {} in {file} has a server alone, and `pillarbox {path}` needs the database: name the installation \
                 with --data-dir DIR or --config FILE, or select another context with --context NAME",
                target.name
            )));
        }
        let note = (!READ_ONLY.contains(&path)).then(|| target.describe());
        Ok((Some(target), note))
    }

    /// Adds the name of the context to an error about its settings.
    pub fn explain(&self, error: &InvalidSetting) -> Failure {
        Failure::Other(format!(
            "context {}: {error}; `pillarbox context show --context {}` shows its files",
            self.name, self.name
        ))
    }

    /// The settings file; `None` if the context has none.
    pub fn config(&self) -> Option<&Path> {
        self.context.config.as_deref()
    }

    /// The settings of the context, which variables override.
    pub fn given(&self) -> Vec<Given> {
        let data_dir = self.context.data_dir.as_deref().and_then(Path::to_str);
        let given = |folder| Given::new("data_dir", folder, format!("set by the context {}", self.name));
        data_dir.map(given).into_iter().collect()
    }

    /// Fills in the server and the API key that were not given. The key is not sent to another server than that of the context.
    /// Fails if the key cannot be read, or if there is neither a key nor an installation that could create credentials.
    pub fn fill(&self, server: &mut Option<String>, api_key: &mut Option<String>) -> Result<(), Failure> {
        if server.as_ref().is_some_and(|server| self.context.server.as_deref() != Some(server.trim_end_matches('/'))) {
            return Ok(());
        }
        *server = self.context.server.clone();
        if api_key.is_none() {
            *api_key = self.context.api_key(&self.name)?.map(|key| key.reveal().clone());
        }
        if api_key.is_none() && !self.context.has_installation() {
            return Err(Failure::Other(format!(
                "context {} has no API key: set PILLARBOX_API_KEY, or add the context again with --api-key-file FILE",
                self.name
            )));
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let Context { data_dir, config, server, .. } = &self.context;
        let path =
            |label: &str, path: &Option<std::path::PathBuf>| Some(format!("{label} {}", path.as_ref()?.display()));
        let parts = [path("data folder", data_dir), path("settings file", config), server.clone()];
        format!("context {}: {}", self.name, parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

fn uses_http_alone(path: &str) -> bool {
    WITHOUT_DATABASE.iter().any(|command| path == *command || path.starts_with(&format!("{command} ")))
}

/// The option or variable that names the installation, if one was given.
fn given_installation(given: &GivenOptions, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let flags = [
        ("--config", given.config.is_some()),
        ("--data-dir", given.data_dir.is_some()),
        ("--database-url", given.has_database_url),
    ];
    let flag = flags.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag.to_owned());
    let set = || {
        let name = given.set.iter().map(|name| name.to_lowercase()).find(|name| INSTALLATION.contains(&&**name))?;
        Some(format!("--set {name}"))
    };
    let variables = || INSTALLATION.iter().map(|name| format!("{ENV_PREFIX}{}", name.to_uppercase()));
    flag.or_else(set).or_else(|| variables().find(|name| variable(name).is_some()))
}
