//! Which addresses the client dials, and which it refuses.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use webhook_client::{AllowedNetworks, Client, ClientSettings, ErrorClass, RequestError, Target};

use crate::receiver::{FixedResolver, OK, Peer, Receiver};
use crate::{client, loopback, post};

/// The only two loopback addresses that are allowed: they stand for public addresses.
const PUBLIC: &str = "127.0.0.2";
const OTHER_PUBLIC: &str = "127.0.0.3";
const PRIVATE: &str = "127.0.0.1";

fn public_only() -> ClientSettings {
    ClientSettings {
        allowed_networks: AllowedNetworks::new(
            [PUBLIC, OTHER_PUBLIC].map(|address| address.parse::<IpAddr>().unwrap().into()),
        ),
        ..ClientSettings::default()
    }
}

#[tokio::test]
async fn a_private_address_is_refused_in_every_spelling() {
    let private = Receiver::answering(OK).await;
    let port = private.address.port();
    let client = Client::new(ClientSettings::default()).unwrap();
    for host in [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.0.0.1.",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::127.0.0.1]",
        "169.254.169.254",
        "10.0.0.1",
        "[fd00::1]",
    ] {
        let target = Target::parse(&format!("http://{host}:{port}/"), false).unwrap();
        let early = client.vet_target(&target).unwrap_err();
        let late = post(&client, &format!("http://{host}:{port}/")).await.unwrap_err();
        assert_eq!((early.class, late), (ErrorClass::AddressRefused, early.clone()), "{host}");
        assert!(early.text.contains("not a public address"), "{early:?}");
    }
    // A name that the system's resolver knows from /etc/hosts.
    let RequestError { class, text } = post(&client, &format!("http://localhost:{port}/")).await.unwrap_err();
    assert_eq!(class, ErrorClass::AddressRefused);
    assert!(text.contains("localhost") && !text.contains("127"), "the error shows no internal address: {text}");
    assert_eq!(private.connections(), 0);
}

#[tokio::test]
async fn an_allowed_network_is_reachable_by_address_and_by_name() {
    let receiver = Receiver::answering(OK).await;
    let port = receiver.address.port();
    for host in ["127.0.0.1", "127.1", "localhost"] {
        assert_eq!(post(&client(), &format!("http://{host}:{port}/")).await.unwrap().status, 200, "{host}");
    }
}

#[tokio::test]
async fn a_name_with_one_private_address_is_refused() {
    let public = Receiver::start_on(&format!("{OTHER_PUBLIC}:0"), None, async |mut peer: Peer| {
        peer.answer(OK).await;
    })
    .await;
    let port = public.address.port();
    let names = FixedResolver::of(&[
        ("good.example", &[&[OTHER_PUBLIC, OTHER_PUBLIC]]),
        ("mixed.example", &[&[OTHER_PUBLIC, PRIVATE]]),
        ("mixed6.example", &[&[OTHER_PUBLIC, "::1"]]),
        ("mapped.example", &[&["::ffff:127.0.0.1"]]),
        ("empty.example", &[&[]]),
    ]);
    let client = Client::with_resolver(public_only(), names).unwrap();
    assert_eq!(post(&client, &format!("http://good.example:{port}/")).await.unwrap().status, 200);
    for name in ["mixed.example", "mixed6.example", "mapped.example"] {
        let failure = post(&client, &format!("http://{name}:{port}/")).await.unwrap_err();
        assert_eq!(failure.class, ErrorClass::AddressRefused, "{name}");
    }
    let failure = post(&client, &format!("http://empty.example:{port}/")).await.unwrap_err();
    assert_eq!(failure.class, ErrorClass::Dns);
    assert_eq!(public.connections(), 1);
}

#[tokio::test]
async fn a_name_of_a_metadata_service_is_refused_even_if_every_network_is_allowed() {
    let everywhere = ["0.0.0.0/0", "::/0"].map(|network| network.parse().unwrap());
    let settings = ClientSettings { allowed_networks: AllowedNetworks::new(everywhere), ..ClientSettings::default() };
    let names = FixedResolver::of(&[
        ("azure.example", &[&["168.63.129.16"]]),
        ("aws.example", &[&["127.0.0.1", "fd00:ec2::254"]]),
        ("mapped.example", &[&["::ffff:169.254.169.254"]]),
    ]);
    let client = Client::with_resolver(settings, names).unwrap();
    for name in ["azure.example", "aws.example", "mapped.example"] {
        let failure = post(&client, &format!("http://{name}:9/")).await.unwrap_err();
        assert_eq!(failure.class, ErrorClass::AddressRefused, "{name}: {failure:?}");
    }
}

#[tokio::test]
async fn a_port_outside_the_list_is_refused() {
    let receiver = Receiver::answering(OK).await;
    let with_ports = |allowed_ports| Client::new(ClientSettings { allowed_ports, ..loopback() }).unwrap();
    let failure = post(&with_ports(vec![443, 80]), &receiver.url()).await.unwrap_err();
    assert_eq!((failure.class, failure.text.contains("permits 443, 80")), (ErrorClass::AddressRefused, true));
    assert_eq!(receiver.connections(), 0);
    assert_eq!(post(&with_ports(vec![receiver.address.port()]), &receiver.url()).await.unwrap().status, 200);
}

#[tokio::test]
async fn dns_rebinding_does_not_bypass_the_check() {
    let private = Receiver::answering(OK).await;
    // Both have the same port, so that only the address differs. The second has its own address, so that the port is
    // free.
    let port = private.address.port();
    let public = Receiver::start_on(&format!("{PUBLIC}:{port}"), None, async |mut peer: Peer| {
        peer.answer("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
    })
    .await;
    let names = FixedResolver::of(&[("rebinding.example", &[&[PUBLIC], &[PRIVATE], &[PUBLIC], &[PRIVATE]])]);
    let client = Client::with_resolver(public_only(), names.clone()).unwrap();
    let url = format!("http://rebinding.example:{port}/");
    for round in 1..=2 {
        assert_eq!(post(&client, &url).await.unwrap().status, 200);
        assert_eq!(names.lookups.load(Ordering::SeqCst), 2 * round - 1, "each dial resolves once");
        assert_eq!(post(&client, &url).await.unwrap_err().class, ErrorClass::AddressRefused);
    }
    assert_eq!((public.connections(), private.connections()), (2, 0));
}

#[tokio::test]
async fn an_ip_address_is_not_resolved() {
    let receiver = Receiver::answering(OK).await;
    let names = FixedResolver::of(&[]);
    let client = Client::with_resolver(loopback(), names.clone()).unwrap();
    post(&client, &receiver.url()).await.unwrap();
    assert_eq!(names.lookups.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn https_only_applies_to_subscribers_older_than_the_setting() {
    let receiver = Receiver::answering(OK).await;
    let client = Client::new(ClientSettings { https_only: true, ..loopback() }).unwrap();
    let failure = post(&client, &receiver.url()).await.unwrap_err();
    assert_eq!((failure.class, failure.text.contains("https")), (ErrorClass::AddressRefused, true));
    assert_eq!(receiver.connections(), 0);
}
