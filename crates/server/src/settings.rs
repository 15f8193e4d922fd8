//! All settings and their defaults. The field names are the names in `pillarbox.toml`, `PILLARBOX_*` and `--set`.

mod console;
mod convert;
pub(crate) mod listen;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use events::EventsSettings;
use http_kit::auth::Issuer;
use http_kit::client_address::ForwardedHeader;
use hub::HubSettings;
use identity::IdentitySettings;
use notify::{MailSettings, NotifySettings};
use progress::ProgressSettings;
use relay::RelaySettings;
use runtime::config::InvalidSetting;
use runtime::network::Network;
use runtime::secret::Secret;
use runtime::telemetry::LogFormat;
use serde::{Deserialize, Serialize};
pub use service::Role;

pub use console::ConsoleSettings;
pub(crate) use convert::SmtpServer;

/// All settings. A field of a struct type is a section, such as `[hub]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The address of the HTTP server.
    #[serde(deserialize_with = "listen::deserialize")]
    pub listen: SocketAddr,
    /// The address under which users reach this installation, such as `https://events.example.org`. It is the issuer of the
    /// tokens that it signs, and the beginning of the links in e-mails.
    pub public_url: Option<String>,
    /// The proxies in front, whose header is believed about the address of a client. Empty: none.
    #[serde(deserialize_with = "runtime::config::list")]
    pub trusted_proxies: Vec<Network>,
    /// The header in which they pass it on.
    pub forwarded_header: ForwardedHeader,
    /// The data folder: the embedded PostgreSQL and the secret key.
    pub data_dir: PathBuf,

    /// The PostgreSQL to use instead of the embedded one.
    pub database_url: Option<Secret<String>>,
    /// The port of this machine on which the embedded PostgreSQL also listens. 0: on its Unix socket only.
    pub postgres_port: u16,
    /// PostgreSQL itself, when `database_url` is a pooler. Everything but requests uses it.
    pub database_direct_url: Option<Secret<String>>,
    /// A streaming replica of the database, from which the feeds of events are read.
    pub replica_url: Option<Secret<String>>,
    pub amqp_url: Option<Secret<String>>,
    pub redis_url: Option<Secret<String>>,
    /// The prefix of all Redis keys, for a Redis that several installations use.
    pub redis_prefix: String,
    pub smtp_url: Option<Secret<String>>,

    /// The services to run. Empty: all.
    #[serde(deserialize_with = "runtime::config::list")]
    pub services: Vec<String>,
    /// The roles of this process. Empty: all.
    #[serde(deserialize_with = "runtime::config::list")]
    pub roles: Vec<Role>,
    /// How messages reach the services.
    pub bus: Bus,

    pub relay: RelaySettings,
    pub hub: HubSettings,
    pub events: EventsSettings,
    pub identity: IdentitySettings,
    pub progress: ProgressSettings,
    pub notify: NotifySettings,
    pub mail: MailSettings,
    pub console: ConsoleSettings,
    /// How long a process that no longer responds keeps its leases.
    pub lease_ms: u32,
    /// How long the log retains a message.
    pub log_days: u32,
    /// How long retention waits for a consumer that is behind; then the consumer lapses.
    pub behind_days: u32,
    /// How long the audit trail retains what keys of the tenant `main` did for other tenants.
    pub audit_days: u32,

    /// An admin key that is valid from the start.
    pub admin_key: Option<Secret<String>>,
    /// 32 bytes in base64, the same for all replicas. Absent: generated and stored in the data folder.
    pub secret_key: Option<Secret<String>>,
    /// Former secret keys. What they signed or encrypted stays valid.
    #[serde(deserialize_with = "runtime::config::list")]
    pub secret_keys_previous: Vec<Secret<String>>,
    /// Further issuers whose users may call the API.
    #[serde(deserialize_with = "runtime::config::list")]
    pub issuers: Vec<Issuer>,

    pub pool_min: u32,
    pub pool_max: u32,
    /// The size of the separate pool for background work.
    pub worker_pool_max: u32,
    pub statement_timeout_ms: u32,
    /// Requests per second for each caller. 0: no limit.
    pub rate_limit_per_second: u32,
    pub connections_max: u32,
    pub body_bytes_max: u32,
    /// The bodies of all requests in progress together; one caller may use half of it.
    pub body_bytes_total_max: u32,
    /// The responses that clients have yet to read, together; one caller may use half of it.
    pub response_bytes_total_max: u32,
    pub body_timeout_ms: u32,
    pub head_timeout_ms: u32,
    pub write_timeout_ms: u32,
    pub request_timeout_ms: u32,
    pub drain_timeout_ms: u32,

    /// The log level, or levels by target.
    pub log: String,
    pub log_format: LogFormat,
    /// The address that traces are sent to (OTLP over HTTP).
    pub otlp_endpoint: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bus {
    /// All services share one database and read its log.
    #[default]
    Postgres,
    /// The relay publishes the log and services read queues, so each service may have its own database.
    Rabbitmq,
}

/// The largest total of both pools with the embedded PostgreSQL, which accepts 100 connections; the rest is for operators.
const EMBEDDED_DATABASE_POOL_MAX: u32 = 80;

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            public_url: None,
            trusted_proxies: Vec::new(),
            forwarded_header: ForwardedHeader::default(),
            data_dir: default_data_dir(),
            postgres_port: 0,
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
            identity: IdentitySettings::default(),
            progress: ProgressSettings::default(),
            notify: NotifySettings::default(),
            mail: MailSettings::default(),
            console: ConsoleSettings::default(),
            lease_ms: 15_000,
            log_days: 7,
            behind_days: 14,
            audit_days: 90,
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
            body_bytes_total_max: 64 * 1024 * 1024,
            response_bytes_total_max: 64 * 1024 * 1024,
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
    /// Checks what belongs to no service.
    pub(crate) fn check_values(&self) -> Result<(), InvalidSetting> {
        self.check_pools()?;
        self.check_durations_and_sizes()?;
        if self.bus == Bus::Rabbitmq && self.amqp_url.is_none() {
            return Err(InvalidSetting::new("bus", "must be postgres unless amqp_url is set"));
        }
        self.relay.check().map_err(|(setting, error)| InvalidSetting::new(setting, error))?;
        self.console.check()?;
        self.check_postgres_port()?;
        self.check_public_url()?;
        self.check_addresses()?;
        self.check_secrets()
    }

    fn check_postgres_port(&self) -> Result<(), InvalidSetting> {
        if self.postgres_port != 0 && self.database_url.is_some() {
            return Err(InvalidSetting::new(
                "postgres_port",
                "is for the embedded PostgreSQL: remove it, or database_url",
            ));
        }
        Ok(())
    }

    fn check_pools(&self) -> Result<(), InvalidSetting> {
        if self.pool_max == 0 {
            return Err(InvalidSetting::new("pool_max", "must be a number from 1"));
        }
        check_least("pool_max", self.pool_max, "pool_min", self.pool_min)?;
        if self.worker_pool_max == 0 {
            return Err(InvalidSetting::new("worker_pool_max", "must be a number from 1"));
        }
        let connections = self.pool_max.saturating_add(self.worker_pool_max);
        if self.database_url.is_none() && connections > EMBEDDED_DATABASE_POOL_MAX {
            let error =
                format!("must be at most {EMBEDDED_DATABASE_POOL_MAX} with the embedded PostgreSQL, together with");
            return Err(InvalidSetting::compared("pool_max", error, "worker_pool_max", self.worker_pool_max));
        }
        Ok(())
    }

    fn check_durations_and_sizes(&self) -> Result<(), InvalidSetting> {
        for (name, value) in [
            ("statement_timeout_ms", self.statement_timeout_ms),
            ("log_days", self.log_days),
            ("audit_days", self.audit_days),
            ("connections_max", self.connections_max),
            ("body_bytes_max", self.body_bytes_max),
            ("response_bytes_total_max", self.response_bytes_total_max),
            ("body_timeout_ms", self.body_timeout_ms),
            ("head_timeout_ms", self.head_timeout_ms),
            ("write_timeout_ms", self.write_timeout_ms),
            ("request_timeout_ms", self.request_timeout_ms),
        ] {
            if !(1..=i32::MAX as u32).contains(&value) {
                return Err(InvalidSetting::new(name, format!("must be a number from 1 to {}", i32::MAX)));
            }
        }
        check_least("body_bytes_total_max", self.body_bytes_total_max, "body_bytes_max", self.body_bytes_max)?;
        if self.lease_ms < 1_000 {
            return Err(InvalidSetting::new("lease_ms", "must be a number from 1000"));
        }
        check_least("behind_days", self.behind_days, "log_days", self.log_days)?;
        // A message that is processed again must find the notifications that it has made.
        let (retention_days, behind_days) = (self.notify.retention_days, self.behind_days);
        if retention_days <= behind_days {
            let detail = format!("must be {} or more: above", behind_days.saturating_add(1));
            return Err(InvalidSetting::compared("notify.retention_days", detail, "behind_days", behind_days));
        }
        Ok(())
    }

    /// Checks all addresses before anything is created or connected.
    fn check_addresses(&self) -> Result<(), InvalidSetting> {
        self.broker()?;
        self.redis_client()?;
        self.smtp_server()?;
        if self.database_direct_url.is_some() && self.database_url.is_none() {
            return Err(InvalidSetting::new(
                "database_direct_url",
                "requires database_url, the address of the pooler in front of it",
            ));
        }
        self.database()?;
        self.pooler()?;
        self.replica().map(drop)
    }

    fn check_public_url(&self) -> Result<(), InvalidSetting> {
        let Some(address) = &self.public_url else { return Ok(()) };
        let uri = address.parse::<axum::http::Uri>().ok();
        let is_valid = uri.is_some_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
                && uri.query().is_none()
                && address.len() <= 255
                && !address.ends_with('/')
        });
        if is_valid {
            return Ok(());
        }
        let error = "must be an address such as https://events.example.org, without a slash at the end";
        Err(InvalidSetting::new("public_url", error))
    }

    pub(crate) fn check_service_names(&self, known: &[&str]) -> Result<(), InvalidSetting> {
        match self.services.iter().find(|name| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some(unknown) => {
                let error = format!("there is no service `{unknown}`; each must be one of {}", known.join(", "));
                Err(InvalidSetting::new("services", error))
            }
        }
    }

    fn check_secrets(&self) -> Result<(), InvalidSetting> {
        if let Some(key) = &self.admin_key {
            check_admin_key(key.reveal())?;
        }
        self.master_key_given()?;
        self.previous_master_keys().map(drop)
    }
}

/// Fails if the value of the setting is below that of another one.
fn check_least(setting: &str, value: u32, other: &str, least: u32) -> Result<(), InvalidSetting> {
    if value >= least {
        return Ok(());
    }
    Err(InvalidSetting::compared(setting, format!("must be {least} or more: not below"), other, least))
}

fn check_admin_key(key: &str) -> Result<(), InvalidSetting> {
    let plain = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if plain && (24..=128).contains(&key.len()) {
        return Ok(());
    }
    Err(InvalidSetting::new(
        "admin_key",
        "must have 24 to 128 characters of A-Z, a-z, 0-9, _ and -; use pbx_ followed by random characters",
    ))
}

fn default_data_dir() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // The user `postgres`, which runs the embedded PostgreSQL then, cannot reach the home folder of root.
    if nix::unistd::geteuid().is_root() {
        return PathBuf::from("/var/lib/pillarbox");
    }
    let share = variable("XDG_DATA_HOME").or_else(|| variable("HOME").map(|home| home.join(".local/share")));
    share.map_or_else(|| PathBuf::from("pillarbox-data"), |share| share.join("pillarbox"))
}

/// The settings file that is read when none is named. `None` if it does not exist.
pub fn default_file() -> Option<&'static Path> {
    let file = Path::new("pillarbox.toml");
    file.exists().then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        Settings::default().check().unwrap();
    }

    #[test]
    fn an_invalid_value_is_named_and_a_secret_is_not_shown() {
        let refused = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.check().unwrap_err().to_string()
        };
        assert!(refused(|settings| settings.pool_max = 0).contains("pool_max"));
        assert!(refused(|settings| settings.services = vec!["nope".to_owned()]).contains("services"));
        assert!(refused(|settings| settings.bus = Bus::Rabbitmq).contains("amqp_url"));
        assert!(refused(|settings| settings.amqp_url = Some(Secret::new("localhost".to_owned()))).contains("amqp_url"));
        let error = refused(|settings| settings.redis_url = Some(Secret::new("rediss://:hunter2@h".to_owned())));
        assert!(error.contains("`redis_url`: TLS to Redis is not supported") && !error.contains("hunter2"), "{error}");
        let error =
            refused(|settings| settings.progress.redis_url = Some(Secret::new("rediss://:hunter2@h".to_owned())));
        assert!(error.contains("`progress.redis_url`: TLS to Redis is not supported"), "{error}");
        assert!(refused(|settings| settings.smtp_url = Some(Secret::new("localhost".to_owned()))).contains("smtp_url"));
        assert!(refused(|settings| settings.public_url = Some("example.org/".to_owned())).contains("public_url"));
        assert!(refused(|settings| settings.body_bytes_total_max = 1_000).contains("body_bytes_total_max"));
        assert!(refused(|settings| settings.hub.allowed_ports = vec![443, 0]).contains("hub.allowed_ports"));
        let direct =
            |settings: &mut Settings| settings.database_direct_url = Some(Secret::new("postgres://h/n".to_owned()));
        assert!(refused(direct).contains("database_url"));
        let error = refused(|settings| settings.admin_key = Some(Secret::new("hunter2".to_owned())));
        assert!(error.contains("admin_key") && !error.contains("hunter2"), "{error}");
        let error = refused(|settings| settings.secret_key = Some(Secret::new("hunter2".to_owned())));
        assert!(error.contains("secret_key") && !error.contains("hunter2"), "{error}");
    }
}
