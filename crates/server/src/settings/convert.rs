//! Turns settings into the values that other crates need.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http_kit::client_address::TrustedProxies;
use http_kit::extract::RequestLimits;
use http_kit::serve::ServeLimits;
use pillarbox::database::PoolLimits;
use pillarbox::operations::maintenance::Retention;
use relay::Broker;
use runtime::config::InvalidSetting;
use runtime::secret::{MasterKey, Secret};
use service::Roles;
use sqlx::postgres::PgConnectOptions;

use super::Settings;

/// The address of a mail server.
pub(crate) struct SmtpServer {
    pub(crate) address: String,
    /// The connection begins with a TLS handshake, so there is no plain-text greeting to read.
    pub(crate) tls: bool,
}

impl Settings {
    /// The secret key from the settings, if it is set there.
    pub fn master_key_given(&self) -> Result<Option<MasterKey>, InvalidSetting> {
        let parse =
            |key: &Secret<String>| key.reveal().parse().map_err(|error| InvalidSetting::new("secret_key", error));
        self.secret_key.as_ref().map(parse).transpose()
    }

    /// The former secret keys.
    pub fn previous_master_keys(&self) -> Result<Vec<MasterKey>, InvalidSetting> {
        let parse = |key: &Secret<String>| {
            key.reveal().parse().map_err(|error| InvalidSetting::new("secret_keys_previous", error))
        };
        self.secret_keys_previous.iter().map(parse).collect()
    }

    /// Whether this process runs the service.
    pub fn has_service(&self, name: &str) -> bool {
        self.services.is_empty() || self.services.iter().any(|service| service == name)
    }

    /// The roles of this process.
    pub fn roles(&self) -> Roles {
        Roles::new(self.roles.clone())
    }

    pub fn pool_limits(&self) -> PoolLimits {
        PoolLimits {
            connections_min: self.pool_min,
            connections_max: self.pool_max,
            statement_timeout: millis(self.statement_timeout_ms),
            before_acquire: http_kit::admission::caller_share::assert_admitted,
            ..PoolLimits::default()
        }
    }

    /// The broker, if one is configured. It connects when it is first used.
    pub fn broker(&self) -> Result<Option<Arc<Broker>>, InvalidSetting> {
        let broker = self.amqp_url.clone().map(Broker::new).transpose();
        Ok(broker.map_err(|error| InvalidSetting::new("amqp_url", error))?.map(Arc::new))
    }

    /// The Redis client, if one is configured. It connects when it is first used.
    pub fn redis_client(&self) -> Result<Option<redis::Client>, InvalidSetting> {
        let Some(url) = self.redis_url.as_ref().map(Secret::reveal) else { return Ok(None) };
        service::refuse_redis_tls("redis_url", url)?;
        let invalid = |_| InvalidSetting::new("redis_url", "must be an address such as redis://host:6379/0");
        redis::Client::open(url.as_str()).map(Some).map_err(invalid)
    }

    /// The mail server, if one is configured.
    pub(crate) fn smtp_server(&self) -> Result<Option<SmtpServer>, InvalidSetting> {
        let invalid = || InvalidSetting::new("smtp_url", "must be an address such as smtp://user:password@host:587");
        let Some(url) = &self.smtp_url else { return Ok(None) };
        let uri: axum::http::Uri = url.reveal().parse().map_err(|_| invalid())?;
        let (tls, port_default) = match uri.scheme_str() {
            Some("smtp") => (false, 587),
            Some("smtps") => (true, 465),
            _ => return Err(invalid()),
        };
        let host = uri.host().ok_or_else(invalid)?;
        Ok(Some(SmtpServer { address: format!("{host}:{}", uri.port_u16().unwrap_or(port_default)), tls }))
    }

    /// PostgreSQL itself, without a pooler. `None`: the embedded PostgreSQL is used.
    pub fn database(&self) -> Result<Option<PgConnectOptions>, InvalidSetting> {
        match &self.database_direct_url {
            Some(_) => database_at(self.database_setting(), &self.database_direct_url),
            None => database_at(self.database_setting(), &self.database_url),
        }
    }

    /// The name of the setting with the address of PostgreSQL itself.
    pub fn database_setting(&self) -> &'static str {
        if self.database_direct_url.is_some() { "database_direct_url" } else { "database_url" }
    }

    /// The pooler that requests go through, if one is configured.
    pub fn pooler(&self) -> Result<Option<PgConnectOptions>, InvalidSetting> {
        match &self.database_direct_url {
            Some(_) => database_at("database_url", &self.database_url),
            None => Ok(None),
        }
    }

    /// The streaming replica of the database, if one is configured.
    pub fn replica(&self) -> Result<Option<PgConnectOptions>, InvalidSetting> {
        database_at("replica_url", &self.replica_url)
    }

    pub fn retention(&self) -> Retention {
        Retention { log_days: self.log_days, behind_days: self.behind_days }
    }

    pub fn lease_time(&self) -> Duration {
        millis(self.lease_ms)
    }

    pub fn request_limits(&self) -> RequestLimits {
        RequestLimits {
            body_bytes_max: self.body_bytes_max as usize,
            body_bytes_total_max: self.body_bytes_total_max as usize,
            response_bytes_total_max: self.response_bytes_total_max as usize,
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

    pub fn proxies(&self) -> TrustedProxies {
        TrustedProxies::new(&self.trusted_proxies, self.forwarded_header)
    }

    pub fn rate_limit(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.rate_limit_per_second)
    }
}

fn database_at(setting: &str, url: &Option<Secret<String>>) -> Result<Option<PgConnectOptions>, InvalidSetting> {
    let Some(url) = url.as_ref().map(Secret::reveal) else { return Ok(None) };
    let is_address = url.starts_with("postgres://") || url.starts_with("postgresql://");
    // The parser's error may quote the password.
    match url.parse::<PgConnectOptions>() {
        // PgBouncer refuses the parameter, and current PostgreSQL sends all digits without it.
        Ok(options) if is_address => Ok(Some(options.extra_float_digits(None))),
        _ => Err(InvalidSetting::new(setting, "must be an address such as postgres://user:password@host:5432/name")),
    }
}

fn millis(count: u32) -> Duration {
    Duration::from_millis(u64::from(count))
}
