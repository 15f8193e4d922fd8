//! `context`: named targets of the command line, so that an operator need not repeat where each installation is.
//!
//! - [`file`]: the file of contexts in the user's config folder.
//! - [`target`]: which context a command uses, and what the context gives to it.
//!
//! Invariants: the file contains no secret, since an API key is named by its file. A command that runs the server or
//! migrates its database uses no context.

mod file;
mod target;

use std::path::{Path, PathBuf};

use clap::Subcommand;
use http::Uri;
use serde::Serialize;

use crate::Failure;
use crate::table::{self, print_line};
pub use file::{Context, Contexts, ContextsFile};
pub use target::{READ_ONLY, Target, WITHOUT_DATABASE, command_path, is_context_variable};

#[derive(Subcommand)]
pub enum Command {
    /// Add a context: with --data-dir DIR, --config FILE or --server URL
    Add {
        /// The name: letters, digits, - and _
        #[arg(value_parser = context_name)]
        name: String,
        /// The address of the server, such as http://127.0.0.1:8080
        #[arg(long, value_name = "URL", value_parser = server_address)]
        server: Option<String>,
        /// The file that contains the API key; only its owner may read it
        #[arg(long, value_name = "FILE")]
        api_key_file: Option<PathBuf>,
    },
    /// Select the context of the next commands, or none
    Use {
        /// The name of the context
        #[arg(required_unless_present = "none", conflicts_with = "none")]
        name: Option<String>,
        /// Select no context
        #[arg(long)]
        none: bool,
    },
    /// List the contexts
    List {
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the context that a command uses now
    Show,
    /// Remove a context
    Remove {
        /// The name of the context
        name: String,
    },
}

/// The options of a command line that matter for contexts.
#[derive(Debug, Default)]
pub struct GivenOptions {
    pub context: Option<String>,
    pub config: Option<PathBuf>,
    pub data_dir: Option<PathBuf>,
    pub has_database_url: bool,
    /// The names of the settings that `--set` gives.
    pub set: Vec<String>,
    /// Another option that names a setting, which a context does not contain.
    pub other: Option<String>,
}

/// One line of `context list --json`.
#[derive(Serialize)]
struct Listed<'a> {
    name: &'a str,
    is_selected: bool,
    #[serde(flatten)]
    context: &'a Context,
}

/// Changes or shows the contexts. Fails if the file cannot be read or written, or there is no such context.
pub fn run(given: &GivenOptions, command: &Command) -> Result<(), Failure> {
    let file = ContextsFile::of_user(target::variable)?;
    match command {
        Command::Add { name, server, api_key_file } => add(given, &file, name, server.clone(), api_key_file.as_deref()),
        Command::Use { name: Some(name), .. } => {
            file.change(|contexts| {
                contexts.get(name, &file)?;
                contexts.selected = Some(name.clone());
                Ok(())
            })?;
            Ok(print_line(&format!("Commands now use the context {name}."))?)
        }
        Command::Use { name: None, .. } => {
            file.change(|contexts| {
                contexts.selected = None;
                Ok(())
            })?;
            Ok(print_line("Commands now use no context.")?)
        }
        Command::List { json } => list(&file.read()?, *json),
        Command::Show => show(given, &file),
        Command::Remove { name } => {
            file.change(|contexts| {
                contexts.get(name, &file)?;
                contexts.contexts.remove(name);
                contexts.selected = contexts.selected.take().filter(|selected| selected != name);
                Ok(())
            })?;
            Ok(print_line(&format!("Removed the context {name}. Its installation is unchanged."))?)
        }
    }
}

fn add(
    given: &GivenOptions,
    file: &ContextsFile,
    name: &str,
    server: Option<String>,
    api_key_file: Option<&Path>,
) -> Result<(), Failure> {
    refuse_other_options(given)?;
    let context = Context {
        data_dir: given.data_dir.as_deref().map(absolute).transpose()?,
        config: given.config.as_deref().map(absolute).transpose()?,
        server,
        api_key_file: api_key_file.map(absolute).transpose()?,
    };
    if !context.has_installation() && context.server.is_none() {
        return Err(Failure::Other(format!(
            "context {name} needs a target: --data-dir DIR, --config FILE or --server URL (see `pillarbox context add --help`)"
        )));
    }
    // A wrong path is reported now, and not when an operator needs the context in a hurry.
    if let Some(config) = context.config.as_deref().filter(|config| !config.is_file()) {
        return Err(Failure::Other(format!("context {name}: there is no settings file {}", config.display())));
    }
    context.api_key(name)?;
    file.change(|contexts| {
        if contexts.contexts.contains_key(name) {
            return Err(Failure::Other(format!(
                "context {name} exists in {file}: choose another name, or run `pillarbox context remove {name}` first"
            )));
        }
        contexts.contexts.insert(name.to_owned(), context);
        Ok(())
    })?;
    Ok(print_line(&format!("Added the context {name}. Select it with: pillarbox context use {name}"))?)
}

/// Fails if a global option was given that a context does not contain: it would be dropped silently.
fn refuse_other_options(given: &GivenOptions) -> Result<(), Failure> {
    let set = || given.set.first().map(|name| format!("--set {name}"));
    let Some(option) = given.other.clone().or_else(set) else { return Ok(()) };
    Err(Failure::Other(format!(
        "a context does not contain {option}: write the setting to a settings file, and name the file with --config FILE"
    )))
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    let absolute = std::path::absolute(path).ok().filter(|path| path.to_str().is_some());
    absolute.ok_or_else(|| Failure::Other(format!("the path {} must be valid UTF-8 text", path.display())))
}

fn list(contexts: &Contexts, json: bool) -> Result<(), Failure> {
    let is_selected = |name: &String| contexts.selected.as_ref() == Some(name);
    if json {
        for (name, context) in &contexts.contexts {
            table::print_json(&Listed { name, is_selected: is_selected(name), context })?;
        }
        return Ok(());
    }
    if contexts.contexts.is_empty() {
        return Ok(print_line("There are no contexts. Add one with: pillarbox context add NAME --data-dir DIR")?);
    }
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let row = |(name, context): (&String, &Context)| {
        let Context { data_dir, config, server, api_key_file } = context;
        let selected = if is_selected(name) { "*" } else { "" }.to_owned();
        [selected, name.clone(), path(data_dir), path(config), server.clone().unwrap_or_default(), path(api_key_file)]
    };
    let rows: Vec<_> = contexts.contexts.iter().map(row).collect();
    Ok(table::print(["", "NAME", "DATA FOLDER", "SETTINGS FILE", "SERVER", "API KEY FILE"], &rows)?)
}

fn show(given: &GivenOptions, file: &ContextsFile) -> Result<(), Failure> {
    let contexts = file.read()?;
    let Some((name, origin)) = target::selected_name(given.context.as_deref(), target::variable, &contexts) else {
        return Ok(print_line("No context is selected. Select one with: pillarbox context use NAME")?);
    };
    let context = contexts.get(&name, file)?;
    print_line(&format!("context        {name} ({})", origin.describe()))?;
    print_line(&format!("file           {file}"))?;
    let Context { data_dir, config, server, api_key_file } = context;
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
    for (label, value) in [
        ("data folder", path(data_dir)),
        ("settings file", path(config)),
        ("server", server.clone()),
        ("API key file", path(api_key_file)),
    ] {
        if let Some(value) = value {
            print_line(&format!("{label:13}  {value}"))?;
        }
    }
    Ok(())
}

fn context_name(text: &str) -> Result<String, &'static str> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if is_plain && (1..=64).contains(&text.len()) && !text.starts_with('-') {
        return Ok(text.to_owned());
    }
    Err("must have 1 to 64 characters of A-Z, a-z, 0-9, _ and -")
}

/// Accepts the address of a server without a user, a path or a query: a password must not get into the file.
fn server_address(text: &str) -> Result<String, &'static str> {
    let is_valid = text.parse::<Uri>().is_ok_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
    });
    if is_valid {
        return Ok(text.trim_end_matches('/').to_owned());
    }
    Err("must be an address such as http://127.0.0.1:8080, without a user, a password or a path")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_an_address_without_a_secret_are_accepted() {
        assert!(context_name("prod-eu_1").is_ok() && server_address("http://10.0.0.1:8080/").is_ok());
        for name in ["", "a b", "a.b", "é"] {
            assert!(context_name(name).is_err(), "{name}");
        }
        for address in ["10.0.0.1:8080", "ftp://a", "http://me:hunter2@a", "http://a/path", "http://a?key=hunter2"] {
            assert!(!server_address(address).unwrap_err().contains("hunter2"), "{address}");
        }
    }
}
