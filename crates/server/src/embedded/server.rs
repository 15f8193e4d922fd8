//! The server process of the embedded PostgreSQL: a thread restarts it when it exits, and it stops with this process.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{io, thread};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::install::Install;
use super::{Account, EmbeddedError, Folders, PORT_DEFAULT, create_private_dir, memory, tcp};

/// Size at which the log file is removed before a start.
const LOG_BYTES_MAX: u64 = 10 * 1024 * 1024;
/// Timeout of a fast shutdown, which writes a checkpoint first.
const STOP_TIME_MAX: Duration = Duration::from_secs(60);
/// Time between two starts.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// A server that exits earlier counts as a failed start.
const STARTED_AFTER: Duration = Duration::from_secs(10);
/// Failed starts in a row after which the start is reported as failed.
const FAILED_STARTS_MAX: u32 = 2;

/// Runs the server and restarts it when it exits by itself.
pub(super) struct Server {
    state: Arc<State>,
    exited: mpsc::Receiver<()>,
}

#[derive(Default)]
struct State {
    /// 0 when no server runs.
    pid: AtomicI32,
    stopping: AtomicBool,
    is_failing: AtomicBool,
}

impl Server {
    /// With a port, it also listens on TCP.
    pub(super) fn start(
        install: Install,
        folders: Folders,
        account: Option<Account>,
        port: Option<u16>,
    ) -> Result<Server, EmbeddedError> {
        let state = Arc::new(State::default());
        let (exit, exited) = mpsc::channel();
        let supervise = {
            let state = state.clone();
            move || {
                run_until_stopped(&state, || spawn(&install, &folders, account.as_ref(), port));
                let _ = exit.send(()); // no receiver when this process ends without stopping the server
            }
        };
        // The kernel signals the server when the THREAD that started it ends, so this thread must live as long as the process.
        let started = thread::Builder::new().name("postgres-server".to_owned()).spawn(supervise);
        started.map_err(|error| EmbeddedError::Io(PathBuf::from("postgres-server"), error))?;
        Ok(Server { state, exited })
    }

    /// Whether the server failed to start several times in a row.
    pub(super) fn is_failing(&self) -> bool {
        self.state.is_failing.load(Ordering::SeqCst)
    }

    pub(super) async fn stop(self) {
        let stopping = tokio::task::spawn_blocking(move || {
            self.state.stopping.store(true, Ordering::SeqCst);
            self.state.signal(Signal::SIGINT);
            if self.exited.recv_timeout(STOP_TIME_MAX).is_err() {
                tracing::warn!("PostgreSQL did not stop in time; it recovers at the next start");
                self.state.signal(Signal::SIGQUIT);
                let _ = self.exited.recv_timeout(Duration::from_secs(5)); // it stops with this process at the latest
            }
        });
        let _ = stopping.await; // the task does not panic
    }
}

impl State {
    fn signal(&self, signal: Signal) {
        let pid = self.pid.load(Ordering::SeqCst);
        if pid > 0 {
            let _ = kill(Pid::from_raw(pid), signal); // it may have exited already
        }
    }
}

fn run_until_stopped(state: &State, spawn: impl Fn() -> io::Result<Child>) {
    let mut failures = 0;
    while !state.stopping.load(Ordering::SeqCst) {
        let started = Instant::now();
        let status = spawn().and_then(|mut child| {
            state.pid.store(child.id() as i32, Ordering::SeqCst);
            // A stop may have been requested before there was a pid to signal.
            if state.stopping.load(Ordering::SeqCst) {
                state.signal(Signal::SIGINT);
            }
            child.wait()
        });
        state.pid.store(0, Ordering::SeqCst);
        if state.stopping.load(Ordering::SeqCst) {
            return;
        }
        failures = if started.elapsed() < STARTED_AFTER { failures + 1 } else { 0 };
        tracing::error!(?status, failures, "PostgreSQL exited unexpectedly; restarting it");
        if failures >= FAILED_STARTS_MAX {
            state.is_failing.store(true, Ordering::SeqCst);
        }
        thread::sleep(RESTART_PAUSE);
    }
}

fn spawn(install: &Install, folders: &Folders, account: Option<&Account>, port: Option<u16>) -> io::Result<Child> {
    // A socket folder in /tmp may be removed while the server runs.
    create_private_dir(&folders.socket, account).map_err(io::Error::other)?;
    if fs::metadata(&folders.log).is_ok_and(|log| log.len() > LOG_BYTES_MAX) {
        fs::remove_file(&folders.log)?;
    }
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&folders.log)?;
    let mut postgres = install.command("postgres", account);
    postgres.arg("-D").arg(&folders.data).arg("-k").arg(&folders.socket);
    let rules = tcp::write_rules(&folders.data, account, port)?;
    postgres.arg("-c").arg(format!("hba_file={}", rules.display()));
    postgres.arg("-c").arg(format!("listen_addresses={}", if port.is_some() { "127.0.0.1" } else { "" }));
    postgres.arg("-c").arg(format!("port={}", port.unwrap_or(PORT_DEFAULT)));
    for setting in [
        "unix_socket_permissions=0700",
        "max_connections=100",
        "max_wal_size=2GB",
        "jit=off",
        // Log messages of the server, not errors of statements: those quote rows, and this process logs them itself.
        "log_min_messages=log",
        "log_min_error_statement=panic",
        "log_checkpoints=off",
    ] {
        postgres.args(["-c", setting]);
    }
    for setting in memory::settings() {
        postgres.args(["-c", &setting]);
    }
    postgres.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    stop_with_parent(&mut postgres, Signal::SIGINT);
    postgres.spawn()
}

/// Makes the kernel signal the child when this process ends, even by kill -9. (SIGINT is a clean, fast shutdown of PostgreSQL.)
#[allow(unsafe_code)]
pub(super) fn stop_with_parent(command: &mut std::process::Command, signal: Signal) {
    // SAFETY: runs between fork and exec; prctl is a plain system call, which is allowed there.
    unsafe {
        command.pre_exec(move || nix::sys::prctl::set_pdeathsig(signal).map_err(io::Error::from));
    }
}

/// Stops a server that is left over from a killed process. This process holds the lock of the data folder, so nothing uses it.
/// Fails if it does not stop, or if the process may be another program.
pub(super) async fn stop_leftover(cluster: &Path) -> Result<(), EmbeddedError> {
    let pid_file = cluster.join("postmaster.pid");
    let Some(pid) = fs::read_to_string(&pid_file).ok().and_then(|text| text.lines().next()?.parse::<i32>().ok()) else {
        return Ok(());
    };
    let started_at = Instant::now();
    loop {
        match pid_state(pid, cluster) {
            // Another process may have this pid by now, and PostgreSQL would refuse to start.
            PidState::NotRunning if pid_file.exists() => {
                return fs::remove_file(&pid_file).map_err(|error| EmbeddedError::Io(pid_file, error));
            }
            PidState::NotRunning => return Ok(()),
            PidState::Unknown => return Err(EmbeddedError::Occupied(pid_file, pid)),
            PidState::Server if started_at.elapsed() > STOP_TIME_MAX => {
                return Err(EmbeddedError::Occupied(pid_file, pid));
            }
            PidState::Server => {
                let _ = kill(Pid::from_raw(pid), Signal::SIGINT); // it may be stopping already
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// What runs under the pid of a pid file.
enum PidState {
    NotRunning,
    /// The server of this cluster.
    Server,
    /// A running process that cannot be identified.
    Unknown,
}

/// The working folder of a server is its cluster. A negative pid is that of a single-user backend, started by hand.
fn pid_state(pid: i32, cluster: &Path) -> PidState {
    if kill(Pid::from_raw(pid.abs()), None) == Err(nix::errno::Errno::ESRCH) {
        return PidState::NotRunning;
    }
    match (fs::read_link(format!("/proc/{pid}/cwd")), fs::canonicalize(cluster)) {
        (Ok(folder), Ok(cluster)) if folder == cluster => PidState::Server,
        (Ok(_), Ok(_)) => PidState::NotRunning,
        // A zombie process has no working folder.
        (Err(error), _) if pid > 0 && error.kind() == io::ErrorKind::NotFound => PidState::NotRunning,
        _ => PidState::Unknown,
    }
}

/// The error for a failed start, with the end of the log.
pub(super) fn did_not_start(log: &Path) -> EmbeddedError {
    const LINES: usize = 10;
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(LINES)..].join("\n");
    EmbeddedError::DidNotStart { log: log.to_owned(), tail }
}
