//! IP networks in settings.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A network in CIDR notation, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network(IpNet);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid network: it must be an address or a network in CIDR notation, such as 10.1.0.0/16 or fd00::/8")]
pub struct InvalidNetwork;

impl Network {
    /// Returns whether the address is in the network. An IPv4 network does not contain `::ffff:a.b.c.d`.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }
}

impl From<IpNet> for Network {
    fn from(network: IpNet) -> Network {
        Network(network)
    }
}

impl From<Network> for IpNet {
    fn from(Network(network): Network) -> IpNet {
        network
    }
}

impl FromStr for Network {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Network, InvalidNetwork> {
        let single = || text.parse::<IpAddr>().map(IpNet::from);
        text.parse().or_else(|_| single()).map(Network).map_err(|_| InvalidNetwork)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Network {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Network, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
