//! Settings: flags over `PILLARBOX_*` over a TOML file over defaults, as one typed value.
//!
//! The value's type is the list of settings. What it does not know, or cannot read, stops the start with the name of
//! the setting, where it was set, and what it takes.

use std::path::Path;

use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub const ENV_PREFIX: &str = "PILLARBOX_";
const ENVIRONMENT: &str = "the environment";

/// A setting that the process cannot start with.
#[derive(Debug, thiserror::Error)]
#[error("{setting}{origin}: {takes}")]
pub struct BadSetting {
    /// As it is spelled in the file; upper-case with `PILLARBOX_` in front it is the variable.
    pub setting: String,
    origin: String,
    takes: String,
}

impl BadSetting {
    pub fn new(setting: &str, takes: impl std::fmt::Display) -> BadSetting {
        BadSetting { setting: format!("setting `{setting}`"), origin: String::new(), takes: takes.to_string() }
    }
}

/// Where settings come from, last wins.
pub struct Sources<'a, F> {
    /// A file that the user named must exist; the default one may be absent.
    pub file: Option<&'a Path>,
    pub environment: Vec<(String, String)>,
    pub flags: F,
}

impl<F: Serialize> Sources<'_, F> {
    pub fn load<T: Serialize + DeserializeOwned + Default>(&self) -> Result<T, BadSetting> {
        let defaults = Serialized::defaults(T::default());
        let environment = Environment::read(&defaults, &self.environment)?;
        let mut figment = Figment::from(defaults);
        if let Some(file) = self.file {
            figment = figment.merge(File::read(file)?);
        }
        let figment = figment.merge(environment).merge(Serialized::defaults(&self.flags));
        figment.extract().map_err(|error| explain(&error))
    }
}

/// The TOML file. Read here and not by figment, whose error quotes the line it stumbles over, secret and all.
struct File<'a> {
    path: &'a Path,
    settings: Dict,
}

impl File<'_> {
    fn read(path: &Path) -> Result<File<'_>, BadSetting> {
        let bad = |place: String, takes: String| BadSetting {
            setting: "settings".to_owned(),
            origin: format!(" (in {}{place})", path.display()),
            takes,
        };
        let text = std::fs::read_to_string(path).map_err(|error| bad(String::new(), error.to_string()))?;
        let settings = Toml::from_str(&text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let (line, column) =
                (before.matches('\n').count() + 1, before.chars().rev().take_while(|&c| c != '\n').count() + 1);
            // The message names at most a key; a value stands only in what the error would quote.
            bad(format!(", line {line}, column {column}"), error.message().replace('\n', ", "))
        })?;
        Ok(File { path, settings })
    }
}

impl Provider for File<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::from("the settings file", self.path)
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.settings.clone()))
    }
}

/// The variables that start with the prefix; `__` goes into a table.
struct Environment(Dict);

impl Environment {
    /// A variable is text; whether it is meant as a number, a switch or a list, the setting's default tells. (Guessing
    /// from the text would turn an all-digit password into a number.)
    fn read(defaults: &impl Provider, variables: &[(String, String)]) -> Result<Environment, BadSetting> {
        let defaults = Figment::from(defaults);
        let mut settings = Dict::new();
        for (name, text) in variables {
            let Some(name) = name.strip_prefix(ENV_PREFIX) else { continue };
            let key = name.to_lowercase().replace("__", ".");
            let value = match defaults.find_value(&key) {
                Ok(Value::String(..) | Value::Empty(..)) => Value::from(text.clone()),
                Ok(_) => text.parse().unwrap_or_else(|_| Value::from(text.clone())),
                Err(_) => {
                    return Err(BadSetting::new(
                        &key,
                        format!("is unknown (in {ENVIRONMENT} as {ENV_PREFIX}{name}, or in --set)"),
                    ));
                }
            };
            insert(&mut settings, &key, value);
        }
        Ok(Environment(settings))
    }
}

fn insert(settings: &mut Dict, key: &str, value: Value) {
    let Some((table, rest)) = key.split_once('.') else {
        settings.insert(key.to_owned(), value);
        return;
    };
    let inner = settings.entry(table.to_owned()).or_insert_with(|| Value::from(Dict::new()));
    if let Value::Dict(_, inner) = inner {
        insert(inner, rest, value);
    }
}

impl Provider for Environment {
    fn metadata(&self) -> Metadata {
        Metadata::named(ENVIRONMENT)
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}

fn explain(error: &figment::Error) -> BadSetting {
    use figment::error::Kind;
    let path = error.path.join(".");
    let (setting, takes) = match &error.kind {
        Kind::UnknownField(name, known) => {
            let setting = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            (setting, format!("is unknown; there are {}", known.join(", ")))
        }
        // What was found is not shown: it may be a secret in the wrong place.
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) => {
            (path, format!("takes {}", in_words(expected)))
        }
        Kind::UnknownVariant(_, known) => (path, format!("takes {}", known.join(", "))),
        other => (path, other.to_string()),
    };
    let setting = if setting.is_empty() { "settings".to_owned() } else { format!("setting `{setting}`") };
    let origin = error.metadata.as_ref().map(|metadata| match &metadata.source {
        Some(figment::Source::File(file)) => format!(" (in {})", file.display()),
        // A `--set` is read like a variable, and flags have the name of their type.
        _ if metadata.name == ENVIRONMENT => format!(" (in {ENVIRONMENT} or --set)"),
        _ => " (on the command line)".to_owned(),
    });
    BadSetting { setting, origin: origin.unwrap_or_default(), takes }
}

/// serde names Rust's types; people do not.
fn in_words(expected: &impl ToString) -> String {
    match expected.to_string().as_str() {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0".to_owned(),
        "i8" | "i16" | "i32" | "i64" => "a whole number".to_owned(),
        "a sequence" => r#"a list such as ["a", "b"]"#.to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Settings {
        listen: String,
        pool_max: u32,
        admin_key: Option<String>,
        relay: Relay,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Relay {
        batch_size: u32,
    }

    impl Default for Settings {
        fn default() -> Settings {
            Settings { listen: "a".into(), pool_max: 10, admin_key: None, relay: Relay { batch_size: 100 } }
        }
    }

    #[derive(Serialize, Default)]
    struct Flags {
        #[serde(skip_serializing_if = "Option::is_none")]
        listen: Option<String>,
    }

    fn load(file: &str, environment: &[(&str, &str)], listen: Option<&str>) -> Result<Settings, String> {
        let path = std::env::temp_dir().join(format!("pillarbox-config-{}.toml", uuid::Uuid::new_v4()));
        std::fs::write(&path, file).unwrap();
        let environment = environment.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let flags = Flags { listen: listen.map(str::to_owned) };
        let loaded = Sources { file: Some(&path), environment, flags }.load().map_err(|error| error.to_string());
        std::fs::remove_file(path).unwrap();
        loaded
    }

    #[test]
    fn flags_win_over_the_environment_over_the_file_over_defaults() {
        let file = "listen = 'file'\npool_max = 11\n[relay]\nbatch_size = 7";
        let settings =
            load(file, &[("PILLARBOX_POOL_MAX", "12"), ("PILLARBOX_LISTEN", "env"), ("HOME", "x")], Some("flag"))
                .unwrap();
        assert_eq!((settings.listen.as_str(), settings.pool_max, settings.relay.batch_size), ("flag", 12, 7));
        let settings = load(file, &[("PILLARBOX_RELAY__BATCH_SIZE", "8")], None).unwrap();
        assert_eq!((settings.listen.as_str(), settings.relay.batch_size), ("file", 8));
    }

    #[test]
    fn a_text_setting_stays_text_whatever_it_looks_like() {
        let settings = load("", &[("PILLARBOX_ADMIN_KEY", "000123"), ("PILLARBOX_LISTEN", "true")], None).unwrap();
        assert_eq!((settings.admin_key.as_deref(), settings.listen.as_str()), (Some("000123"), "true"));
    }

    #[test]
    fn errors_name_the_setting_and_what_it_takes() {
        let error = load("", &[("PILLARBOX_POOL_MAX", "many")], None).unwrap_err();
        assert!(error.contains("pool_max") && error.contains("a whole number") && !error.contains("many"), "{error}");
        let error = load("colour = 1", &[], None).unwrap_err();
        assert!(error.contains("colour") && error.contains("unknown") && error.contains(".toml"), "{error}");
        let error = load("", &[("PILLARBOX_COLOUR", "red")], None).unwrap_err();
        assert!(error.contains("PILLARBOX_COLOUR"), "{error}");
        let error = load("listen = ", &[], None).unwrap_err();
        assert!(error.contains(".toml"), "{error}");
        let error = load("[relay]\nbatch_size = 'x'", &[], None).unwrap_err();
        assert!(error.contains("relay.batch_size"), "{error}");
    }

    #[test]
    fn a_broken_line_is_told_by_its_place_and_not_shown() {
        for broken in [
            "admin_key = \"hunter2", // the quote is not closed
            "admin_key = 'hunter2",
            "admin_key = '''hunter2\nhunter2",
            "admin_key = hunter2",
            "admin_key = \"\\hunter2\"",
            "admin_key = 'x' hunter2",
            "admin_key 'hunter2'",
            "admin_key = ['hunter2'",
            "listen = 'hunter2'\nlisten = 'hunter2'",
        ] {
            let error = load(&format!("pool_max = 1\n{broken}"), &[], None).unwrap_err();
            assert!(!error.contains("hunter2"), "{error}");
            assert!(error.contains(".toml, line ") && error.contains(", column ") && !error.contains('\n'), "{error}");
        }
        let error = load("pool_max = 1\nlisten = ?", &[], None).unwrap_err();
        assert!(error.contains("line 2, column 10"), "{error}");
    }
}
