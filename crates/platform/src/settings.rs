//! Every setting, with its default. Names here are the names in `pillarbox.toml`, in `PILLARBOX_*` and in `--set`.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use events::EventsSettings;
use hub::HubSettings;
use kit::auth::Issuer;
use kit::config::BadSetting;
use kit::extract::RequestLimits;
use kit::secret::{MasterKey, Secret};
use kit::serve::ServeLimits;
use kit::telemetry::LogFormat;
use mailbox::database::PoolLimits;
use mailbox::maintain::Keep;
use relay::{Broker, RelaySettings};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgConnectOptions;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Where to answer.
    pub listen: SocketAddr,
    /// What an instance keeps: the private PostgreSQL, the secret key.
    pub data_dir: PathBuf,

    /// PostgreSQL in place of the private one.
    pub database_url: Option<Secret<String>>,
    /// Where `database_url` is a pooler: past it, for everything but requests.
    pub database_direct_url: Option<Secret<String>>,
    /// A copy of the database to read feeds from.
    pub replica_url: Option<Secret<String>>,
    pub amqp_url: Option<Secret<String>>,
    pub redis_url: Option<Secret<String>>,
    /// What our keys begin with, for a Redis that others use, too.
    pub redis_prefix: String,
    pub smtp_url: Option<Secret<String>>,

    /// Empty: all.
    pub services: Vec<String>,
    /// Empty: all.
    pub roles: Vec<Role>,
    /// How services' messages come to each other.
    pub bus: Bus,

    pub relay: RelaySettings,
    pub hub: HubSettings,
    pub events: EventsSettings,
    /// How long a process that no longer answers keeps its share of the work.
    pub lease_ms: u32,
    /// How long the log is kept, and how long a consumer that is behind can hold it.
    pub log_days: u32,
    pub behind_days: u32,

    /// An admin key to accept from the start.
    pub admin_key: Option<Secret<String>>,
    /// 32 bytes in base64, the same for all replicas; made and kept in the data folder when absent.
    pub secret_key: Option<Secret<String>>,
    /// Keys that it replaced: what they signed stays good.
    pub secret_keys_previous: Vec<Secret<String>>,
    /// Issuers whose users may call, besides our own.
    pub issuers: Vec<Issuer>,

    pub pool_min: u32,
    pub pool_max: u32,
    /// For work in the background, besides.
    pub worker_pool_max: u32,
    pub statement_timeout_ms: u32,
    /// Requests a second for each caller; 0 for no limit.
    pub rate_limit_per_second: u32,
    pub connections_max: u32,
    pub body_bytes_max: u32,
    pub body_timeout_ms: u32,
    pub head_timeout_ms: u32,
    pub write_timeout_ms: u32,
    pub request_timeout_ms: u32,
    pub drain_timeout_ms: u32,

    /// A level, or levels by target.
    pub log: String,
    pub log_format: LogFormat,
    /// Where to send traces (OTLP over HTTP).
    pub otlp_endpoint: Option<String>,
}

/// What a process does; any set of them, in any number of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Api,
    Relay,
    Consume,
    Fanout,
    Dispatch,
    Maintain,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bus {
    /// All services are in one database, and read its log.
    #[default]
    Postgres,
    /// The relay publishes the log, and services read queues: each may have a database of its own.
    Rabbitmq,
}

/// The private PostgreSQL takes 100 connections, some of them for operators.
const EMBEDDED_POOL_MAX: u32 = 80;

/// The services in this binary, in the order in which they stand on each other.
pub const SERVICES: [&str; 3] = ["hub", "events", "joins"];

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            data_dir: default_data_dir(),
            database_url: None,
            database_direct_url: None,
            replica_url: None,
            amqp_url: None,
            redis_url: None,
            redis_prefix: String::new(),
            smtp_url: None,
            services: Vec::new(),
            roles: Vec::new(),
            bus: Bus::default(),
            relay: RelaySettings::default(),
            hub: HubSettings::default(),
            events: EventsSettings::default(),
            lease_ms: 15_000,
            log_days: 7,
            behind_days: 14,
            admin_key: None,
            secret_key: None,
            secret_keys_previous: Vec::new(),
            issuers: Vec::new(),
            pool_min: 10,
            pool_max: 20,
            worker_pool_max: 16,
            statement_timeout_ms: 10_000,
            rate_limit_per_second: 0,
            connections_max: 10_000,
            body_bytes_max: 1024 * 1024,
            body_timeout_ms: 15_000,
            head_timeout_ms: 10_000,
            write_timeout_ms: 20_000,
            request_timeout_ms: 30_000,
            drain_timeout_ms: 20_000,
            log: "info".to_owned(),
            log_format: LogFormat::Pretty,
            otlp_endpoint: None,
        }
    }
}

impl Settings {
    /// What types cannot say.
    pub fn check(&self) -> Result<(), BadSetting> {
        if self.pool_max == 0 || self.pool_min > self.pool_max {
            return Err(BadSetting::new("pool_max", "takes a number from 1, and not below pool_min"));
        }
        if self.worker_pool_max == 0 {
            return Err(BadSetting::new("worker_pool_max", "takes a number from 1"));
        }
        let connections = self.pool_max.saturating_add(self.worker_pool_max);
        if self.database_url.is_none() && connections > EMBEDDED_POOL_MAX {
            let takes = format!("takes, with worker_pool_max, at most {EMBEDDED_POOL_MAX} with the private PostgreSQL");
            return Err(BadSetting::new("pool_max", takes));
        }
        for (name, value) in [
            ("statement_timeout_ms", self.statement_timeout_ms),
            ("log_days", self.log_days),
            ("connections_max", self.connections_max),
            ("body_bytes_max", self.body_bytes_max),
            ("body_timeout_ms", self.body_timeout_ms),
            ("head_timeout_ms", self.head_timeout_ms),
            ("write_timeout_ms", self.write_timeout_ms),
            ("request_timeout_ms", self.request_timeout_ms),
        ] {
            if !(1..=i32::MAX as u32).contains(&value) {
                return Err(BadSetting::new(name, format!("takes a number from 1 to {}", i32::MAX)));
            }
        }
        if self.lease_ms < 1_000 {
            return Err(BadSetting::new("lease_ms", "takes a number from 1000"));
        }
        if self.behind_days < self.log_days {
            return Err(BadSetting::new("behind_days", "takes a number not below log_days"));
        }
        if self.bus == Bus::Rabbitmq && self.amqp_url.is_none() {
            return Err(BadSetting::new("bus", "takes rabbitmq together with amqp_url, else postgres"));
        }
        self.relay.check().map_err(|(setting, takes)| BadSetting::new(setting, takes))?;
        self.webhook_client()?;
        self.events.check().map_err(|(setting, takes)| BadSetting::new(setting, takes))?;
        self.redis_client()?;
        if self.database_direct_url.is_some() && self.database_url.is_none() {
            return Err(BadSetting::new(
                "database_direct_url",
                "goes together with database_url, the pooler in front of it",
            ));
        }
        self.database()?;
        self.pooler()?;
        self.replica()?;
        if let Some(unknown) = self.services.iter().find(|name| !SERVICES.contains(&name.as_str())) {
            let known = SERVICES.join(", ");
            return Err(BadSetting::new("services", format!("has no service `{unknown}`; there are: {known}")));
        }
        if let Some(key) = &self.admin_key {
            check_admin_key(key.reveal())?;
        }
        self.master_key_given()?;
        self.previous_master_keys().map(drop)
    }

    /// The key from the settings, if there is one.
    pub fn master_key_given(&self) -> Result<Option<MasterKey>, BadSetting> {
        let parse = |key: &Secret<String>| key.reveal().parse().map_err(|error| BadSetting::new("secret_key", error));
        self.secret_key.as_ref().map(parse).transpose()
    }

    pub fn previous_master_keys(&self) -> Result<Vec<MasterKey>, BadSetting> {
        let parse =
            |key: &Secret<String>| key.reveal().parse().map_err(|error| BadSetting::new("secret_keys_previous", error));
        self.secret_keys_previous.iter().map(parse).collect()
    }

    pub fn has_service(&self, name: &str) -> bool {
        self.services.is_empty() || self.services.iter().any(|service| service == name)
    }

    /// What webhooks are sent with.
    pub fn webhook_client(&self) -> Result<hub::client::Client, BadSetting> {
        let tries_on_this_machine = self.database_url.is_none();
        self.hub.client(tries_on_this_machine).map_err(|(setting, takes)| BadSetting::new(setting, takes))
    }

    pub fn has_role(&self, role: Role) -> bool {
        self.roles.is_empty() || self.roles.contains(&role)
    }

    pub fn pool_limits(&self) -> PoolLimits {
        PoolLimits {
            connections_min: self.pool_min,
            connections_max: self.pool_max,
            statement_timeout: millis(self.statement_timeout_ms),
            ..PoolLimits::default()
        }
    }

    /// The broker, if there is one; it connects when it is first used.
    pub fn broker(&self) -> Result<Option<Arc<Broker>>, BadSetting> {
        let broker = self.amqp_url.clone().map(Broker::new).transpose();
        Ok(broker.map_err(|error| BadSetting::new("amqp_url", error))?.map(Arc::new))
    }

    /// Redis, if there is one; it connects when it is first used.
    pub fn redis_client(&self) -> Result<Option<redis::Client>, BadSetting> {
        let takes = "takes an address such as redis://host:6379/0";
        let open = |url: &Secret<String>| redis::Client::open(url.reveal().as_str());
        self.redis_url.as_ref().map(open).transpose().map_err(|_| BadSetting::new("redis_url", takes))
    }

    /// PostgreSQL itself, unless it is our private one.
    pub fn database(&self) -> Result<Option<PgConnectOptions>, BadSetting> {
        match &self.database_direct_url {
            Some(_) => database_at(self.database_setting(), &self.database_direct_url),
            None => database_at(self.database_setting(), &self.database_url),
        }
    }

    /// The setting that leads to PostgreSQL itself.
    pub fn database_setting(&self) -> &'static str {
        if self.database_direct_url.is_some() { "database_direct_url" } else { "database_url" }
    }

    /// The pooler that requests go through, if there is one.
    pub fn pooler(&self) -> Result<Option<PgConnectOptions>, BadSetting> {
        match &self.database_direct_url {
            Some(_) => database_at("database_url", &self.database_url),
            None => Ok(None),
        }
    }

    /// The replica that feeds are read from, if there is one.
    pub fn replica(&self) -> Result<Option<PgConnectOptions>, BadSetting> {
        database_at("replica_url", &self.replica_url)
    }

    pub fn keep(&self) -> Keep {
        Keep { log_days: self.log_days, behind_days: self.behind_days }
    }

    pub fn lease_time(&self) -> Duration {
        millis(self.lease_ms)
    }

    pub fn request_limits(&self) -> RequestLimits {
        RequestLimits {
            body_bytes_max: self.body_bytes_max as usize,
            body_time_max: millis(self.body_timeout_ms),
            request_time_max: millis(self.request_timeout_ms),
        }
    }

    pub fn serve_limits(&self) -> ServeLimits {
        ServeLimits {
            connections_max: self.connections_max as usize,
            head_time_max: millis(self.head_timeout_ms),
            write_time_max: millis(self.write_timeout_ms),
            drain_time_max: millis(self.drain_timeout_ms),
        }
    }

    pub fn rate_limit(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.rate_limit_per_second)
    }
}

fn database_at(setting: &str, url: &Option<Secret<String>>) -> Result<Option<PgConnectOptions>, BadSetting> {
    let Some(url) = url.as_ref().map(Secret::reveal) else { return Ok(None) };
    let is_address = url.starts_with("postgres://") || url.starts_with("postgresql://");
    // Not the parser's own words: they may quote the password.
    match url.parse::<PgConnectOptions>() {
        // PgBouncer refuses it, and PostgreSQL shows all digits anyway.
        Ok(options) if is_address => Ok(Some(options.extra_float_digits(None))),
        _ => Err(BadSetting::new(setting, "takes an address such as postgres://user:password@host:5432/name")),
    }
}

fn check_admin_key(key: &str) -> Result<(), BadSetting> {
    let plain = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if plain && (24..=128).contains(&key.len()) {
        return Ok(());
    }
    Err(BadSetting::new("admin_key", "takes 24 to 128 of A-Z, a-z, 0-9, _ and -; make them random, with pbx_ in front"))
}

fn default_data_dir() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // Not root's home: PostgreSQL runs as another user then, who cannot reach it.
    if nix::unistd::geteuid().is_root() {
        return PathBuf::from("/var/lib/pillarbox");
    }
    let share = variable("XDG_DATA_HOME").or_else(|| variable("HOME").map(|home| home.join(".local/share")));
    share.map_or_else(|| PathBuf::from("pillarbox-data"), |share| share.join("pillarbox"))
}

/// The file that is read when it is there and none is named.
pub fn default_file() -> Option<&'static Path> {
    let file = Path::new("pillarbox.toml");
    file.exists().then_some(file)
}

fn millis(count: u32) -> Duration {
    Duration::from_millis(u64::from(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_good() {
        Settings::default().check().unwrap();
    }

    #[test]
    fn a_bad_value_is_refused_by_name_and_a_secret_is_not_shown() {
        let refused = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.check().unwrap_err().to_string()
        };
        assert!(refused(|settings| settings.pool_max = 0).contains("pool_max"));
        assert!(refused(|settings| settings.services = vec!["nope".to_owned()]).contains("services"));
        assert!(refused(|settings| settings.bus = Bus::Rabbitmq).contains("amqp_url"));
        let direct =
            |settings: &mut Settings| settings.database_direct_url = Some(Secret::new("postgres://h/n".to_owned()));
        assert!(refused(direct).contains("database_url"));
        let error = refused(|settings| settings.admin_key = Some(Secret::new("hunter2".to_owned())));
        assert!(error.contains("admin_key") && !error.contains("hunter2"), "{error}");
        let error = refused(|settings| settings.secret_key = Some(Secret::new("hunter2".to_owned())));
        assert!(error.contains("secret_key") && !error.contains("hunter2"), "{error}");
    }
}
