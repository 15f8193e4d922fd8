//! The server process: kept running by a thread of its own, ended with us.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::install::Install;
use super::{Account, EmbeddedError, Folders, make_private_dir};

const LOG_BYTES_MAX: u64 = 10 * 1024 * 1024;
/// A fast shutdown writes a checkpoint first.
const STOP_TIME_MAX: Duration = Duration::from_secs(60);
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// A server that ends sooner than this never came up.
const CAME_UP_AFTER: Duration = Duration::from_secs(10);
const STARTS_MAX: u32 = 2;

/// Restarts the server when it ends by itself.
pub(super) struct Server {
    state: Arc<State>,
    ended: mpsc::Receiver<()>,
}

#[derive(Default)]
struct State {
    /// 0 when none runs.
    pid: AtomicI32,
    stopping: AtomicBool,
    gave_up: AtomicBool,
}

impl Server {
    pub(super) fn start(install: Install, folders: Folders, account: Option<Account>) -> Result<Server, EmbeddedError> {
        let state = Arc::new(State::default());
        let (end, ended) = mpsc::channel();
        let keeper = {
            let state = state.clone();
            move || {
                keep(&state, || spawn(&install, &folders, account.as_ref()));
                let _ = end.send(()); // nobody waits when we end without stopping
            }
        };
        // The kernel signals the server when the THREAD that started it ends, so that thread lives as long as we do.
        let started = thread::Builder::new().name("postgres-keeper".to_owned()).spawn(keeper);
        started.map_err(|error| EmbeddedError::Io(PathBuf::from("postgres-keeper"), error))?;
        Ok(Server { state, ended })
    }

    /// True once it ended again and again without coming up.
    pub(super) fn gave_up(&self) -> bool {
        self.state.gave_up.load(Ordering::SeqCst)
    }

    pub(super) async fn stop(self) {
        let stopping = tokio::task::spawn_blocking(move || {
            self.state.stopping.store(true, Ordering::SeqCst);
            self.state.signal(Signal::SIGINT);
            if self.ended.recv_timeout(STOP_TIME_MAX).is_err() {
                tracing::warn!("PostgreSQL did not stop in time; it will recover at the next start");
                self.state.signal(Signal::SIGQUIT);
                let _ = self.ended.recv_timeout(Duration::from_secs(5)); // it is ended with us at the latest
            }
        });
        let _ = stopping.await; // it does not panic
    }
}

impl State {
    fn signal(&self, signal: Signal) {
        let pid = self.pid.load(Ordering::SeqCst);
        if pid > 0 {
            let _ = kill(Pid::from_raw(pid), signal); // it may have ended meanwhile
        }
    }
}

fn keep(state: &State, spawn: impl Fn() -> io::Result<Child>) {
    let mut failures = 0;
    while !state.stopping.load(Ordering::SeqCst) {
        let started = Instant::now();
        let status = spawn().and_then(|mut child| {
            state.pid.store(child.id() as i32, Ordering::SeqCst);
            // Stop may have been asked for before there was a pid to signal.
            if state.stopping.load(Ordering::SeqCst) {
                state.signal(Signal::SIGINT);
            }
            child.wait()
        });
        state.pid.store(0, Ordering::SeqCst);
        if state.stopping.load(Ordering::SeqCst) {
            return;
        }
        failures = if started.elapsed() < CAME_UP_AFTER { failures + 1 } else { 0 };
        tracing::error!(?status, failures, "PostgreSQL ended by itself; starting it again");
        if failures >= STARTS_MAX {
            state.gave_up.store(true, Ordering::SeqCst);
        }
        thread::sleep(RESTART_PAUSE);
    }
}

fn spawn(install: &Install, folders: &Folders, account: Option<&Account>) -> io::Result<Child> {
    // It may be swept away while we run, where it had to be in /tmp.
    make_private_dir(&folders.socket, account).map_err(io::Error::other)?;
    if fs::metadata(&folders.log).is_ok_and(|log| log.len() > LOG_BYTES_MAX) {
        fs::remove_file(&folders.log)?;
    }
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&folders.log)?;
    let mut postgres = install.command("postgres", account);
    postgres.arg("-D").arg(&folders.data).arg("-k").arg(&folders.socket);
    for setting in [
        "listen_addresses=",
        "unix_socket_permissions=0700",
        "max_connections=100",
        "shared_buffers=128MB",
        "max_wal_size=2GB",
        "jit=off",
        // What the server tells of itself, not the errors of statements: those are ours to log, and quote rows.
        "log_min_messages=log",
        "log_min_error_statement=panic",
        "log_checkpoints=off",
    ] {
        postgres.args(["-c", setting]);
    }
    postgres.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    end_with_us(&mut postgres, Signal::SIGINT);
    postgres.spawn()
}

/// Asks the kernel to signal the process when we are gone, be it by kill -9. (SIGINT is PostgreSQL's clean, fast stop.)
#[allow(unsafe_code)]
pub(super) fn end_with_us(command: &mut std::process::Command, signal: Signal) {
    // SAFETY: runs between fork and exec; prctl is a plain system call, which is allowed there.
    unsafe {
        command.pre_exec(move || nix::sys::prctl::set_pdeathsig(signal).map_err(io::Error::from));
    }
}

/// Ends a server that outlived the instance which started it. The folder's lock is ours, so nobody uses it.
pub(super) async fn stop_leftover(cluster: &Path) -> Result<(), EmbeddedError> {
    let pid_file = cluster.join("postmaster.pid");
    let Some(pid) = fs::read_to_string(&pid_file).ok().and_then(|text| text.lines().next()?.parse::<i32>().ok()) else {
        return Ok(());
    };
    let asked = Instant::now();
    loop {
        match occupant(pid, cluster) {
            // Another process may have its number by now: PostgreSQL would refuse to start.
            Occupant::Gone if pid_file.exists() => {
                return fs::remove_file(&pid_file).map_err(|error| EmbeddedError::Io(pid_file, error));
            }
            Occupant::Gone => return Ok(()),
            Occupant::Unknown => return Err(EmbeddedError::Occupied(pid_file, pid)),
            Occupant::Server if asked.elapsed() > STOP_TIME_MAX => return Err(EmbeddedError::Occupied(pid_file, pid)),
            Occupant::Server => {
                let _ = kill(Pid::from_raw(pid), Signal::SIGINT); // it may be ending already
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

enum Occupant {
    Gone,
    /// A server of this cluster.
    Server,
    /// It runs, and it cannot be told what it is.
    Unknown,
}

/// A server's working folder is its cluster. A negative number is a backend without a server, started by hand.
fn occupant(pid: i32, cluster: &Path) -> Occupant {
    if kill(Pid::from_raw(pid.abs()), None) == Err(nix::errno::Errno::ESRCH) {
        return Occupant::Gone;
    }
    match (fs::read_link(format!("/proc/{pid}/cwd")), fs::canonicalize(cluster)) {
        (Ok(folder), Ok(cluster)) if folder == cluster => Occupant::Server,
        (Ok(_), Ok(_)) => Occupant::Gone,
        // What has ended, and waits for its parent to notice, has no working folder any more.
        (Err(error), _) if pid > 0 && error.kind() == io::ErrorKind::NotFound => Occupant::Gone,
        _ => Occupant::Unknown,
    }
}

pub(super) fn did_not_start(log: &Path) -> EmbeddedError {
    const LINES: usize = 10;
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(LINES)..].join("\n");
    EmbeddedError::DidNotStart { log: log.to_owned(), tail }
}
