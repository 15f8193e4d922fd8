//! The settings of identity, the section `[identity]`.

use std::ops::RangeInclusive;

use argon2::Params;
use chrono::TimeDelta;
use runtime::config::InvalidSetting;
use serde::{Deserialize, Serialize};

use crate::domain::Limit;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IdentitySettings {
    /// How long an access token is valid. It bounds the time in which another process accepts the token of a session that has
    /// ended.
    pub access_token_seconds: u32,
    /// How long a refresh token is valid: a session that is not used for this time ends.
    pub refresh_token_days: u32,
    /// How long a session lasts, however often it is used.
    pub session_days: u32,
    /// How long a client that lost the answer may repeat a refresh.
    pub refresh_grace_seconds: u32,
    /// How long the tokens in e-mails are valid.
    pub verification_hours: u32,
    pub password_reset_hours: u32,
    /// After how many days an account is deleted whose address was never verified.
    pub unverified_days: u32,
    /// The parameters of Argon2id for new hashes.
    pub hash_memory_kib: u32,
    pub hash_iterations: u32,
    pub hash_parallelism: u32,
    /// The number of threads that compute hashes; 0 means one for each core.
    pub hash_threads: u32,
    /// The number of hashes that may wait. Above it, requests are answered with 503.
    pub hash_queue_max: u32,
    /// Failed sign-ins of an account, and of a network, within the window; 0 means no limit.
    pub login_failures_max: u32,
    pub login_failures_per_network_max: u32,
    pub login_window_minutes: u32,
    /// Requests that may cause an e-mail, for an address and of a network, within the window; 0 means no limit.
    pub emails_per_account_max: u32,
    pub email_requests_per_network_max: u32,
    pub email_window_minutes: u32,
}

impl Default for IdentitySettings {
    fn default() -> IdentitySettings {
        IdentitySettings {
            access_token_seconds: 300,
            refresh_token_days: 14,
            session_days: 30,
            refresh_grace_seconds: 10,
            verification_hours: 24,
            password_reset_hours: 1,
            unverified_days: 7,
            hash_memory_kib: 19_456,
            hash_iterations: 2,
            hash_parallelism: 1,
            hash_threads: 0,
            hash_queue_max: 256,
            login_failures_max: 10,
            login_failures_per_network_max: 100,
            login_window_minutes: 15,
            emails_per_account_max: 5,
            email_requests_per_network_max: 60,
            email_window_minutes: 60,
        }
    }
}

impl IdentitySettings {
    /// Fails with the name of the invalid setting and the values it accepts.
    pub(crate) fn check(&self) -> Result<(), InvalidSetting> {
        const LIMIT: RangeInclusive<u32> = 0..=1_000_000;
        let ranges: [(&str, u32, RangeInclusive<u32>); 18] = [
            // The longest lifetime that `http-kit` signs for a session.
            ("access_token_seconds", self.access_token_seconds, 1..=300),
            ("refresh_token_days", self.refresh_token_days, 1..=365),
            ("session_days", self.session_days, 1..=365),
            ("refresh_grace_seconds", self.refresh_grace_seconds, 0..=60),
            ("verification_hours", self.verification_hours, 1..=168),
            ("password_reset_hours", self.password_reset_hours, 1..=24),
            ("unverified_days", self.unverified_days, 1..=365),
            ("hash_memory_kib", self.hash_memory_kib, 8..=4_194_304),
            ("hash_iterations", self.hash_iterations, 1..=100),
            ("hash_parallelism", self.hash_parallelism, 1..=64),
            ("hash_threads", self.hash_threads, 0..=256),
            ("hash_queue_max", self.hash_queue_max, 1..=100_000),
            ("login_failures_max", self.login_failures_max, LIMIT),
            ("login_failures_per_network_max", self.login_failures_per_network_max, LIMIT),
            ("login_window_minutes", self.login_window_minutes, 1..=1_440),
            ("emails_per_account_max", self.emails_per_account_max, LIMIT),
            ("email_requests_per_network_max", self.email_requests_per_network_max, LIMIT),
            ("email_window_minutes", self.email_window_minutes, 1..=1_440),
        ];
        for (name, value, range) in ranges {
            if !range.contains(&value) {
                let detail = format!("must be a number from {} to {}", range.start(), range.end());
                return Err(InvalidSetting::new(&format!("identity.{name}"), detail));
            }
        }
        self.hash_params().map(drop)
    }

    /// The parameters of Argon2id. Fails if there is less memory than the parallelism needs.
    pub(crate) fn hash_params(&self) -> Result<Params, InvalidSetting> {
        let params = Params::new(self.hash_memory_kib, self.hash_iterations, self.hash_parallelism, None);
        params.map_err(|_| {
            let detail = "must be at least 8 times identity.hash_parallelism";
            InvalidSetting::new("identity.hash_memory_kib", detail)
        })
    }

    pub(crate) fn refresh_grace(&self) -> TimeDelta {
        TimeDelta::seconds(i64::from(self.refresh_grace_seconds))
    }

    pub(crate) fn login_limits(&self) -> [Limit; 2] {
        let limit = |attempts_max| Limit { attempts_max, seconds: self.login_window_minutes * 60 };
        [limit(self.login_failures_max), limit(self.login_failures_per_network_max)]
    }

    pub(crate) fn email_limits(&self) -> [Limit; 2] {
        let limit = |attempts_max| Limit { attempts_max, seconds: self.email_window_minutes * 60 };
        [limit(self.emails_per_account_max), limit(self.email_requests_per_network_max)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_an_invalid_value_is_named() {
        IdentitySettings::default().check().unwrap();
        let refused = |change: fn(&mut IdentitySettings)| {
            let mut settings = IdentitySettings::default();
            change(&mut settings);
            settings.check().unwrap_err().to_string()
        };
        // Another process accepts the token of a session that has ended until it expires.
        assert!(refused(|settings| settings.access_token_seconds = 301).contains("identity.access_token_seconds"));
        assert!(refused(|settings| settings.hash_iterations = 0).contains("identity.hash_iterations"));
        assert!(refused(|settings| settings.hash_queue_max = 0).contains("identity.hash_queue_max"));
        let parallel = refused(|settings| (settings.hash_memory_kib, settings.hash_parallelism) = (64, 16));
        assert!(parallel.contains("identity.hash_memory_kib"), "{parallel}");
    }
}
