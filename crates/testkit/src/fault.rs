//! A TCP proxy that produces network faults on demand.

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

/// A TCP proxy in front of a server, whose connections fail the way the test requests.
///
/// It passes everything at first. Its port stays the same in every mode, so a client can reconnect through it. When it
/// is dropped, it resets all connections and stops listening.
pub struct FaultProxy {
    addr: SocketAddr,
    state: watch::Sender<State>,
    acceptor: JoinHandle<()>,
    accepted: Arc<AtomicUsize>,
}

#[derive(Clone, Copy)]
struct State {
    mode: Mode,
    /// The number of cuts so far. A connection ends when this number differs from the one at the connection's start.
    cuts: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Pass,
    Refuse,
    Stall,
    Mute,
    Truncate,
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

    /// A proxy in front of the server of a URL. Clients connect to [`FaultProxy::url`] of the same URL.
    pub async fn in_front_of(url: &str) -> FaultProxy {
        let (_, host_and_port, _) = split(url);
        let upstream = host_and_port.to_socket_addrs().ok().and_then(|mut found| found.next());
        FaultProxy::start(upstream.unwrap_or_else(|| panic!("no address for {host_and_port}"))).await
    }

    /// The number of connections accepted since the start.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The URL with the address of this proxy instead of its host and port.
    pub fn url(&self, original: &str) -> String {
        let (before, _, after) = split(original);
        format!("{before}{}{after}", self.addr)
    }

    /// Passes everything. Data that was withheld is delivered now.
    pub fn pass(&self) {
        self.state.send_modify(|state| state.mode = Mode::Pass);
    }

    /// The server is down: existing connections and every new one are reset.
    pub fn refuse(&self) {
        self.state.send_modify(|state| *state = State { mode: Mode::Refuse, cuts: state.cuts + 1 });
    }

    /// The server restarts: existing connections are reset, new ones pass.
    pub fn cut(&self) {
        self.state.send_modify(|state| *state = State { mode: Mode::Pass, cuts: state.cuts + 1 });
    }

    /// The network is a black hole: connections stay open, new ones are accepted, and no data is delivered.
    pub fn stall(&self) {
        self.state.send_modify(|state| state.mode = Mode::Stall);
    }

    /// Responses are withheld: data from clients is delivered, data from the server is not, on new connections too.
    pub fn mute(&self) {
        self.state.send_modify(|state| state.mode = Mode::Mute);
    }

    /// The server goes away in the middle of a response: half of the next data from the server is delivered, then the
    /// connection is closed in an orderly way. So is each new connection at its first response.
    pub fn truncate(&self) {
        self.state.send_modify(|state| state.mode = Mode::Truncate);
    }

    /// Delivers each chunk this much later, in both directions.
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
        // This also ends, with an error, when the proxy is dropped.
        _ = cuts.wait_for(|now| now.cuts != cuts_at_start) => false,
    };
    if !orderly {
        reset(&client);
        server.iter().for_each(reset);
    }
}

/// Copies in both directions until both sides have closed or one of them fails.
async fn relay(
    client: &mut TcpStream,
    server: &mut Option<TcpStream>,
    upstream: SocketAddr,
    state: watch::Receiver<State>,
) -> io::Result<()> {
    wait_until_open(&mut state.clone(), Direction::Request).await?;
    let server = server.insert(TcpStream::connect(upstream).await?);
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::try_join!(
        copy(from_client, to_server, state.clone(), Direction::Request),
        copy(from_server, to_client, state, Direction::Response)
    )?;
    Ok(())
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut state: watch::Receiver<State>,
    direction: Direction,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        let mut mode = wait_until_open(&mut state, direction).await?;
        if let Mode::Delay(per_chunk) = mode {
            sleep(per_chunk).await;
            // The mode may have changed to a stall during the delay.
            mode = wait_until_open(&mut state, direction).await?;
        }
        let is_truncated = mode == Mode::Truncate && direction == Direction::Response;
        to.write_all(&buffer[..if is_truncated { length / 2 } else { length }]).await?;
        if length == 0 || is_truncated {
            return to.shutdown().await;
        }
    }
}

/// Waits while the proxy withholds the data of this direction. Fails when the proxy is dropped.
async fn wait_until_open(state: &mut watch::Receiver<State>, direction: Direction) -> io::Result<Mode> {
    let now = state.wait_for(|now| direction.is_open(now.mode)).await.map_err(io::Error::other)?;
    Ok(now.mode)
}

/// From the client to the server, or back.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Request,
    Response,
}

impl Direction {
    fn is_open(self, mode: Mode) -> bool {
        match self {
            Direction::Request => mode != Mode::Stall,
            Direction::Response => mode != Mode::Stall && mode != Mode::Mute,
        }
    }
}

/// Turns the close that follows into a reset, as if the server had crashed.
fn reset(stream: &TcpStream) {
    // This fails only if the connection has already ended, which is the goal.
    let _ = stream.set_zero_linger();
}

/// Splits a URL into three parts: up to the host, `host:port`, and the rest.
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
}
