//! The settings of the web console.

use axum::http::Uri;
use runtime::config::InvalidSetting;
use serde::{Deserialize, Serialize};

/// Longest name of an installation.
const NAME_CHARS_MAX: usize = 60;
/// Most origins that may show the console in a frame.
const ORIGINS_MAX: usize = 20;

/// The section `[console]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConsoleSettings {
    /// Whether processes with the role `api` serve the console.
    pub enabled: bool,
    /// The name of the installation, in the title of the console.
    pub name: String,
    /// The accent colour.
    pub colour: String,
    /// The origins whose pages may show the console in a frame, to embed the portal of a customer. Empty: none.
    #[serde(deserialize_with = "runtime::config::list")]
    pub frame_ancestors: Vec<String>,
}

impl Default for ConsoleSettings {
    fn default() -> ConsoleSettings {
        ConsoleSettings {
            enabled: true,
            name: "Pillarbox".to_owned(),
            colour: "#b3261e".to_owned(),
            frame_ancestors: Vec::new(),
        }
    }
}

impl ConsoleSettings {
    /// Fails with the name of the first invalid setting and the values it accepts.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        let characters = self.name.chars().count();
        if !(1..=NAME_CHARS_MAX).contains(&characters) || self.name.chars().any(char::is_control) {
            let detail = format!("must have 1 to {NAME_CHARS_MAX} characters, without line breaks");
            return Err(InvalidSetting::new("console.name", detail));
        }
        if !is_colour(&self.colour) {
            return Err(InvalidSetting::new("console.colour", "must be a hexadecimal colour such as #b3261e or #b32"));
        }
        if self.frame_ancestors.len() > ORIGINS_MAX {
            return Err(InvalidSetting::new(
                "console.frame_ancestors",
                format!("must be at most {ORIGINS_MAX} origins"),
            ));
        }
        match self.frame_ancestors.iter().find(|origin| !is_origin(origin)) {
            None => Ok(()),
            Some(origin) => {
                let detail = format!(
                    "`{origin}` is not an origin: each must be a scheme and a host, such as https://app.example.org or \
                     http://localhost:3000, without a path"
                );
                Err(InvalidSetting::new("console.frame_ancestors", detail))
            }
        }
    }
}

fn is_colour(text: &str) -> bool {
    let digits = text.strip_prefix('#').unwrap_or_default();
    matches!(digits.len(), 3 | 6) && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether the text is a scheme, a host and perhaps a port. The characters are those of host names, so that no text ends the
/// directive of the header that contains it.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let is_plain = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte));
    let is_host = text.parse::<Uri>().is_ok_and(|uri| uri.host().is_some_and(|host| !host.is_empty()));
    matches!(scheme, "http" | "https") && !host.is_empty() && is_plain && is_host && text.len() <= 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_setting_is_named() {
        let refused = |change: fn(&mut ConsoleSettings)| {
            let mut settings = ConsoleSettings::default();
            change(&mut settings);
            settings.check().map_err(|error| error.to_string()).unwrap_err()
        };
        ConsoleSettings::default().check().unwrap();
        assert!(refused(|settings| settings.name = String::new()).contains("console.name"));
        assert!(refused(|settings| settings.name = "a\nb".to_owned()).contains("console.name"));
        for colour in ["", "red", "b3261e", "#b3261", "#12345g", "#fff;"] {
            let settings = ConsoleSettings { colour: colour.to_owned(), ..ConsoleSettings::default() };
            assert!(settings.check().unwrap_err().to_string().contains("console.colour"), "{colour}");
        }
    }

    #[test]
    fn only_origins_may_be_ancestors() {
        for origin in ["https://app.example.org", "http://localhost:3000", "https://[::1]:8443"] {
            assert!(is_origin(origin), "{origin}");
        }
        let others = [
            "*",
            "example.org",
            "https://",
            "https://a/b",
            "https://a; script-src *",
            "https://a b",
            "'self'",
            "https://user@a",
            "ftp://a",
            "https://a,https://b",
        ];
        for other in others {
            assert!(!is_origin(other), "{other}");
        }
    }
}
