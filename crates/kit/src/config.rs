//! Loads settings into one typed value. Precedence: command-line flags, `PILLARBOX_*` variables, the TOML file,
//! defaults.
//!
//! The type of the value defines the settings. An unknown or invalid setting is an error with the name of the
//! setting, where it was set, and the values it accepts. Lists and durations have one syntax in all sources: see
//! [`List`] and [`crate::duration`].

mod list;

use std::path::Path;

use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::list::{List, list};
use crate::duration::{self, Unit};

pub const ENV_PREFIX: &str = "PILLARBOX_";
const ENVIRONMENT: &str = "the environment";

/// An unknown or invalid setting.
#[derive(Debug, thiserror::Error)]
#[error("{setting}{origin}: {detail}")]
pub struct InvalidSetting {
    /// The name in the settings file. The variable is the same name in upper case, prefixed with `PILLARBOX_`.
    pub setting: String,
    /// Where the setting was set, in parentheses; empty if that is unknown.
    origin: String,
    /// What is wrong, and the values that the setting accepts.
    detail: String,
}

impl InvalidSetting {
    pub fn new(setting: &str, detail: impl std::fmt::Display) -> InvalidSetting {
        InvalidSetting { setting: format!("setting `{setting}`"), origin: String::new(), detail: detail.to_string() }
    }
}

/// The sources of settings. A later field overrides an earlier one.
pub struct Sources<'a, F> {
    /// The settings file. Loading fails if it does not exist, so the caller passes None for an absent default file.
    pub file: Option<&'a Path>,
    pub environment: Vec<(String, String)>,
    pub flags: F,
}

impl<F: Serialize> Sources<'_, F> {
    /// Merges the sources over `T::default()`. Fails with the first setting that is unknown or invalid.
    pub fn load<T: Serialize + DeserializeOwned + Default>(&self) -> Result<T, InvalidSetting> {
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

/// The TOML file. It is parsed here, because figment's error quotes the invalid line, which may contain a secret.
struct File<'a> {
    path: &'a Path,
    settings: Dict,
}

impl File<'_> {
    fn read(path: &Path) -> Result<File<'_>, InvalidSetting> {
        let invalid = |position: String, detail: String| InvalidSetting {
            setting: "settings".to_owned(),
            origin: format!(" (in {}{position})", path.display()),
            detail,
        };
        let text = std::fs::read_to_string(path).map_err(|error| invalid(String::new(), error.to_string()))?;
        let settings = Toml::from_str(&text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let (line, column) =
                (before.matches('\n').count() + 1, before.chars().rev().take_while(|&c| c != '\n').count() + 1);
            // The message contains no values, at most a key. Only the quoted line, which is not used, would contain
            // values.
            invalid(format!(", line {line}, column {column}"), error.message().replace('\n', ", "))
        })?;
        let settings = with_durations(settings, &format!(" (in {})", path.display()))?;
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

/// The environment variables with the prefix. `__` separates a table from its field.
struct Environment(Dict);

impl Environment {
    /// Converts each variable to the type of the setting's default. The type is not guessed from the text, because an
    /// all-digit password would become a number. Fails for a variable that is not a setting.
    fn read(defaults: &impl Provider, variables: &[(String, String)]) -> Result<Environment, InvalidSetting> {
        let defaults = Figment::from(defaults);
        let mut settings = Dict::new();
        for (name, text) in variables {
            let Some(name) = name.strip_prefix(ENV_PREFIX) else { continue };
            let key = name.to_lowercase().replace("__", ".");
            let value = match defaults.find_value(&key) {
                Ok(Value::String(..) | Value::Empty(..)) => Value::from(text.clone()),
                Ok(Value::Array(..)) => list_value(text),
                Ok(_) => text.parse().unwrap_or_else(|_| Value::from(text.clone())),
                Err(_) => {
                    return Err(InvalidSetting::new(
                        &key,
                        format!("does not exist (in {ENVIRONMENT} as {ENV_PREFIX}{name}, or in --set)"),
                    ));
                }
            };
            insert(&mut settings, &key, value);
        }
        Ok(Environment(with_durations(settings, &format!(" (in {ENVIRONMENT} or --set)"))?))
    }
}

/// A JSON list becomes a list, whose items have their types. So does a list of tables in the syntax of TOML. [`List`] reads
/// every other text.
fn list_value(text: &str) -> Value {
    let json = serde_json::from_str::<Vec<serde_json::Value>>(text).ok();
    let list = json.and_then(|items| Value::serialize(items).ok());
    let tables = || text.parse::<Value>().ok().filter(|value| text.contains('{') && matches!(value, Value::Array(..)));
    list.or_else(tables).unwrap_or_else(|| Value::from(text))
}

/// Replaces each duration that was given as text, such as `15s`, with a number of the unit that the setting's name ends
/// with. Fails with the first one that is no duration.
fn with_durations(settings: Dict, origin: &str) -> Result<Dict, InvalidSetting> {
    let convert = |(name, value): (String, Value)| {
        let value = converted(&name, value).map_err(|(setting, detail)| InvalidSetting {
            setting: format!("setting `{setting}`"),
            origin: origin.to_owned(),
            detail,
        })?;
        Ok((name, value))
    };
    settings.into_iter().map(convert).collect()
}

/// Converts the durations in one value. `path` is its name with that of its section. Fails with the path of the invalid
/// value and the values that it accepts.
fn converted(path: &str, value: Value) -> Result<Value, (String, String)> {
    let name = path.rsplit('.').next().unwrap_or(path);
    match value {
        Value::String(tag, text) => match Unit::in_name(name) {
            Some(unit) => duration::in_unit(&text, unit).map(Value::from).map_err(|detail| (path.to_owned(), detail)),
            None => Ok(Value::String(tag, text)),
        },
        Value::Dict(tag, fields) => {
            let field =
                |(name, value): (String, Value)| converted(&format!("{path}.{name}"), value).map(|value| (name, value));
            Ok(Value::Dict(tag, fields.into_iter().map(field).collect::<Result<_, _>>()?))
        }
        Value::Array(tag, items) => {
            let items = items.into_iter().map(|item| converted(path, item));
            Ok(Value::Array(tag, items.collect::<Result<_, _>>()?))
        }
        other => Ok(other),
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

fn explain(error: &figment::Error) -> InvalidSetting {
    use figment::error::Kind;
    let path = error.path.join(".");
    let (setting, detail) = match &error.kind {
        Kind::UnknownField(name, known) => {
            let setting = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            (setting, format!("does not exist; the settings are {}", known.join(", ")))
        }
        // The invalid value is not shown: it may be a secret in the wrong setting.
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) => {
            (path, format!("must be {}", in_words(expected)))
        }
        Kind::UnknownVariant(_, known) => (path, format!("must be one of {}", known.join(", "))),
        other => (path, other.to_string()),
    };
    let setting = if setting.is_empty() { "settings".to_owned() } else { format!("setting `{setting}`") };
    let origin = error.metadata.as_ref().map(|metadata| match &metadata.source {
        Some(figment::Source::File(file)) => format!(" (in {})", file.display()),
        // A `--set` is loaded like a variable; flags have the name of their Rust type.
        _ if metadata.name == ENVIRONMENT => format!(" (in {ENVIRONMENT} or --set)"),
        _ => " (on the command line)".to_owned(),
    });
    InvalidSetting { setting, origin: origin.unwrap_or_default(), detail }
}

/// Describes a Rust type, which serde names in its errors, to a user.
fn in_words(expected: &impl ToString) -> String {
    match expected.to_string().as_str() {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0".to_owned(),
        "i8" | "i16" | "i32" | "i64" => "a whole number".to_owned(),
        "a sequence" => r#"a list such as ["a", "b"] or a,b"#.to_owned(),
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
    fn a_text_setting_of_digits_stays_text() {
        let settings = load("", &[("PILLARBOX_ADMIN_KEY", "000123"), ("PILLARBOX_LISTEN", "true")], None).unwrap();
        assert_eq!((settings.admin_key.as_deref(), settings.listen.as_str()), (Some("000123"), "true"));
    }

    #[test]
    fn errors_name_the_setting_and_its_accepted_values() {
        let error = load("", &[("PILLARBOX_POOL_MAX", "many")], None).unwrap_err();
        assert!(error.contains("pool_max") && error.contains("a whole number") && !error.contains("many"), "{error}");
        let error = load("colour = 1", &[], None).unwrap_err();
        assert!(error.contains("colour") && error.contains("does not exist") && error.contains(".toml"), "{error}");
        let error = load("", &[("PILLARBOX_COLOUR", "red")], None).unwrap_err();
        assert!(error.contains("PILLARBOX_COLOUR"), "{error}");
        let error = load("listen = ", &[], None).unwrap_err();
        assert!(error.contains(".toml"), "{error}");
        let error = load("[relay]\nbatch_size = 'x'", &[], None).unwrap_err();
        assert!(error.contains("relay.batch_size"), "{error}");
    }

    #[test]
    fn a_syntax_error_names_line_and_column_but_no_value() {
        for broken in [
            "admin_key = \"hunter2", // The quote is not closed.
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
