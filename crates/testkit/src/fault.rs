//! A network that fails on demand.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// A TCP proxy in front of a server, whose connections fail the way the test says.
///
/// It starts out passing everything, and its port stays the same in every mode, so a client can reconnect through it.
/// Dropped, it cuts all connections and stops listening.
pub struct FaultProxy {
    addr: SocketAddr,
    state: watch::Sender<State>,
    acceptor: JoinHandle<()>,
    accepted: Arc<AtomicUsize>,
}

#[derive(Clone, Copy)]
struct State {
    mode: Mode,
    /// Grows with every cut. A connection ends when the count is no longer what it was when the connection began.
    cuts: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Pass,
    Refuse,
    Stall,
    Mute,
    Delay(Duration),
}

impl FaultProxy {
    pub async fn start(upstream: SocketAddr) -> FaultProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound listener has an address");
        let (state, watched) = watch::channel(State { mode: Mode::Pass, cuts: 0 });
        let accepted = Arc::<AtomicUsize>::default();
        let acceptor = tokio::spawn(accept(listener, upstream, watched, accepted.clone()));
        FaultProxy { addr, state, acceptor, accepted }
    }

    /// A proxy in front of the server that a URL names. Clients then use [`FaultProxy::url`] of the same URL.
    pub async fn in_front_of(url: &str) -> FaultProxy {
        let (_, host_and_port, _) = split(url);
        let upstream = host_and_port.to_socket_addrs().ok().and_then(|mut found| found.next());
        FaultProxy::start(upstream.unwrap_or_else(|| panic!("no address for {host_and_port}"))).await
    }

    /// How many connections were ever opened to it.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The URL with this proxy in the place of its host and port.
    pub fn url(&self, original: &str) -> String {
        let (before, _, after) = split(original);
        format!("{before}{}{after}", self.addr)
    }

    /// Everything flows. What was held back arrives now.
    pub fn pass(&self) {
        self.state.send_modify(|state| state.mode = Mode::Pass);
    }

    /// The server is down: connections are reset, and so is every new one.
    pub fn refuse(&self) {
        self.state.send_modify(|state| *state = State { mode: Mode::Refuse, cuts: state.cuts + 1 });
    }

    /// The server restarts: connections are reset, new ones pass.
    pub fn cut(&self) {
        self.state.send_modify(|state| *state = State { mode: Mode::Pass, cuts: state.cuts + 1 });
    }

    /// The network is a black hole: connections stay open, new ones are accepted, and nothing arrives.
    pub fn stall(&self) {
        self.state.send_modify(|state| state.mode = Mode::Stall);
    }

    /// The answers get lost: what clients send arrives, and what the server sends is held back. New connections, too.
    pub fn mute(&self) {
        self.state.send_modify(|state| state.mode = Mode::Mute);
    }

    /// Each chunk that is read, in either direction, arrives this much later.
    pub fn delay(&self, per_chunk: Duration) {
        self.state.send_modify(|state| state.mode = Mode::Delay(per_chunk));
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

async fn accept(
    listener: TcpListener,
    upstream: SocketAddr,
    state: watch::Receiver<State>,
    accepted: Arc<AtomicUsize>,
) {
    loop {
        let (client, _) = listener.accept().await.expect("the listener accepts");
        accepted.fetch_add(1, Ordering::SeqCst);
        let now = *state.borrow();
        if now.mode == Mode::Refuse {
            reset(&client);
        } else {
            tokio::spawn(serve(client, upstream, state.clone(), now.cuts));
        }
    }
}

async fn serve(mut client: TcpStream, upstream: SocketAddr, state: watch::Receiver<State>, cuts_at_start: u64) {
    let mut server = None;
    let mut cuts = state.clone();
    let orderly = tokio::select! {
        relayed = relay(&mut client, &mut server, upstream, state) => relayed.is_ok(),
        // Also ends, with an error, when the proxy is dropped.
        _ = cuts.wait_for(|now| now.cuts != cuts_at_start) => false,
    };
    if !orderly {
        reset(&client);
        server.iter().for_each(reset);
    }
}

/// Runs until both sides have said all they had to say, or until one fails.
async fn relay(
    client: &mut TcpStream,
    server: &mut Option<TcpStream>,
    upstream: SocketAddr,
    state: watch::Receiver<State>,
) -> io::Result<()> {
    gate(&mut state.clone(), asks).await?;
    let server = server.insert(TcpStream::connect(upstream).await?);
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::try_join!(pump(from_client, to_server, state.clone(), asks), pump(from_server, to_client, state, answers))?;
    Ok(())
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut state: watch::Receiver<State>,
    may_pass: fn(Mode) -> bool,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        if let Mode::Delay(per_chunk) = gate(&mut state, may_pass).await? {
            sleep(per_chunk).await;
            // The mode may have become a stall while this chunk was on its way.
            gate(&mut state, may_pass).await?;
        }
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..length]).await?;
    }
}

/// Waits while the proxy holds this direction back.
async fn gate(state: &mut watch::Receiver<State>, may_pass: fn(Mode) -> bool) -> io::Result<Mode> {
    let now = state.wait_for(|now| may_pass(now.mode)).await.map_err(io::Error::other)?;
    Ok(now.mode)
}

fn asks(mode: Mode) -> bool {
    mode != Mode::Stall
}

fn answers(mode: Mode) -> bool {
    mode != Mode::Stall && mode != Mode::Mute
}

/// Makes the coming close a reset instead of an orderly end, as from a server that has crashed.
fn reset(stream: &TcpStream) {
    // Fails only if the connection is already gone, which is what we want.
    let _ = stream.set_zero_linger();
}

/// A URL in three parts: up to the host, `host:port`, and the rest.
fn split(url: &str) -> (&str, &str, &str) {
    let authority_at = url.find("://").map(|at| at + 3).unwrap_or_else(|| panic!("{url} has no scheme"));
    let authority_end = url[authority_at..].find(['/', '?', '#']).map_or(url.len(), |at| authority_at + at);
    let host_at = url[..authority_end].rfind('@').map_or(authority_at, |at| at + 1);
    (&url[..host_at], &url[host_at..authority_end], &url[authority_end..])
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::time::Instant;

    use tokio::time::timeout;

    use super::*;

    /// Long enough for a message over loopback to have arrived, if it was going to.
    const SILENCE: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn passes_both_ways_and_hands_on_the_end() {
        let proxy = proxied_echo().await;
        let mut client = connect(&proxy).await;
        client.write_all(b"hello").await.unwrap();
        client.shutdown().await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "hello");
    }

    #[tokio::test]
    async fn refuse_resets_old_and_new_connections_until_it_passes_again() {
        let proxy = proxied_echo().await;
        let mut old = connect(&proxy).await;
        echo(&mut old).await.unwrap();

        proxy.refuse();
        assert_eq!(echo(&mut old).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        echo(&mut connect(&proxy).await).await.expect_err("a new one is reset, too");

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
    async fn stall_holds_back_old_and_new_connections_and_loses_nothing() {
        let proxy = proxied_echo().await;
        let mut old = connect(&proxy).await;
        echo(&mut old).await.unwrap();

        proxy.stall();
        let mut new = connect(&proxy).await;
        old.write_u8(1).await.unwrap();
        new.write_u8(2).await.unwrap();
        timeout(SILENCE, old.read_u8()).await.expect_err("nothing arrives, and nothing closes");
        timeout(SILENCE, new.read_u8()).await.expect_err("nothing arrives, and nothing closes");

        proxy.pass();
        assert_eq!((old.read_u8().await.unwrap(), new.read_u8().await.unwrap()), (1, 2));
    }

    #[tokio::test]
    async fn mute_lets_questions_through_and_holds_the_answers_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = FaultProxy::start(listener.local_addr().unwrap()).await;
        let mut client = connect(&proxy).await;
        let (mut server, _) = listener.accept().await.unwrap();

        proxy.mute();
        client.write_u8(1).await.unwrap();
        assert_eq!(server.read_u8().await.unwrap(), 1);
        server.write_u8(2).await.unwrap();
        timeout(SILENCE, client.read_u8()).await.expect_err("nothing arrives, and nothing closes");

        proxy.pass();
        assert_eq!(client.read_u8().await.unwrap(), 2);
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
    async fn delay_slows_each_direction() {
        let proxy = proxied_echo().await;
        let mut client = connect(&proxy).await;
        proxy.delay(Duration::from_millis(60));
        let began = Instant::now();
        echo(&mut client).await.unwrap();
        assert!(began.elapsed() >= Duration::from_millis(120), "there and back took {:?}", began.elapsed());
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
}
