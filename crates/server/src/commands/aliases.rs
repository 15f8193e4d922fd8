//! Environment variables with other names than settings: the ones that operators of earlier systems know. The name of the
//! setting itself overrides them. Those of Redis, which other programs use as well, are also overridden by the settings file.

use std::fmt::Write;

use runtime::config::{Given, InvalidSetting};

/// A variable that means the same as `PILLARBOX_RELAY__ENABLE_DUAL_PUBLISH`.
const DUAL_PUBLISH: &str = "ENABLE_DUAL_PUBLISH";
/// The database of Redis that has the state of projects, unless `REDIS_STATE_DB` names another.
const STATE_DATABASE: &str = "1";

/// The settings that the aliases stand for.
pub(super) fn resolve(environment: &[(String, String)]) -> Vec<Given> {
    let found = environment.iter().find(|(name, _)| name == DUAL_PUBLISH);
    let given =
        |(name, value): &(String, String)| Given::new("relay.enable_dual_publish", value, format!("set by {name}"));
    found.map(given).into_iter().collect()
}

/// The address that the variables of Redis stand for, if there are any. Fails with the name of an invalid one.
pub(super) fn progress_redis_url(environment: &[(String, String)]) -> Result<Option<String>, InvalidSetting> {
    let has = |name: &str| {
        let value = environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
        value.filter(|value| !value.is_empty())
    };
    let Some(host) = has("REDIS_HOST") else { return Ok(None) };
    redis_url(host, has("REDIS_PORT"), has("REDIS_PASSWORD"), has("REDIS_STATE_DB")).map(Some)
}

fn redis_url(
    host: &str,
    port: Option<&str>,
    password: Option<&str>,
    database: Option<&str>,
) -> Result<String, InvalidSetting> {
    let invalid = |alias: &str, accepted: &str| {
        InvalidSetting::new("progress.redis_url", format!("the variable {alias} must be {accepted}"))
    };
    // An address of IPv6 contains colons, and is in brackets in a URL.
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
    let port: u16 = port.unwrap_or("6379").parse().map_err(|_| invalid("REDIS_PORT", "a port such as 6379"))?;
    let database: u16 = database
        .unwrap_or(STATE_DATABASE)
        .parse()
        .map_err(|_| invalid("REDIS_STATE_DB", "the number of a database, such as 1"))?;
    let password = password.map(|password| format!(":{}@", encoded(password))).unwrap_or_default();
    Ok(format!("redis://{password}{host}:{port}/{database}"))
}

/// The text, percent-encoded as a part of a URL.
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() {
            encoded.push(char::from(byte));
        } else {
            // Writing to a String does not fail.
            _ = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}
