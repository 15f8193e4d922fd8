//! The processes that are measured.

use std::convert::Infallible;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::Response;
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

use crate::Outcome;

/// A server process. Dropping it kills the process.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    pub(crate) ready_after: Duration,
}

impl Server {
    /// Starts the server and waits until it logs its address.
    pub(crate) async fn start(program: &Path, args: &[&str]) -> Outcome<Server> {
        Server::start_logging(program, args, Stdio::null()).await
    }

    /// The same with a destination for its log.
    pub(crate) async fn start_logging(program: &Path, args: &[&str], log: Stdio) -> Outcome<Server> {
        let started = Instant::now();
        let mut child =
            Command::new(program).args(args).stdout(Stdio::piped()).stderr(log).kill_on_drop(true).spawn()?;
        let stdout = child.stdout.take().ok_or("no standard output")?;
        let mut lines = BufReader::new(stdout).lines();
        let listening = async {
            while let Some(line) = lines.next_line().await? {
                if let Some((_, address)) = line.split_once("listening on http://") {
                    return Ok(address.trim().to_owned());
                }
            }
            Err("the server exited before it listened".into())
        };
        let address: Outcome<String> = tokio::time::timeout(Duration::from_secs(60), listening).await?;
        Ok(Server { child, address: address?, ready_after: started.elapsed() })
    }

    pub(crate) fn rss_bytes(&self) -> Outcome<u64> {
        self.status_bytes("VmRSS:")
    }

    /// The peak resident set size.
    pub(crate) fn rss_bytes_peak(&self) -> Outcome<u64> {
        self.status_bytes("VmHWM:")
    }

    /// Makes the peak start again with the current size. Without the right to do so, the peak is that since the start.
    pub(crate) fn reset_rss_bytes_peak(&self) {
        if let Some(pid) = self.child.id() {
            let _ = std::fs::write(format!("/proc/{pid}/clear_refs"), "5");
        }
    }

    fn status_bytes(&self, name: &str) -> Outcome<u64> {
        let pid = self.child.id().ok_or("the server has exited")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let kib =
            status.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix("kB")?.trim().parse::<u64>().ok());
        Ok(kib.ok_or_else(|| format!("no {name}"))? * 1024)
    }

    pub(crate) fn cpu_seconds(&self) -> Outcome<f64> {
        let pid = self.child.id().ok_or("the server has exited")?;
        cpu_in(&std::fs::read_to_string(format!("/proc/{pid}/stat"))?)
    }

    /// Stops the server with SIGTERM and waits for its exit.
    pub(crate) async fn stop(mut self) -> Outcome<()> {
        let pid = self.child.id().ok_or("the server has exited")?;
        Command::new("kill").arg(pid.to_string()).status().await?;
        self.child.wait().await?;
        Ok(())
    }
}

/// The CPU seconds of a process and its exited children, from its `/proc` stat line.
pub(crate) fn cpu_in(stat: &str) -> Outcome<f64> {
    const TICKS_A_SECOND: f64 = 100.0;
    let (_, fields) = stat.rsplit_once(')').ok_or("invalid /proc stat line")?;
    let ticks: Result<Vec<u64>, _> = fields.split_whitespace().skip(11).take(4).map(str::parse).collect();
    Ok(ticks?.into_iter().sum::<u64>() as f64 / TICKS_A_SECOND)
}

/// The raw limit: hyper with a constant response.
pub(crate) async fn run_raw() -> Outcome<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("listening on http://{}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let answer = || async {
            let body = Full::new(Bytes::from_static(br#"{"status":"alive","version":"0.1.0"}"#));
            Ok::<_, Infallible>(
                Response::builder().header("content-type", "application/json").body(body).unwrap_or_default(),
            )
        };
        let serving = http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(move |_| answer()));
        tokio::spawn(async move {
            let _ = serving.await; // fails when a client disconnects, which is normal
        });
    }
}
