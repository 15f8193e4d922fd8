//! Requests through the operator's proxy.

use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use webhook_client::{Client, ClientSettings, ErrorClass, Proxy};

use crate::post;
use crate::receiver::{FixedResolver, OK, Peer, Receiver, self_signed};

fn through(proxy: &Receiver) -> ClientSettings {
    let proxy: Proxy = format!("http://us:hunter%32@{}", proxy.address).parse().unwrap();
    assert!(!format!("{proxy:?}").contains("dXM6"), "the password is not printed");
    ClientSettings { proxy: Some(proxy), ..ClientSettings::default() }
}

/// base64 of `us:hunter2`.
const AUTH: &str = "Basic dXM6aHVudGVyMg==";

#[tokio::test]
async fn plain_http_goes_to_the_proxy_with_the_absolute_url() {
    let proxy = Receiver::answering(OK).await;
    // This machine resolves nothing, and the proxy's own address is not vetted.
    let client = Client::with_resolver(through(&proxy), FixedResolver::of(&[])).unwrap();
    for _ in 0..2 {
        assert_eq!(post(&client, "http://hooks.example/a?b=1").await.unwrap().excerpt, "ok");
    }
    let requests = proxy.requests();
    assert!(requests[0].starts_with("POST http://hooks.example/a?b=1 HTTP/1.1\r\n"), "{requests:?}");
    assert!(requests[0].contains("host: hooks.example\r\n"), "{requests:?}");
    assert!(requests[0].contains(&format!("proxy-authorization: {AUTH}\r\n")), "{requests:?}");
    assert_eq!((proxy.connections(), requests.len()), (1, 2));
}

#[tokio::test]
async fn https_goes_through_a_tunnel_that_the_proxy_cannot_read() {
    let (certificate, tls) = self_signed(&["hooks.example"]);
    let receiver =
        Receiver::start_on("127.0.0.1:0", Some(tls), async |mut peer: Peer| while peer.answer(OK).await {}).await;
    let receiver_address = receiver.address;
    let proxy = Receiver::start(move |mut peer: Peer| async move {
        peer.answer("HTTP/1.1 200 Connected\r\n\r\n").await;
        let mut onward = TcpStream::connect(receiver_address).await.unwrap();
        let _ = copy_bidirectional(&mut peer.stream, &mut onward).await;
    })
    .await;
    let settings = ClientSettings { extra_roots: vec![certificate], ..through(&proxy) };
    let client = Client::with_resolver(settings, FixedResolver::of(&[])).unwrap();
    for _ in 0..2 {
        assert_eq!(post(&client, "https://hooks.example/secret").await.unwrap().excerpt, "ok");
    }
    let seen = proxy.requests();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(seen[0].starts_with("CONNECT hooks.example:443 HTTP/1.1\r\n"), "{seen:?}");
    assert!(seen[0].contains(AUTH) && !seen[0].contains("secret"), "{seen:?}");
    let received = receiver.requests();
    assert!(received[0].starts_with("POST /secret HTTP/1.1\r\n") && !received[0].contains(AUTH), "{received:?}");
}

#[tokio::test]
async fn addresses_are_vetted_before_the_proxy_is_used() {
    let proxy = Receiver::answering(OK).await;
    let table =
        FixedResolver::of(&[("inside.example", &[&["93.184.215.14", "10.0.0.1"], &["10.0.0.1"], &["10.0.0.1"]])]);
    let client = Client::with_resolver(through(&proxy), table).unwrap();
    for url in [
        "http://169.254.169.254/",
        "https://10.0.0.1/",
        "http://[::1]/",
        "https://2130706433/",
        "http://inside.example/",
        "https://inside.example/",
        "http://localhost/",
        "https://Localhost./",
        "https://a.localhost/",
    ] {
        assert_eq!(post(&client, url).await.unwrap_err().class, ErrorClass::AddressRefused, "{url}");
    }
    assert_eq!(proxy.connections(), 0);
}

#[tokio::test]
async fn a_proxy_that_refuses_or_is_unreachable_is_a_proxy_error() {
    for answer in ["HTTP/1.1 403 Forbidden\r\n\r\n", "HTTP/1.1 407 Who\r\n\r\n", "nonsense\r\n\r\n"] {
        let proxy = Receiver::answering(answer).await;
        let client = Client::with_resolver(through(&proxy), FixedResolver::of(&[])).unwrap();
        let failure = post(&client, "https://hooks.example/").await.unwrap_err();
        assert_eq!(failure.class, ErrorClass::Proxy, "{failure:?}");
        assert!(!failure.text.contains("hunter2"), "{failure:?}");
    }
    let settings = ClientSettings { proxy: Some("http://proxy.invalid:3128".parse().unwrap()), ..Default::default() };
    let client = Client::with_resolver(settings, FixedResolver::of(&[])).unwrap();
    for url in ["http://hooks.example/", "https://hooks.example/"] {
        assert_eq!(post(&client, url).await.unwrap_err().class, ErrorClass::Proxy);
    }
}

#[tokio::test]
async fn a_proxy_may_have_a_name_and_its_address_is_not_vetted() {
    let proxy = Receiver::answering(OK).await;
    let address = format!("http://proxy.example:{}", proxy.address.port());
    let settings = ClientSettings { proxy: Some(address.parse().unwrap()), ..Default::default() };
    let client = Client::with_resolver(settings, FixedResolver::of(&[("proxy.example", &[&["127.0.0.1"]])])).unwrap();
    assert_eq!(post(&client, "http://hooks.example/").await.unwrap().status, 200);
}

#[test]
fn an_invalid_proxy_names_the_accepted_form_without_the_password() {
    for bad in [
        "",
        "proxy:3128",
        "https://proxy.example",
        "socks5://p.example:1",
        "http://us:hunter2@p.example/path",
        "http://us:hunter2@",
    ] {
        let error = bad.parse::<Proxy>().unwrap_err().to_string();
        assert!(error.contains("http://proxy.example:3128") && !error.contains("hunter2"), "{bad}: {error}");
    }
    for good in ["http://proxy.example", "http://proxy.example:3128/", "http://us:p@10.0.0.1:3128", "http://[::1]:3128"]
    {
        good.parse::<Proxy>().unwrap();
    }
}
