//! A TCP proxy that produces network faults on demand.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
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

#[derive(Clone)]
struct State {
    mode: Mode,
    upstream: SocketAddr,
    /// The number of cuts so far. A connection ends when this number differs from the one at the connection's start.
    cuts: u64,
    /// The number of silences so far. A connection is silent when this number differs from the one at its start.
    silences: u64,
    /// Connections that a failover leaves open, by their port on the server's side, and what happens to their data.
    left: Arc<[u16]>,
    left_behind: LeftBehind,
}

/// What happens to a connection that a failover leaves open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftBehind {
    /// It shows no sign of life, as after a sudden death of the old server.
    Silent,
    /// It still leads to the old server, which does not know that it was replaced.
    Alive,
}

impl State {
    /// Whether a connection ends that began after this many cuts.
    fn ends(&self, cuts_at_start: u64, port: u16) -> bool {
        self.cuts != cuts_at_start && !self.left.contains(&port)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Pass,
    Refuse,
    Stall,
    Mute,
    WithholdRequests,
    Truncate,
    Delay(Duration),
}

impl FaultProxy {
    pub async fn start(upstream: SocketAddr) -> FaultProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound listener has an address");
        let (left, left_behind) = (Arc::default(), LeftBehind::Silent);
        let state = State { mode: Mode::Pass, upstream, cuts: 0, silences: 0, left, left_behind };
        let (state, watched) = watch::channel(state);
        let accepted = Arc::<AtomicUsize>::default();
        let acceptor = tokio::spawn(accept(listener, watched, accepted.clone()));
        FaultProxy { addr, state, acceptor, accepted }
    }

    /// A proxy in front of the server of a URL. Clients connect to [`FaultProxy::url`] of the same URL.
    pub async fn in_front_of(url: &str) -> FaultProxy {
        FaultProxy::start(address_of(url)).await
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
        self.state.send_modify(|state| (state.mode, state.cuts) = (Mode::Refuse, state.cuts + 1));
    }

    /// The server restarts: existing connections are reset, new ones pass.
    pub fn cut(&self) {
        self.state.send_modify(|state| (state.mode, state.cuts) = (Mode::Pass, state.cuts + 1));
    }

    /// The network is a black hole: connections stay open, new ones are accepted, and no data is delivered.
    pub fn stall(&self) {
        self.state.send_modify(|state| state.mode = Mode::Stall);
    }

    /// The server has failed over without a word: existing connections stay open, and nothing is delivered on them ever
    /// again, not even that the other side has closed them; new ones pass.
    pub fn silence(&self) {
        self.state.send_modify(|state| (state.mode, state.silences) = (Mode::Pass, state.silences + 1));
    }

    /// Another server takes over: new connections lead to it. Existing connections are reset, except those in `left`,
    /// which stay open until [`FaultProxy::end_failover`]. They are named by the client port that the old server sees.
    pub fn fail_over(&self, url: &str, left: &[u16], left_behind: LeftBehind) {
        let upstream = address_of(url);
        self.state.send_modify(|state| {
            *state = State { upstream, left: left.into(), left_behind, cuts: state.cuts + 1, ..state.clone() };
            state.mode = Mode::Pass;
        });
    }

    /// Resets the connections that a failover has left open.
    pub fn end_failover(&self) {
        self.state.send_modify(|state| state.left = Arc::default());
    }

    /// Responses are withheld: data from clients is delivered, data from the server is not; this also applies to new connections.
    pub fn mute(&self) {
        self.state.send_modify(|state| state.mode = Mode::Mute);
    }

    /// Requests are withheld: data from the server is delivered, data from clients is not; this also applies to new connections.
    pub fn withhold_requests(&self) {
        self.state.send_modify(|state| state.mode = Mode::WithholdRequests);
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

async fn accept(listener: TcpListener, state: watch::Receiver<State>, accepted: Arc<AtomicUsize>) {
    loop {
        let (client, _) = listener.accept().await.expect("the listener accepts");
        accepted.fetch_add(1, Ordering::SeqCst);
        let now = state.borrow().clone();
        if now.mode == Mode::Refuse {
            reset(&client);
        } else {
            tokio::spawn(serve(client, state.clone(), now));
        }
    }
}

async fn serve(mut client: TcpStream, state: watch::Receiver<State>, at_start: State) {
    let (mut server, port) = (None, AtomicU16::new(0));
    let mut cuts = state.clone();
    let orderly = tokio::select! {
        relayed = relay(&mut client, &mut server, &port, state, &at_start) => relayed.is_ok(),
        // This also ends, with an error, when the proxy is dropped.
        _ = cuts.wait_for(|now| now.ends(at_start.cuts, port.load(Ordering::SeqCst))) => false,
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
    port: &AtomicU16,
    state: watch::Receiver<State>,
    at_start: &State,
) -> io::Result<()> {
    let gate = |direction| Gate { state: state.clone(), at_start: (at_start.cuts, at_start.silences), direction };
    let (mut requests, responses) = (gate(Direction::Request), gate(Direction::Response));
    requests.wait_until_open().await?;
    let server = server.insert(TcpStream::connect(at_start.upstream).await?);
    port.store(server.local_addr()?.port(), Ordering::SeqCst);
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::try_join!(copy(from_client, to_server, requests), copy(from_server, to_client, responses))?;
    Ok(())
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mut gate: Gate) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        let mut mode = gate.wait_until_open().await?;
        if let Mode::Delay(per_chunk) = mode {
            sleep(per_chunk).await;
            // The mode may have changed to a stall during the delay.
            mode = gate.wait_until_open().await?;
        }
        let is_truncated = mode == Mode::Truncate && gate.direction == Direction::Response;
        to.write_all(&buffer[..if is_truncated { length / 2 } else { length }]).await?;
        if length == 0 || is_truncated {
            return to.shutdown().await;
        }
    }
}

/// Decides when one direction of a connection passes data.
struct Gate {
    state: watch::Receiver<State>,
    /// The numbers of cuts and silences when the connection began.
    at_start: (u64, u64),
    direction: Direction,
}

impl Gate {
    /// Waits while the proxy withholds the data of this direction, forever after a silence or a failover that leaves the
    /// connection silent. Fails when the proxy is dropped.
    async fn wait_until_open(&mut self) -> io::Result<Mode> {
        let ((cuts, silences), direction) = (self.at_start, self.direction);
        let is_left_alive = |now: &State| now.cuts == cuts || now.left_behind == LeftBehind::Alive;
        let is_open = |now: &State| direction.is_open(now.mode) && now.silences == silences && is_left_alive(now);
        let now = self.state.wait_for(is_open).await.map_err(io::Error::other)?;
        Ok(now.mode)
    }
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
            Direction::Request => mode != Mode::Stall && mode != Mode::WithholdRequests,
            Direction::Response => mode != Mode::Stall && mode != Mode::Mute,
        }
    }
}

/// Turns the close that follows into a reset, as if the server had crashed.
fn reset(stream: &TcpStream) {
    // This fails only if the connection has already ended, which is the goal.
    let _ = stream.set_zero_linger();
}

fn address_of(url: &str) -> SocketAddr {
    let (_, host_and_port, _) = split(url);
    let address = host_and_port.to_socket_addrs().ok().and_then(|mut found| found.next());
    address.unwrap_or_else(|| panic!("no address for {host_and_port}"))
}

/// Splits a URL into three parts: up to the host, `host:port`, and the rest.
fn split(url: &str) -> (&str, &str, &str) {
    let authority_at = url.find("://").map(|at| at + 3).unwrap_or_else(|| panic!("{url} has no scheme"));
    let authority_end = url[authority_at..].find(['/', '?', '#']).map_or(url.len(), |at| authority_at + at);
    let host_at = url[..authority_end].rfind('@').map_or(authority_at, |at| at + 1);
    (&url[..host_at], &url[host_at..authority_end], &url[authority_end..])
}

#[cfg(test)]
mod tests;
