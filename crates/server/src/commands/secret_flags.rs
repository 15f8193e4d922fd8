//! Finds secrets on the command line. Every user of the machine can read the arguments of a process, with `ps` for
//! example; its environment and its files can be protected.

use std::fmt;

use clap::ArgMatches;
use clap::parser::ValueSource;
use runtime::config::ENV_PREFIX;

/// The settings whose value is a secret.
const KEYS: [&str; 3] = ["admin_key", "secret_key", "secret_keys_previous"];
/// The settings whose value may contain a password.
const ADDRESSES: [&str; 8] = [
    "database_url",
    "database_direct_url",
    "replica_url",
    "amqp_url",
    "redis_url",
    "smtp_url",
    "hub.egress_proxy",
    "progress.redis_url",
];
/// Options of single commands: the name of the option, and its variable.
const OPTIONS: [(&str, &str); 2] = [("api_key", "PILLARBOX_API_KEY"), ("secret", "PILLARBOX_WEBHOOK_SECRET")];

/// Whether the variable belongs to an option of a single command. It is not a setting, although it has the prefix of one.
pub(super) fn is_option_variable(name: &str) -> bool {
    OPTIONS.iter().any(|(_, variable)| *variable == name)
}

/// A secret that was given on the command line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SecretFlag {
    /// The option as the user wrote it, without its value.
    option: String,
    /// The environment variable to use instead.
    variable: String,
    /// Whether the settings file can contain it.
    is_setting: bool,
}

impl fmt::Display for SecretFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SecretFlag { option, variable, is_setting } = self;
        let file = if *is_setting { ", or write it to the settings file (--config FILE)" } else { "" };
        write!(
            f,
            "{option} contains a secret, and every user of this machine can see the arguments of a process (ps): set \
             {variable} instead{file}"
        )
    }
}

/// Returns the secrets among the arguments, without their values.
pub(super) fn secrets_in(matches: &ArgMatches) -> Vec<SecretFlag> {
    let mut found = Vec::new();
    // An option of the installation is also among the matches of every subcommand.
    let mut command = Some(matches);
    while let Some(matches) = command {
        found.extend(secrets_of_command(matches));
        command = matches.subcommand().map(|(_, matches)| matches);
    }
    let mut unique: Vec<SecretFlag> = Vec::new();
    for flag in found {
        if !unique.contains(&flag) {
            unique.push(flag);
        }
    }
    unique
}

fn secrets_of_command(matches: &ArgMatches) -> Vec<SecretFlag> {
    let text_of = |id: &str| {
        let is_given =
            matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine);
        is_given.then(|| matches.try_get_one::<String>(id).ok().flatten()).flatten()
    };
    let mut found = Vec::new();
    for name in ADDRESSES {
        if text_of(name).is_some_and(|value| is_secret(name, value)) {
            let option = format!("--{}", name.replace('_', "-"));
            found.push(SecretFlag { option, variable: variable_of(name), is_setting: true });
        }
    }
    for (id, variable) in OPTIONS {
        if text_of(id).is_some() {
            let option = format!("--{}", id.replace('_', "-"));
            found.push(SecretFlag { option, variable: variable.to_owned(), is_setting: false });
        }
    }
    let set = matches.try_get_many::<(String, String)>("set").ok().flatten().into_iter().flatten();
    for (name, _) in set.filter(|(name, value)| is_secret(name, value)) {
        found.push(SecretFlag { option: format!("--set {name}"), variable: variable_of(name), is_setting: true });
    }
    found
}

fn variable_of(setting: &str) -> String {
    format!("{ENV_PREFIX}{}", setting.to_uppercase().replace('.', "__"))
}

fn is_secret(setting: &str, value: &str) -> bool {
    let setting = setting.to_lowercase();
    KEYS.contains(&setting.as_str()) || ADDRESSES.contains(&setting.as_str()) && has_password(value)
}

/// Returns true if an address contains a password: `scheme://user:password@host`, or as a parameter.
fn has_password(address: &str) -> bool {
    let (_, rest) = address.split_once("://").unwrap_or(("", address));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let user = authority.rsplit_once('@').map(|(user, _)| user);
    let in_user = user.and_then(|user| user.split_once(':')).is_some_and(|(_, password)| !password.is_empty());
    let (_, parameters) = rest.split_once('?').unwrap_or_default();
    in_user || parameters.split('&').any(|parameter| parameter.to_lowercase().starts_with("password="))
}

#[cfg(test)]
mod tests {
    use super::super::options;
    use super::*;
    use crate::settings::Settings;

    fn options(line: &str) -> Vec<String> {
        let matches = options::parse(line.split_whitespace()).unwrap().1;
        let found = secrets_in(&matches);
        assert!(found.iter().all(|flag| !flag.to_string().contains("hunter2")), "{found:?}");
        found.into_iter().map(|flag| flag.option).collect()
    }

    #[test]
    fn every_option_with_a_secret_is_found() {
        for (line, expected) in [
            ("pillarbox --database-url postgres://me:hunter2@h/n", vec!["--database-url"]),
            ("pillarbox serve --database-url=postgres://me:hunter2@h/n", vec!["--database-url"]),
            ("pillarbox --amqp-url amqp://me:hunter2@h/%2f up", vec!["--amqp-url"]),
            ("pillarbox up --redis-url redis://:hunter2@h", vec!["--redis-url"]),
            ("pillarbox up --smtp-url smtp://me:hunter2@h:25", vec!["--smtp-url"]),
            ("pillarbox up --replica-url postgres://h/n?password=hunter2", vec!["--replica-url"]),
            ("pillarbox key list --database-direct-url postgres://me:hunter2@h/n", vec!["--database-direct-url"]),
            ("pillarbox --set ADMIN_KEY=hunter2", vec!["--set ADMIN_KEY"]),
            ("pillarbox up --set pool_max=3 --set secret_key=hunter2", vec!["--set secret_key"]),
            ("pillarbox up --set hub.egress_proxy=http://me:hunter2@h:3128", vec!["--set hub.egress_proxy"]),
            ("pillarbox send a.b {} --api-key hunter2", vec!["--api-key"]),
            ("pillarbox listen --secret hunter2", vec!["--secret"]),
            ("pillarbox up --listen 127.0.0.1:0 --set pool_max=3", vec![]),
            ("pillarbox up --database-url postgres://me@h/n --amqp-url amqp://h --redis-url redis://h", vec![]),
            ("pillarbox send a.b {} --key k --idempotency-key i", vec![]),
        ] {
            assert_eq!(options(line), expected, "{line}");
        }
    }

    #[test]
    fn the_warning_names_what_to_use_instead() {
        let matches = options::parse(["pillarbox", "--set", "admin_key=hunter2"]).unwrap().1;
        let text = secrets_in(&matches).remove(0).to_string();
        for part in ["--set admin_key", "ps", "PILLARBOX_ADMIN_KEY", "--config FILE"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn every_setting_that_can_be_a_secret_is_known() {
        let value = serde_json::to_value(Settings::default()).unwrap();
        let mut names = Vec::new();
        for (name, value) in value.as_object().unwrap() {
            names.push(name.clone());
            let fields = value.as_object().into_iter().flatten();
            names.extend(fields.map(|(field, _)| format!("{name}.{field}")));
        }
        let harmless = ["public_url", "identity.password_reset_hours"];
        let looks_secret = |name: &&String| {
            let parts = ["_url", "_key", "_keys", "secret", "password", "proxy"];
            parts.iter().any(|part| name.contains(part)) && !harmless.contains(&name.as_str())
        };
        let unknown: Vec<_> =
            names.iter().filter(looks_secret).filter(|name| !is_secret(name, "http://me:hunter2@h")).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}
