//! What is dialled, and what never is.

use std::sync::atomic::Ordering;

use pillarbox_hub::address::Allowed;
use pillarbox_hub::client::{Client, ClientSettings, ErrorClass, Failure};
use pillarbox_hub::target::Target;

use crate::receiver::{OK, Peer, Receiver, Table};
use crate::{client, loopback, post};

/// Of all of loopback, these two alone are allowed: they stand for the public ones.
const PUBLIC: &str = "127.0.0.2";
const PUBLIC_TOO: &str = "127.0.0.3";
const PRIVATE: &str = "127.0.0.1";

fn public_only() -> ClientSettings {
    ClientSettings {
        allowed_networks: Allowed::new([PUBLIC, PUBLIC_TOO].map(|address| address.parse().unwrap())),
        ..ClientSettings::default()
    }
}

#[tokio::test]
async fn an_address_that_is_not_public_is_refused_however_it_is_spelled() {
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
    // A name: the system's resolver knows this one without asking anybody.
    let Failure { class, text } = post(&client, &format!("http://localhost:{port}/")).await.unwrap_err();
    assert_eq!(class, ErrorClass::AddressRefused);
    assert!(text.contains("localhost") && !text.contains("127"), "an inner address is not shown: {text}");
    assert_eq!(private.connections(), 0);
}

#[tokio::test]
async fn an_allowed_network_is_reached_by_address_and_by_name() {
    let receiver = Receiver::answering(OK).await;
    let port = receiver.address.port();
    for host in ["127.0.0.1", "127.1", "localhost"] {
        assert_eq!(post(&client(), &format!("http://{host}:{port}/")).await.unwrap().status, 200, "{host}");
    }
}

#[tokio::test]
async fn one_bad_address_among_good_ones_refuses_the_name() {
    let public = Receiver::start_on(&format!("{PUBLIC_TOO}:0"), None, async |mut peer: Peer| {
        peer.answer(OK).await;
    })
    .await;
    let port = public.address.port();
    let names = Table::of(&[
        ("good.example", &[&[PUBLIC_TOO, PUBLIC_TOO]]),
        ("mixed.example", &[&[PUBLIC_TOO, PRIVATE]]),
        ("mixed6.example", &[&[PUBLIC_TOO, "::1"]]),
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
async fn a_name_that_changes_its_mind_after_it_was_vetted_gains_nothing() {
    let private = Receiver::answering(OK).await;
    // The same port, so that only the address tells them apart; an address of its own, so that the port is free.
    let port = private.address.port();
    let public = Receiver::start_on(&format!("{PUBLIC}:{port}"), None, async |mut peer: Peer| {
        peer.answer("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
    })
    .await;
    let names = Table::of(&[("rebinding.example", &[&[PUBLIC], &[PRIVATE], &[PUBLIC], &[PRIVATE]])]);
    let client = Client::with_resolver(public_only(), names.clone()).unwrap();
    let url = format!("http://rebinding.example:{port}/");
    for round in 1..=2 {
        assert_eq!(post(&client, &url).await.unwrap().status, 200);
        assert_eq!(names.asked.load(Ordering::SeqCst), 2 * round - 1, "asked once for a dial");
        assert_eq!(post(&client, &url).await.unwrap_err().class, ErrorClass::AddressRefused);
    }
    assert_eq!((public.connections(), private.connections()), (2, 0));
}

#[tokio::test]
async fn addresses_are_not_looked_up() {
    let receiver = Receiver::answering(OK).await;
    let names = Table::of(&[]);
    let client = Client::with_resolver(loopback(), names.clone()).unwrap();
    post(&client, &receiver.url()).await.unwrap();
    assert_eq!(names.asked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn https_only_also_holds_for_subscribers_that_are_older_than_the_setting() {
    let receiver = Receiver::answering(OK).await;
    let client = Client::new(ClientSettings { https_only: true, ..loopback() }).unwrap();
    let failure = post(&client, &receiver.url()).await.unwrap_err();
    assert_eq!((failure.class, failure.text.contains("https")), (ErrorClass::AddressRefused, true));
    assert_eq!(receiver.connections(), 0);
}
