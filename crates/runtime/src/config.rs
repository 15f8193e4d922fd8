//! Loads settings into one typed value. Precedence: command-line flags, `PILLARBOX_*` variables, the TOML file,
//! defaults.
//!
//! The type of the value defines the settings. An unknown or invalid setting is an error with the name of the
//! setting, where it was set, and the values it accepts. Lists and durations have one syntax in all sources: see
//! [`List`] and [`crate::duration`].

mod list;

use std::fmt::Display;
use std::path::Path;

use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::list::{List, list};
use crate::duration::{self, Unit};

pub const ENV_PREFIX: &str = "PILLARBOX_";

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
    /// The name of the setting, for [`Sources::locate`].
    name: String,
    /// The name of the setting whose value the detail ends with.
    other: Option<String>,
}

impl InvalidSetting {
    pub fn new(setting: &str, detail: impl Display) -> InvalidSetting {
        InvalidSetting::at(format!("setting `{setting}`"), setting, String::new(), detail)
    }

    /// A setting that does not fit to another one. The text ends with the value of the other one, and [`Sources::locate`] adds
    /// where that was set: the user may not know the other one.
    pub fn compared(setting: &str, detail: impl Display, other: &str, value: impl Display) -> InvalidSetting {
        let error = InvalidSetting::new(setting, format!("{detail} {other}, which is {value}"));
        InvalidSetting { other: Some(other.to_owned()), ..error }
    }

    fn at(setting: String, name: &str, origin: String, detail: impl Display) -> InvalidSetting {
        let (detail, name) = (detail.to_string(), name.to_owned());
        InvalidSetting { setting, origin, detail, name, other: None }
    }
}

/// A setting as text: from an environment variable or an option.
#[derive(Debug, Clone)]
pub struct Given {
    setting: String,
    text: String,
    /// Such as `set by PILLARBOX_POOL_MAX`, for errors.
    origin: String,
}

impl Given {
    pub fn new(setting: &str, text: &str, origin: impl Display) -> Given {
        Given { setting: setting.to_lowercase(), text: text.to_owned(), origin: origin.to_string() }
    }

    /// The setting of a variable, in whose name `__` separates a section from its field. `None` without the prefix.
    pub fn from_variable(name: &str, text: &str) -> Option<Given> {
        let setting = name.strip_prefix(ENV_PREFIX)?.replace("__", ".");
        Some(Given::new(&setting, text, format!("set by {name}")))
    }
}

/// The sources of settings. A later field overrides an earlier one.
pub struct Sources<'a, F> {
    /// The settings file. Loading fails if it does not exist, so the caller passes None for an absent default file.
    pub file: Option<&'a Path>,
    /// A later setting overrides an earlier one.
    pub given: Vec<Given>,
    pub flags: F,
}

impl<F: Serialize> Sources<'_, F> {
    /// Merges the sources over `T::default()`. Fails with the first setting that is unknown or invalid.
    pub fn load<T: Serialize + DeserializeOwned + Default>(&self) -> Result<T, InvalidSetting> {
        let figment = self.merge(Figment::from(Serialized::defaults(T::default())))?;
        figment.extract().map_err(|error| self.explain(&error))
    }

    /// Adds to the error of a check where its settings were set.
    pub fn locate(&self, error: InvalidSetting) -> InvalidSetting {
        let of_other = |name: &str| self.origin(name).unwrap_or_else(|| " (the default)".to_owned());
        let origin_of_other = error.other.as_deref().map(of_other).unwrap_or_default();
        InvalidSetting {
            origin: self.origin(&error.name).unwrap_or_default(),
            detail: error.detail + &origin_of_other,
            ..error
        }
    }

    fn merge(&self, defaults: Figment) -> Result<Figment, InvalidSetting> {
        let given = Texts::read(&defaults, &self.given)?;
        let figment = match self.file {
            Some(file) => defaults.merge(File::read(file)?),
            None => defaults,
        };
        Ok(figment.merge(given).merge(Serialized::defaults(&self.flags)))
    }

    /// Where the setting has its value from, in parentheses. `None` if it has its default.
    fn origin(&self, name: &str) -> Option<String> {
        let is_in = |source: Figment| source.find_value(name).is_ok();
        if is_in(Figment::from(Serialized::defaults(&self.flags))) {
            return Some(format!(" (set with --{})", name.replace('_', "-")));
        }
        // A variable may contain a whole list, of which the name is a part, and name a part of a section.
        let is_part = |name: &str, whole: &str| name.strip_prefix(whole).is_some_and(|rest| rest.starts_with('.'));
        let concerns =
            |given: &&Given| given.setting == name || is_part(name, &given.setting) || is_part(&given.setting, name);
        if let Some(given) = self.given.iter().rfind(concerns) {
            return Some(format!(" ({})", given.origin));
        }
        let file = File::read(self.file?).ok()?;
        let origin = format!(" (in {})", file.path.display());
        is_in(Figment::from(file)).then_some(origin)
    }

    fn explain(&self, error: &figment::Error) -> InvalidSetting {
        use figment::error::Kind;
        let path = error.path.join(".");
        let (setting, detail) = match &error.kind {
            Kind::UnknownField(name, known) => {
                let meant = similar(name, known.iter().copied());
                // The path ends with the name, if the file has it.
                let section = error.path.strip_suffix(std::slice::from_ref(name)).unwrap_or(&error.path);
                let setting: Vec<&str> = section.iter().chain([name]).map(String::as_str).collect();
                (setting.join("."), format!("does not exist{meant}; the settings are {}", known.join(", ")))
            }
            // The invalid value is not shown: it may be a secret in the wrong setting.
            Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) => {
                (path, format!("must be {}", in_words(expected)))
            }
            Kind::UnknownVariant(_, known) => (path, format!("must be one of {}", known.join(", "))),
            other => (path, other.to_string()),
        };
        if setting.is_empty() {
            return InvalidSetting::at("settings".to_owned(), "", String::new(), detail);
        }
        self.locate(InvalidSetting::new(&setting, detail))
    }
}

/// The TOML file. It is parsed here, because figment's error quotes the invalid line, which may contain a secret.
struct File<'a> {
    path: &'a Path,
    settings: Dict,
}

impl File<'_> {
    fn read(path: &Path) -> Result<File<'_>, InvalidSetting> {
        let invalid = |position: String, detail: String| {
            let origin = format!(" (in {}{position})", path.display());
            InvalidSetting::at("settings".to_owned(), "", origin, detail)
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

/// The settings that were given as text.
struct Texts(Dict);

impl Texts {
    /// Converts each text to the type of the setting's default. The type is not guessed from the text, because an
    /// all-digit password would become a number. Fails for a setting that does not exist.
    fn read(defaults: &Figment, all: &[Given]) -> Result<Texts, InvalidSetting> {
        let mut settings = Dict::new();
        for Given { setting, text, origin } in all {
            let origin = format!(" ({origin})");
            let value = match defaults.find_value(setting) {
                Ok(Value::String(..) | Value::Empty(..)) => Value::from(text.clone()),
                Ok(Value::Array(..)) => list_value(text),
                Ok(_) => text.parse().unwrap_or_else(|_| Value::from(text.clone())),
                Err(_) => {
                    let known = defaults.data().map(|profiles| names(&profiles)).unwrap_or_default();
                    let detail = format!("does not exist{}", similar(setting, known.iter().map(String::as_str)));
                    return Err(InvalidSetting { origin, ..InvalidSetting::new(setting, detail) });
                }
            };
            insert(&mut settings, setting, converted_at(setting, value, &origin)?);
        }
        Ok(Texts(settings))
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
/// with. Fails with the first one that is not a duration.
fn with_durations(settings: Dict, origin: &str) -> Result<Dict, InvalidSetting> {
    let convert =
        |(name, value): (String, Value)| converted_at(&name, value, origin).map(|value| (name.clone(), value));
    settings.into_iter().map(convert).collect()
}

/// As [`converted`], with the error that names the origin.
fn converted_at(path: &str, value: Value, origin: &str) -> Result<Value, InvalidSetting> {
    converted(path, value).map_err(|(setting, detail)| InvalidSetting {
        origin: origin.to_owned(),
        ..InvalidSetting::new(&setting, detail)
    })
}

/// Converts the durations in one value. `path` is its name with that of its section. Fails with the path of the invalid
/// value and the values that it accepts.
fn converted(path: &str, value: Value) -> Result<Value, (String, String)> {
    let name = path.rsplit('.').next().unwrap_or(path);
    match value {
        Value::String(tag, text) => match Unit::in_name(name) {
            Some(unit) => {
                duration::in_unit(&text, unit).map(Value::from).map_err(|error| (path.to_owned(), error.to_string()))
            }
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

impl Provider for Texts {
    fn metadata(&self) -> Metadata {
        Metadata::named("variables and options")
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}

/// The names of all settings, with those of their sections.
fn names(profiles: &Map<Profile, Dict>) -> Vec<String> {
    fn add(section: &str, settings: &Dict, names: &mut Vec<String>) {
        for (name, value) in settings {
            let path = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
            match value {
                Value::Dict(_, inner) => add(&path, inner, names),
                _ => names.push(path),
            }
        }
    }
    let mut found = Vec::new();
    profiles.values().for_each(|settings| add("", settings, &mut found));
    found
}

/// The setting that was probably meant, for the end of an error; empty if none is similar.
fn similar<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> String {
    const SIMILARITY_MIN: f64 = 0.8;
    let scored = known.map(|one| (strsim::normalized_damerau_levenshtein(name, one), one));
    let best = scored.max_by(|(one, _), (other, _)| one.total_cmp(other));
    match best.filter(|(similarity, _)| *similarity >= SIMILARITY_MIN) {
        Some((_, meant)) => format!("; did you mean `{meant}`?"),
        None => String::new(),
    }
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
        let given = environment.iter().filter_map(|(name, value)| Given::from_variable(name, value)).collect();
        let flags = Flags { listen: listen.map(str::to_owned) };
        let loaded = Sources { file: Some(&path), given, flags }.load().map_err(|error| error.to_string());
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
    fn an_error_says_where_its_settings_were_set() {
        let path = std::env::temp_dir().join(format!("pillarbox-config-{}.toml", uuid::Uuid::new_v4()));
        std::fs::write(&path, "pool_max = 5\n[relay]\nbatch_size = 7").unwrap();
        let located = |given: Vec<Given>, listen: Option<&str>, setting: &str, other: &str| {
            let sources = Sources { file: Some(&path), given, flags: Flags { listen: listen.map(str::to_owned) } };
            sources.locate(InvalidSetting::compared(setting, "must be 9 or more: not below", other, 9)).to_string()
        };
        let (file, text) = (path.display(), "must be 9 or more: not below");
        assert_eq!(
            located(Vec::new(), None, "pool_max", "admin_key"),
            format!("setting `pool_max` (in {file}): {text} admin_key, which is 9 (the default)")
        );
        let variable = |name: &str| Given::from_variable(name, "9").unwrap();
        let option = Given::new("POOL_MAX", "9", "set with --set");
        let given = vec![variable("PILLARBOX_RELAY__BATCH_SIZE"), variable("PILLARBOX_POOL_MAX"), option];
        assert_eq!(
            located(given.clone(), None, "relay.batch_size", "pool_max"),
            format!(
                "setting `relay.batch_size` (set by PILLARBOX_RELAY__BATCH_SIZE): {text} pool_max, which is 9 (set with --set)"
            )
        );
        assert_eq!(
            located(given, Some("a"), "relay", "listen"),
            format!(
                "setting `relay` (set by PILLARBOX_RELAY__BATCH_SIZE): {text} listen, which is 9 (set with --listen)"
            )
        );
        std::fs::remove_file(&path).unwrap();
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
        assert!(error.contains("PILLARBOX_COLOUR") && !error.contains("did you mean"), "{error}");
        let error = load("", &[("PILLARBOX_RELAY__BATCH_SZE", "1")], None).unwrap_err();
        assert!(error.contains("did you mean `relay.batch_size`?"), "{error}");
        let error = load("[relay]\nbatchsize = 1", &[], None).unwrap_err();
        let expected = "setting `relay.batchsize`";
        assert!(error.contains(expected) && error.contains("did you mean `batch_size`?"), "{error}");
        let error = load("poolmax = 1", &[], None).unwrap_err();
        assert!(error.starts_with("setting `poolmax` (in "), "{error}");
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
