//! The options that name settings, and which commands accept them. A command that does not use an option refuses it: an option
//! without an effect would look as if it had one.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, CommandFactory, FromArgMatches};

use super::Cli;

/// How a command finds its installation.
const OF_INSTALLATION: [&str; 6] = ["config", "set", "context", "data_dir", "database_url", "database_direct_url"];
/// The other servers, which `status` checks.
const OF_SERVERS: [&str; 4] = ["replica_url", "amqp_url", "redis_url", "smtp_url"];

/// Whether the command, which is one below `pillarbox`, accepts the option.
fn accepts(command: &str, option: &str) -> bool {
    match command {
        "up" | "serve" | "migrate" => true,
        // They concern no installation.
        "listen" | "openapi" | "completions" | "man" => false,
        "status" => OF_INSTALLATION.contains(&option) || OF_SERVERS.contains(&option),
        // Without a data folder, it finds its server there.
        "demo" => OF_INSTALLATION.contains(&option) || option == "listen",
        _ => OF_INSTALLATION.contains(&option),
    }
}

/// The command line. `pillarbox` itself is `up` and has all options; each command below has those that it accepts, and so have
/// its own commands.
pub(super) fn command() -> clap::Command {
    let root = Cli::command();
    let options: Vec<Arg> = root.get_arguments().cloned().collect();
    let names: Vec<String> = root.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.iter().fold(root, |root, name| {
        let accepted = options.iter().filter(|option| accepts(name, option.get_id().as_str())).cloned();
        root.mut_subcommand(name, |command| command.args(accepted.map(|option| option.global(true))))
    })
}

/// Parses the arguments, of which the first one is the name of the program. An option may be before the command or after it.
/// Fails if the command does not accept an option.
pub(super) fn parse<A: Into<OsString> + Clone>(
    arguments: impl IntoIterator<Item = A>,
) -> Result<(Cli, ArgMatches), clap::Error> {
    let matches = command().try_get_matches_from(arguments)?;
    refuse_unused(&matches)?;
    // The value of an option after the command is among the matches of the root as well, because the option is global there.
    Ok((Cli::from_arg_matches(&matches)?, matches))
}

/// Fails if an option before the command is not one of the command.
fn refuse_unused(matches: &ArgMatches) -> Result<(), clap::Error> {
    let Some((name, _)) = matches.subcommand() else { return Ok(()) };
    let is_unused =
        |option: &&str| matches.value_source(option) == Some(ValueSource::CommandLine) && !accepts(name, option);
    let root = Cli::command();
    // Not all ids of the matches: global options of commands below are among them, but not known here.
    let mut options = root.get_arguments().map(|option| option.get_id().as_str());
    match options.find(is_unused) {
        None => Ok(()),
        Some(option) => {
            let option = option.replace('_', "-");
            let error = format!("`{name}` does not accept --{option}; see `pillarbox {name} --help`");
            Err(command().error(ErrorKind::UnknownArgument, error))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The options under the heading `Settings` in the help of a command.
    fn offered(line: &str) -> Vec<String> {
        let error = parse(format!("pillarbox {line} --help").split_whitespace()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::DisplayHelp, "{line}");
        let help = error.to_string();
        let settings = help.split_once("\nSettings:\n").map(|(_, settings)| settings.to_owned()).unwrap_or_default();
        let option = |line: &str| {
            let name = line.trim_start().strip_prefix("--")?.split(' ').next()?;
            Some(name.trim_end_matches("...").to_owned())
        };
        settings.lines().filter_map(option).collect()
    }

    fn refusal(line: &str) -> clap::Error {
        parse(line.split_whitespace()).map(drop).unwrap_err()
    }

    #[test]
    fn the_help_of_a_command_has_the_options_that_the_command_uses() {
        let installation = ["config", "set", "context", "data-dir", "database-url", "database-direct-url"];
        let root = offered("");
        assert_eq!(root.len(), 14, "{root:?}");
        for name in command().get_subcommands().map(clap::Command::get_name) {
            let mut offered = offered(name);
            offered.retain(|option| !installation.contains(&option.as_str()));
            let expected: &[&str] = match name {
                "up" | "serve" | "migrate" => &[
                    "listen",
                    "postgres-port",
                    "replica-url",
                    "amqp-url",
                    "redis-url",
                    "smtp-url",
                    "services",
                    "roles",
                ],
                "status" => &["replica-url", "amqp-url", "redis-url", "smtp-url"],
                "demo" => &["listen"],
                _ => &[],
            };
            assert_eq!(offered, expected, "{name}");
        }
        for name in ["listen", "openapi", "completions", "man"] {
            assert_eq!(offered(name), [""; 0], "{name}");
        }
        assert_eq!(offered("key list").len(), installation.len());
    }

    #[test]
    fn an_option_that_a_command_does_not_use_is_refused() {
        for line in [
            "pillarbox listen --listen 127.0.0.1:9000",
            "pillarbox --listen 127.0.0.1:9000 listen",
            "pillarbox listen --data-dir /d",
            "pillarbox --data-dir /d openapi",
            "pillarbox --set pool_max=3 completions bash",
            "pillarbox key list --amqp-url amqp://h",
            "pillarbox --roles api key list",
            "pillarbox context list --smtp-url smtp://h",
        ] {
            let error = refusal(line);
            assert_eq!((error.kind(), error.exit_code()), (ErrorKind::UnknownArgument, 2), "{line}: {error}");
        }
        let error = refusal("pillarbox --roles api key list").to_string();
        assert!(error.contains("`key` does not accept --roles") && error.contains("pillarbox key --help"), "{error}");
    }

    #[test]
    fn an_option_may_be_before_and_after_the_command() {
        for line in [
            "pillarbox --data-dir /d key list",
            "pillarbox key --data-dir /d list",
            "pillarbox key list --data-dir /d",
            "pillarbox --data-dir /d",
            "pillarbox --data-dir /d up",
            "pillarbox --data-dir /other up --data-dir /d",
            "pillarbox --data-dir /d up --listen 127.0.0.1:9000",
        ] {
            let (cli, _) = parse(line.split_whitespace()).unwrap();
            assert_eq!(cli.flags.data_dir.as_deref(), Some(std::path::Path::new("/d")), "{line}");
        }
        let (cli, _) = parse(["pillarbox", "--roles", "api", "serve", "--set", "a=1", "--set", "b=2"]).unwrap();
        assert_eq!((cli.flags.roles, cli.set.len()), (Some(vec!["api".to_owned()]), 2));
    }
}
