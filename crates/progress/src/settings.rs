//! The settings of progress, the section `[progress]`.

use redis::IntoConnectionInfo;
use runtime::config::InvalidSetting;
use runtime::secret::Secret;
use serde::{Deserialize, Serialize};

/// The database of Redis if the address names none.
const STATE_DATABASE: i64 = 1;

/// A set of Redis has at most 2^32 members.
const ITEMS_MAX_MAX: u64 = 1_000_000_000;

/// All settings of the service.
#[derive(Debug, Clone)]
pub struct Settings {
    pub progress: ProgressSettings,
    /// The prefix of all keys in Redis.
    pub redis_prefix: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProgressSettings {
    /// The Redis that has the state of projects, apart from that of the cache. Absent: PostgreSQL has it.
    pub redis_url: Option<Secret<String>>,
    /// Whether this Redis loses no write that it has confirmed, even in a crash: `appendonly yes` and `appendfsync always`. If
    /// not, the state from before a restart of Redis is reported as lost.
    pub redis_is_durable: bool,
    /// How long the state of an unfinished project lives after its creation.
    pub ttl_days: u32,
    /// How long a finished project can be read.
    pub retention_days: u32,
    /// The largest number of items that are counted in one project.
    pub items_max: u64,
    /// The largest number of unfinished projects of one owner.
    pub unfinished_max: u32,
}

impl Default for ProgressSettings {
    fn default() -> ProgressSettings {
        ProgressSettings {
            redis_url: None,
            redis_is_durable: false,
            ttl_days: 7,
            retention_days: 30,
            items_max: 10_000_000,
            unfinished_max: 10_000,
        }
    }
}

impl ProgressSettings {
    /// Fails with the name of the invalid setting and the values it accepts.
    pub(crate) fn check(&self) -> Result<(), InvalidSetting> {
        for (name, value) in [("progress.ttl_days", self.ttl_days), ("progress.retention_days", self.retention_days)] {
            if !(1..=3_650).contains(&value) {
                return Err(InvalidSetting::new(name, "must be a number from 1 to 3650"));
            }
        }
        if !(1..=ITEMS_MAX_MAX).contains(&self.items_max) {
            return Err(InvalidSetting::new("progress.items_max", "must be a number from 1 to 1000000000"));
        }
        if !(1..=1_000_000).contains(&self.unfinished_max) {
            return Err(InvalidSetting::new("progress.unfinished_max", "must be a number from 1 to 1000000"));
        }
        self.redis_client().map(drop)
    }

    /// The client of the Redis with the state, if there is one. It connects when it is first used.
    pub(crate) fn redis_client(&self) -> Result<Option<redis::Client>, InvalidSetting> {
        // The parser's error may quote the password.
        let invalid = || InvalidSetting::new("progress.redis_url", "must be an address such as redis://host:6379/1");
        let Some(url) = &self.redis_url else { return Ok(None) };
        service::refuse_redis_tls("progress.redis_url", url.reveal())?;
        let parsed = redis::parse_redis_url(url.reveal()).ok_or_else(invalid)?;
        let names_database = match parsed.scheme() {
            "redis" | "rediss" => !parsed.path().trim_matches('/').is_empty(),
            _ => parsed.query_pairs().any(|(name, _)| name == "db"),
        };
        let mut info = url.reveal().as_str().into_connection_info().map_err(|_| invalid())?;
        if !names_database {
            let redis = info.redis_settings().clone().set_db(STATE_DATABASE);
            info = info.set_redis_settings(redis);
        }
        redis::Client::open(info).map(Some).map_err(|_| invalid())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_url(url: &str) -> ProgressSettings {
        ProgressSettings { redis_url: Some(Secret::new(url.to_owned())), ..ProgressSettings::default() }
    }

    #[test]
    fn the_database_is_1_unless_the_address_names_another() {
        for (url, expected) in [
            ("redis://127.0.0.1", 1),
            ("redis://127.0.0.1:6379/", 1),
            ("redis://:secret@127.0.0.1:6379", 1),
            ("redis://127.0.0.1/0", 0),
            ("redis://127.0.0.1/7", 7),
        ] {
            let client = with_url(url).redis_client().unwrap().unwrap();
            assert_eq!(client.get_connection_info().redis_settings().db(), expected, "{url}");
        }
    }

    #[test]
    fn an_invalid_value_is_named_and_a_password_is_not_shown() {
        let error = with_url("http://:hunter2@x").check().unwrap_err().to_string();
        assert!(error.contains("progress.redis_url") && !error.contains("hunter2"), "{error}");
        let error = ProgressSettings { ttl_days: 0, ..ProgressSettings::default() }.check().unwrap_err().to_string();
        assert!(error.contains("progress.ttl_days"), "{error}");
        ProgressSettings::default().check().unwrap();
    }
}
