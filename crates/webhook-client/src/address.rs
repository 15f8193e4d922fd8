//! Decides which IP addresses may be dialled.
//!
//! An untrusted URL makes this process send a request from inside the operator's network (server-side request forgery). So
//! only public addresses are dialled, and those of networks that the operator allows. The metadata services of cloud
//! providers are never dialled.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorClass, RequestError};

/// The IPv4 networks that IANA lists as not globally reachable, and multicast.
const REFUSED_V4: [([u8; 4], u32); 15] = [
    ([0, 0, 0, 0], 8),       // this network
    ([10, 0, 0, 0], 8),      // private
    ([100, 64, 0, 0], 10),   // carrier-grade NAT
    ([127, 0, 0, 0], 8),     // loopback
    ([169, 254, 0, 0], 16),  // link-local, including the metadata servers of cloud providers
    ([172, 16, 0, 0], 12),   // private
    ([192, 0, 0, 0], 24),    // protocol assignments
    ([192, 0, 2, 0], 24),    // documentation
    ([192, 88, 99, 0], 24),  // 6to4 relays
    ([192, 168, 0, 0], 16),  // private
    ([198, 18, 0, 0], 15),   // benchmarks
    ([198, 51, 100, 0], 24), // documentation
    ([203, 0, 113, 0], 24),  // documentation
    ([224, 0, 0, 0], 4),     // multicast
    ([240, 0, 0, 0], 4),     // reserved, and broadcast
];

/// The IPv6 networks that IANA lists as not globally reachable, and multicast.
const REFUSED_V6: [([u16; 8], u32); 11] = [
    // Loopback, unspecified, and every embedded IPv4 address except the two forms that `embedded_ipv4` translates.
    ([0, 0, 0, 0, 0, 0, 0, 0], 8),
    ([0x100, 0, 0, 0, 0, 0, 0, 0], 64),      // discard
    ([0x2001, 0, 0, 0, 0, 0, 0, 0], 23),     // protocol assignments, Teredo
    ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), // documentation
    ([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),     // 6to4, which embeds an IPv4 address
    ([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20),     // documentation
    ([0x5f00, 0, 0, 0, 0, 0, 0, 0], 16),     // segment routing
    ([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7),      // unique local
    ([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),     // link-local
    ([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10),     // site-local
    ([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),      // multicast
];

/// The metadata services of cloud providers. They give the credentials of the machine to everyone who reaches them, and no
/// webhook is received there, so they are refused in every network, also in one that the operator allows.
const METADATA_V4: [[u8; 4]; 7] = [
    [169, 254, 169, 254], // AWS, Azure, Google, Oracle, DigitalOcean, OpenStack and others
    [169, 254, 170, 2],   // AWS, tasks of ECS
    [169, 254, 170, 23],  // AWS, pods of EKS
    [169, 254, 0, 23],    // Tencent
    [168, 63, 129, 16],   // Azure's platform, in a public network
    [100, 100, 100, 200], // Alibaba
    [192, 0, 0, 192],     // Oracle
];
const METADATA_V6: [[u16; 8]; 4] = [
    [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254],      // AWS
    [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23],       // AWS, pods of EKS
    [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254],       // Google
    [0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe], // Oracle
];

/// Networks that may be dialled although they are not public. Empty by default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllowedNetworks(Vec<IpNet>);

impl AllowedNetworks {
    /// Allows these networks.
    pub fn new(networks: impl IntoIterator<Item = IpNet>) -> AllowedNetworks {
        AllowedNetworks(networks.into_iter().collect())
    }

    /// The loopback networks 127.0.0.0/8 and ::1, for trying webhooks on one machine.
    pub fn loopback() -> AllowedNetworks {
        let networks =
            [IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8), IpAddr::from(Ipv6Addr::LOCALHOST).into()];
        AllowedNetworks::new(networks)
    }

    /// Returns whether this address may be dialled.
    pub fn permits(&self, address: IpAddr) -> bool {
        if is_metadata_service(address) {
            return false;
        }
        let dialled = embedded_ipv4(address);
        self.0.iter().any(|network| network.contains(&address) || network.contains(&dialled)) || is_public(dialled)
    }
}

/// Which addresses the client dials, and how it explains a refusal.
pub(crate) struct AddressPolicy {
    pub(crate) allowed: AllowedNetworks,
    /// What precedes the names of the settings in error texts.
    pub(crate) setting_prefix: &'static str,
}

impl AddressPolicy {
    pub(crate) fn permits(&self, address: IpAddr) -> bool {
        self.allowed.permits(address)
    }

    /// Fails if an IP address in a URL is not permitted. Such an address skips DNS, and so the vetting of names.
    pub(crate) fn vet_ip_address(&self, address: IpAddr) -> Result<(), RequestError> {
        if self.permits(address) {
            return Ok(());
        }
        let reason = if is_metadata_service(address) {
            "but a metadata service of a cloud provider, which webhooks never reach".to_owned()
        } else {
            format!("and `{}allowed_networks` does not list it", self.setting_prefix)
        };
        Err(RequestError::new(ErrorClass::AddressRefused, format!("{address} is not a public address, {reason}")))
    }

    /// The text does not contain the address: it would reveal names and addresses of the internal network to the caller.
    pub(crate) fn refused(&self, name: &str) -> RequestError {
        let prefix = self.setting_prefix;
        RequestError::new(
            ErrorClass::AddressRefused,
            format!(
                "{name} has an address that is not public, or not permitted: `{prefix}allowed_networks` lists exceptions"
            ),
        )
    }
}

/// Returns the IPv4 address that is dialled for `::ffff:a.b.c.d` (translated by this machine) and `64:ff9b::a.b.c.d`
/// (translated by a NAT64 gateway), and otherwise the address itself.
fn embedded_ipv4(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    match v6.segments() {
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => {
            let [.., a, b, c, d] = v6.octets();
            Ipv4Addr::new(a, b, c, d).into()
        }
        _ => address,
    }
}

/// Returns whether the address is that of a cloud provider's metadata service.
fn is_metadata_service(address: IpAddr) -> bool {
    match embedded_ipv4(address) {
        IpAddr::V4(address) => METADATA_V4.contains(&address.octets()),
        IpAddr::V6(address) => METADATA_V6.contains(&address.segments()),
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !REFUSED_V4.iter().any(|&(network, prefix)| {
            (u32::from(address) ^ u32::from(Ipv4Addr::from(network))) >> (u32::BITS - prefix) == 0
        }),
        IpAddr::V6(address) => !REFUSED_V6.iter().any(|&(network, prefix)| {
            (u128::from(address) ^ u128::from(Ipv6Addr::from(network))) >> (u128::BITS - prefix) == 0
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permitted(address: &str) -> bool {
        AllowedNetworks::default().permits(address.parse().unwrap())
    }

    /// The first and last address of each range, and the addresses before and after it where they are public.
    #[test]
    fn every_range_is_refused_from_its_first_to_its_last_address_only() {
        for (before, first, last, after) in [
            ("", "0.0.0.0", "0.255.255.255", "1.0.0.0"),
            ("9.255.255.255", "10.0.0.0", "10.255.255.255", "11.0.0.0"),
            ("100.63.255.255", "100.64.0.0", "100.127.255.255", "100.128.0.0"),
            ("126.255.255.255", "127.0.0.0", "127.255.255.255", "128.0.0.0"),
            ("169.253.255.255", "169.254.0.0", "169.254.255.255", "169.255.0.0"),
            ("172.15.255.255", "172.16.0.0", "172.31.255.255", "172.32.0.0"),
            ("191.255.255.255", "192.0.0.0", "192.0.0.255", "192.0.1.0"),
            ("192.0.1.255", "192.0.2.0", "192.0.2.255", "192.0.3.0"),
            ("192.88.98.255", "192.88.99.0", "192.88.99.255", "192.88.100.0"),
            ("192.167.255.255", "192.168.0.0", "192.168.255.255", "192.169.0.0"),
            ("198.17.255.255", "198.18.0.0", "198.19.255.255", "198.20.0.0"),
            ("198.51.99.255", "198.51.100.0", "198.51.100.255", "198.51.101.0"),
            ("203.0.112.255", "203.0.113.0", "203.0.113.255", "203.0.114.0"),
            ("223.255.255.255", "224.0.0.0", "239.255.255.255", ""),
            ("", "240.0.0.0", "255.255.255.255", ""),
            ("", "::", "ff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", ""),
            ("", "100::", "100::ffff:ffff:ffff:ffff", "100:0:0:1::"),
            (
                "2000:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                "2001::",
                "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff",
                "2001:200::",
            ),
            (
                "2001:db7:ffff:ffff:ffff:ffff:ffff:ffff",
                "2001:db8::",
                "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
                "2001:db9::",
            ),
            ("2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2003::"),
            (
                "3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
                "3fff::",
                "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff",
                "3fff:1000::",
            ),
            ("5eff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "5f00::", "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "5f01::"),
            ("fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fe00::"),
            ("fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", ""),
            ("", "fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", ""),
            ("", "ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", ""),
            // The neighbours of the two ranges whose embedded IPv4 address decides.
            ("", "::1", "::fffe:ffff:ffff", ""),
            ("", "::1:0:0:0", "64:ff9a:ffff:ffff:ffff:ffff:ffff:ffff", ""),
            ("", "64:ff9b::1:0:0", "64:ff9b:ffff:ffff:ffff:ffff:ffff:ffff", ""),
        ] {
            assert!(!permitted(first), "{first}");
            assert!(!permitted(last), "{last}");
            for neighbour in [before, after].into_iter().filter(|neighbour| !neighbour.is_empty()) {
                assert!(permitted(neighbour), "{neighbour}");
            }
        }
    }

    #[test]
    fn an_embedded_ipv4_address_decides() {
        for prefix in ["::ffff:", "64:ff9b::"] {
            for (inside, public) in [
                ("8.8.8.8", true),
                ("127.0.0.1", false),
                ("169.254.169.254", false),
                ("0.0.0.0", false),
                ("255.255.255.255", false),
                ("172.15.255.255", true),
            ] {
                assert_eq!(permitted(&format!("{prefix}{inside}")), public, "{prefix}{inside}");
            }
        }
        assert!(!permitted("::127.0.0.1") && !permitted("::8.8.8.8") && !permitted("::ffff:0:8.8.8.8"));
    }

    #[test]
    fn an_allowed_network_is_permitted_and_its_neighbours_are_not() {
        let networks = ["10.1.0.0/16", "fd00::/8", "192.168.7.7/32"].map(|network| network.parse().unwrap());
        let allowed = AllowedNetworks::new(networks);
        let permits = |address: &str| allowed.permits(address.parse().unwrap());
        for inside in ["10.1.0.0", "10.1.255.255", "::ffff:10.1.2.3", "fd00::", "192.168.7.7", "8.8.8.8"] {
            assert!(permits(inside), "{inside}");
        }
        for outside in ["10.0.255.255", "10.2.0.0", "::ffff:10.2.0.0", "fc00::1", "192.168.7.8", "::1"] {
            assert!(!permits(outside), "{outside}");
        }
        assert!(AllowedNetworks::loopback().permits("127.9.9.9".parse().unwrap()));
        assert!(AllowedNetworks::loopback().permits("::1".parse().unwrap()));
        assert!(!AllowedNetworks::loopback().permits("::2".parse().unwrap()));
    }

    #[test]
    fn a_metadata_service_is_refused_even_in_an_allowed_network() {
        let everything = AllowedNetworks::new(["0.0.0.0/0", "::/0"].map(|network| network.parse().unwrap()));
        let permits = |address: &str| everything.permits(address.parse().unwrap());
        for service in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "64:ff9b::169.254.169.254",
            "169.254.170.2",
            "168.63.129.16",
            "::ffff:168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
        ] {
            assert!(!permits(service), "{service}");
        }
        for neighbour in ["169.254.169.253", "168.63.129.15", "100.100.100.201", "192.0.0.193", "fd00:ec2::255"] {
            assert!(permits(neighbour), "{neighbour}");
        }
        assert!(!permitted("168.63.129.16") && permitted("168.63.129.17"), "it is in a public network");
    }
}
