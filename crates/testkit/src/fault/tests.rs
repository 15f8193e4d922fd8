//! Tests of the fault proxy against an echo server.

use std::io::ErrorKind;
use std::time::Instant;

use tokio::time::timeout;

use super::*;

/// Long enough for data to arrive over loopback, if it is delivered at all.
const SILENCE: Duration = Duration::from_millis(200);

#[tokio::test]
async fn data_and_the_close_pass_in_both_directions() {
    let proxy = proxied_echo().await;
    let mut client = connect(&proxy).await;
    client.write_all(b"hello").await.unwrap();
    client.shutdown().await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "hello");
}

#[tokio::test]
async fn refuse_resets_old_and_new_connections_until_pass() {
    let proxy = proxied_echo().await;
    let mut old = connect(&proxy).await;
    echo(&mut old).await.unwrap();

    proxy.refuse();
    assert_eq!(echo(&mut old).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    echo(&mut connect(&proxy).await).await.expect_err("a new connection is also reset");

    proxy.pass();
    echo(&mut connect(&proxy).await).await.unwrap();
}

#[tokio::test]
async fn cut_resets_old_connections_and_passes_new_ones() {
    let proxy = proxied_echo().await;
    let mut old = connect(&proxy).await;
    echo(&mut old).await.unwrap();

    proxy.cut();
    assert_eq!(old.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    echo(&mut connect(&proxy).await).await.unwrap();
}

#[tokio::test]
async fn stall_withholds_all_data_and_loses_none() {
    let proxy = proxied_echo().await;
    let mut old = connect(&proxy).await;
    echo(&mut old).await.unwrap();

    proxy.stall();
    let mut new = connect(&proxy).await;
    old.write_u8(1).await.unwrap();
    new.write_u8(2).await.unwrap();
    timeout(SILENCE, old.read_u8()).await.expect_err("no data arrives and the connection stays open");
    timeout(SILENCE, new.read_u8()).await.expect_err("no data arrives and the connection stays open");

    proxy.pass();
    assert_eq!((old.read_u8().await.unwrap(), new.read_u8().await.unwrap()), (1, 2));
}

#[tokio::test]
async fn mute_passes_requests_and_withholds_responses() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap()).await;
    let mut client = connect(&proxy).await;
    let (mut server, _) = listener.accept().await.unwrap();

    proxy.mute();
    client.write_u8(1).await.unwrap();
    assert_eq!(server.read_u8().await.unwrap(), 1);
    server.write_u8(2).await.unwrap();
    timeout(SILENCE, client.read_u8()).await.expect_err("no data arrives and the connection stays open");

    proxy.pass();
    assert_eq!(client.read_u8().await.unwrap(), 2);
}

#[tokio::test]
async fn withheld_requests_arrive_later_and_responses_pass() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap()).await;
    let mut client = connect(&proxy).await;
    let (mut server, _) = listener.accept().await.unwrap();

    proxy.withhold_requests();
    client.write_u8(1).await.unwrap();
    timeout(SILENCE, server.read_u8()).await.expect_err("no data arrives and the connection stays open");
    server.write_u8(2).await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), 2);

    proxy.pass();
    assert_eq!(server.read_u8().await.unwrap(), 1);
}

#[tokio::test]
async fn truncate_closes_old_and_new_connections_in_the_middle_of_a_response() {
    let proxy = proxied_echo().await;
    let mut old = connect(&proxy).await;
    echo(&mut old).await.unwrap();
    proxy.truncate();
    for mut stream in [old, connect(&proxy).await] {
        stream.write_all(b"hello!").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an orderly close");
        assert_eq!(answer, "hel");
    }
    proxy.pass();
    echo(&mut connect(&proxy).await).await.unwrap();
}

#[tokio::test]
async fn silence_ends_old_connections_without_a_word_and_passes_new_ones() {
    let proxy = proxied_echo().await;
    let mut old = connect(&proxy).await;
    echo(&mut old).await.unwrap();

    proxy.silence();
    old.write_u8(1).await.unwrap();
    timeout(SILENCE, old.read_u8()).await.expect_err("no data arrives and the connection stays open");
    echo(&mut connect(&proxy).await).await.unwrap();
    proxy.pass();
    timeout(SILENCE, old.read_u8()).await.expect_err("nothing arrives later, either");
}

#[tokio::test]
async fn a_stalled_connection_can_be_cut() {
    let proxy = proxied_echo().await;
    let mut client = connect(&proxy).await;
    echo(&mut client).await.unwrap();
    proxy.stall();
    client.write_u8(1).await.unwrap();
    proxy.cut();
    assert_eq!(client.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn after_a_failover_silent_connections_hang_and_new_ones_lead_to_the_other_server() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap()).await;
    let mut silent = connect(&proxy).await;
    let (mut server, peer) = listener.accept().await.unwrap();
    silent.write_u8(0).await.unwrap();
    assert_eq!(server.read_u8().await.unwrap(), 0);
    let mut other = connect(&proxy).await;
    let (_other_server, _) = listener.accept().await.unwrap();

    let successor = proxied_echo().await;
    proxy.fail_over(&format!("echo://{}", successor.addr()), &[peer.port()], LeftBehind::Silent);
    assert_eq!(other.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    let mut new = connect(&proxy).await;
    echo(&mut new).await.unwrap();
    assert_eq!(successor.accepted(), 1);
    timeout(SILENCE, echo(&mut silent)).await.expect_err("no data arrives and the connection stays open");

    proxy.end_failover();
    assert_eq!(silent.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    echo(&mut new).await.unwrap();
}

#[tokio::test]
async fn a_connection_that_is_alive_after_a_failover_leads_to_the_old_server() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap()).await;
    let mut alive = connect(&proxy).await;
    let (mut server, peer) = listener.accept().await.unwrap();
    alive.write_u8(0).await.unwrap();
    assert_eq!(server.read_u8().await.unwrap(), 0);
    proxy.stall();
    alive.write_u8(1).await.unwrap();
    let successor = proxied_echo().await;
    proxy.fail_over(&format!("echo://{}", successor.addr()), &[peer.port()], LeftBehind::Alive);
    for sent in [1, 2] {
        assert_eq!(server.read_u8().await.unwrap(), sent);
        server.write_u8(sent).await.unwrap();
        assert_eq!(alive.read_u8().await.unwrap(), sent);
        alive.write_u8(sent + 1).await.unwrap();
    }
    proxy.end_failover();
    assert_eq!(alive.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn delay_applies_to_each_direction() {
    let proxy = proxied_echo().await;
    let mut client = connect(&proxy).await;
    proxy.delay(Duration::from_millis(60));
    let began = Instant::now();
    echo(&mut client).await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(120), "the round trip took {:?}", began.elapsed());
}

#[tokio::test]
async fn a_url_changes_only_its_host_and_port() {
    let proxy = FaultProxy::in_front_of("redis://127.0.0.1:6379").await;
    let addr = proxy.addr();
    for (original, proxied) in [
        ("postgres://me:p@127.0.0.1:5432/db?x=a/b@c", format!("postgres://me:p@{addr}/db?x=a/b@c")),
        ("amqp://me:p@localhost:5672/%2f", format!("amqp://me:p@{addr}/%2f")),
    ] {
        assert_eq!(proxy.url(original), proxied);
    }
}

async fn proxied_echo() -> FaultProxy {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = FaultProxy::start(listener.local_addr().unwrap()).await;
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                tokio::io::copy(&mut from, &mut to).await
            });
        }
    });
    proxy
}

async fn connect(proxy: &FaultProxy) -> TcpStream {
    TcpStream::connect(proxy.addr()).await.unwrap()
}

async fn echo(stream: &mut TcpStream) -> io::Result<u8> {
    stream.write_u8(7).await?;
    stream.read_u8().await
}
