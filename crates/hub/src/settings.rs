//! The settings of the hub (table `hub`), and the HTTP clients that they describe.

use runtime::config::{InvalidSetting, List};
use runtime::network::Network;
use serde::{Deserialize, Deserializer, Serialize};
use webhook_client::{AllowedNetworks, Client, ClientSettings, InvalidProxy};

use crate::deliveries::clients::TenantClients;
use crate::events::export::Export;
use crate::events::sql_events::SqlEvents;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HubSettings {
    /// Non-public networks that the webhooks of every tenant may reach, such as `10.1.0.0/16`. Without the setting: none,
    /// except loopback for the tenant `main` of an instance with an embedded PostgreSQL, so that it can be tried on one
    /// machine.
    #[serde(deserialize_with = "allowed_networks")]
    pub allowed_networks: Option<AllowedNetworks>,
    /// The ports that webhooks may reach. Empty: all.
    #[serde(deserialize_with = "runtime::config::list")]
    pub allowed_ports: Vec<u16>,
    pub https_only: bool,
    /// The proxy through which webhooks are sent: `http://[user:password@]host:port`.
    pub egress_proxy: Option<runtime::secret::Secret<String>>,
    /// Retention of delivery attempts.
    pub attempt_days: u32,
    /// How long a dead letter can be retried.
    pub dead_letter_days: u32,
    /// Retention of the health of subscribers.
    pub health_days: u32,
    /// Topics of the services that become hub events of the tenant `main`: `["event.*", "join.*"]`.
    pub export: Export,
    /// Topics of messages posted in SQL that become hub events of their tenant: `["order.*"]`. `*`: all but e-mails.
    pub sql_events: SqlEvents,
    /// Requests in flight, of all subscribers of a process.
    pub in_flight_max: u32,
    /// Subscribers of a tenant.
    pub subscribers_max: u32,
    /// Hub messages of a tenant that may wait. With more, its events are refused.
    pub waiting_max: u64,
    /// How long the answer to a change of a subscriber waits for the dispatchers.
    pub change_wait_ms: u32,
    /// Every endpoint has to answer a challenge before it gets webhooks.
    pub verify_endpoints: bool,
}

fn allowed_networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<AllowedNetworks>, D::Error> {
    let networks = Option::<List<Network>>::deserialize(deserializer)?;
    Ok(networks.map(|List(networks)| AllowedNetworks::new(networks.into_iter().map(Network::into))))
}

impl Default for HubSettings {
    fn default() -> HubSettings {
        HubSettings {
            allowed_networks: None,
            allowed_ports: Vec::new(),
            https_only: false,
            egress_proxy: None,
            attempt_days: 30,
            dead_letter_days: 90,
            health_days: 30,
            export: Export::default(),
            sql_events: SqlEvents::default(),
            in_flight_max: 4_096,
            subscribers_max: 10_000,
            waiting_max: 10_000_000,
            change_wait_ms: 5_000,
            verify_endpoints: false,
        }
    }
}

impl HubSettings {
    /// Fails with the name of the limit that is out of range.
    pub(crate) fn check_limits(&self) -> Result<(), InvalidSetting> {
        let limits = [
            ("hub.health_days", u64::from(self.health_days), 1..=366),
            ("hub.in_flight_max", u64::from(self.in_flight_max), 16..=100_000),
            ("hub.subscribers_max", u64::from(self.subscribers_max), 1..=100_000),
            ("hub.waiting_max", self.waiting_max, 100..=1_000_000_000_000),
            ("hub.change_wait_ms", u64::from(self.change_wait_ms), 10..=25_000),
        ];
        for (setting, value, range) in limits {
            if !range.contains(&value) {
                let detail = format!("must be from {} to {}, not {value}", range.start(), range.end());
                return Err(InvalidSetting::new(setting, detail));
            }
        }
        Ok(())
    }

    /// Builds the HTTP clients that send webhooks. Fails with the name of the invalid setting and the values it accepts.
    pub(crate) fn clients(&self, has_embedded_database: bool) -> Result<TenantClients, InvalidSetting> {
        match &self.allowed_networks {
            Some(networks) => Ok(TenantClients::shared(self.client(networks.clone())?)),
            None if !has_embedded_database => Ok(TenantClients::shared(self.client(AllowedNetworks::default())?)),
            // The operator, whose tenant is `main`, can try webhooks on one machine. Another tenant must not reach what
            // listens on loopback: the operator's own services.
            None => Ok(TenantClients::new(
                self.client(AllowedNetworks::loopback())?,
                self.client(AllowedNetworks::default())?,
            )),
        }
    }

    fn client(&self, allowed_networks: AllowedNetworks) -> Result<Client, InvalidSetting> {
        let proxy = match &self.egress_proxy {
            Some(proxy) => Some(
                proxy.reveal().parse().map_err(|error: InvalidProxy| InvalidSetting::new("hub.egress_proxy", error))?,
            ),
            None => None,
        };
        if self.allowed_ports.contains(&0) {
            return Err(InvalidSetting::new("hub.allowed_ports", "must be a list of numbers from 1 to 65535"));
        }
        let settings = ClientSettings {
            allowed_networks,
            https_only: self.https_only,
            allowed_ports: self.allowed_ports.clone(),
            proxy,
            setting_prefix: "hub.",
            ..ClientSettings::default()
        };
        Client::new(settings).map_err(|error| InvalidSetting::new("hub", error))
    }
}

#[cfg(test)]
mod tests {
    use service::Service;

    use super::*;
    use crate::Hub;

    #[test]
    fn networks_are_a_list_or_a_text_with_commas_and_an_invalid_one_names_the_accepted_form() {
        let read = |networks: &str| {
            let settings = format!(r#"{{"allowed_networks":{networks}}}"#);
            serde_json::from_str::<HubSettings>(&settings).map(|settings| settings.allowed_networks)
        };
        let expected = ["10.1.0.0/16", "::1/128"].map(|network| network.parse().unwrap());
        let expected = Some(AllowedNetworks::new(expected));
        for networks in [r#"["10.1.0.0/16", "::1"]"#, r#""10.1.0.0/16, ::1""#] {
            assert_eq!(read(networks).unwrap(), expected);
        }
        assert_eq!(serde_json::to_string(&expected).unwrap(), r#"["10.1.0.0/16","::1/128"]"#);
        for bad in ["10.1", "10.0.0.0/33", "localhost", "::/129"] {
            let error = read(&format!("[\"{bad}\"]")).unwrap_err().to_string();
            assert!(error.contains("10.1.0.0/16"), "{bad}: {error}");
        }
    }

    #[test]
    fn a_limit_out_of_range_is_refused_with_its_name_and_range() {
        assert!(Hub::check(&HubSettings::default()).is_ok());
        let refused = |change: fn(&mut HubSettings)| {
            let mut settings = HubSettings::default();
            change(&mut settings);
            Hub::check(&settings).unwrap_err().to_string()
        };
        for (error, setting, range) in [
            (refused(|settings| settings.health_days = 0), "hub.health_days", "from 1 to 366"),
            (refused(|settings| settings.in_flight_max = 15), "hub.in_flight_max", "from 16 to 100000"),
            (refused(|settings| settings.subscribers_max = 0), "hub.subscribers_max", "from 1 to 100000"),
            (refused(|settings| settings.waiting_max = 99), "hub.waiting_max", "from 100 to 1000000000000"),
            (refused(|settings| settings.change_wait_ms = 9), "hub.change_wait_ms", "from 10 to 25000"),
        ] {
            assert!(error.contains(setting) && error.contains(range), "{error}");
        }
    }
}
