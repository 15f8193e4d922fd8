//! Servers of a test's own, which can be killed and started again: the shared ones are every test's.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::TcpStream;

use crate::drain;

const READY_WITHIN: Duration = Duration::from_secs(60);

/// A PostgreSQL and a RabbitMQ from `scripts/with-servers`, gone with this value.
pub struct OwnServers {
    child: Child,
    variables: HashMap<String, String>,
}

impl OwnServers {
    pub async fn start() -> OwnServers {
        tokio::task::spawn_blocking(OwnServers::start_blocking).await.expect("it starts")
    }

    fn start_blocking() -> OwnServers {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/with-servers");
        let mut child = Command::new(script)
            .args(["bash", "-c", "env | grep ^PBX_TEST_; echo; exec sleep 600"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("with-servers runs");
        let lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
        let lines = lines.map_while(Result::ok).take_while(|line| !line.is_empty());
        let variables =
            lines.filter_map(|line| line.split_once('=').map(|(n, v)| (n.to_owned(), v.to_owned()))).collect();
        OwnServers { child, variables }
    }

    pub fn postgres_url(&self) -> &str {
        &self.variables["PBX_TEST_POSTGRES_URL"]
    }

    pub fn amqp_url(&self) -> &str {
        &self.variables["PBX_TEST_AMQP_URL"]
    }

    /// `kill -9`, and the same command again; returns when it accepts connections.
    pub async fn restart_broker(&self) {
        self.without("rabbitmq", self.amqp_url(), async {}).await;
    }

    /// `kill -9`, and the same command again; returns when it accepts connections.
    pub async fn restart_postgres(&self) {
        self.without_postgres(async {}).await;
    }

    /// `kill -9`, what is to be done while it is away, and the same command again.
    pub async fn without_postgres<T>(&self, meanwhile: impl Future<Output = T>) -> T {
        self.without("postgres", self.postgres_url(), meanwhile).await
    }

    /// RabbitMQ runs short of memory, as it believes: it takes no more messages until there is enough again.
    pub async fn starve_broker(&self) {
        self.rabbitmqctl(&["set_vm_memory_high_watermark", "0"]).await;
    }

    /// Enough again.
    pub async fn feed_broker(&self) {
        self.rabbitmqctl(&["set_vm_memory_high_watermark", "0.6"]).await;
    }

    /// What each connection of RabbitMQ does: `running`, or `blocked` if it has published while there was no memory.
    pub async fn connection_states(&self) -> Vec<String> {
        let states = self.rabbitmqctl(&["--quiet", "list_connections", "--no-table-headers", "state"]).await;
        states.lines().map(str::to_owned).collect()
    }

    async fn rabbitmqctl(&self, arguments: &[&str]) -> String {
        let (mut command, _) = self.like_server("rabbitmq", "/usr/lib/rabbitmq/bin/rabbitmqctl");
        command.args(arguments);
        let output = tokio::task::spawn_blocking(move || command.output()).await.expect("it ends");
        let output = output.expect("rabbitmqctl runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// A command in the place of a server that runs: its folder, environment and user. And the server's process id.
    fn like_server(&self, name: &str, program: &str) -> (Command, i32) {
        let folder = PathBuf::from(&self.variables["PBX_TEST_DIR"]);
        let pid = pid_of(&folder, name);
        let process = Path::new("/proc").join(pid.to_string());
        let owner = std::fs::metadata(&process).expect("it runs");
        let environment = texts(&process.join("environ"));
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(environment.iter().filter_map(|variable| variable.split_once('=')))
            .current_dir(folder.join(name))
            .uid(owner.uid())
            .gid(owner.gid())
            .stdin(Stdio::null());
        (command, pid)
    }

    async fn without<T>(&self, name: &str, url: &str, meanwhile: impl Future<Output = T>) -> T {
        let folder = PathBuf::from(&self.variables["PBX_TEST_DIR"]);
        let arguments = texts(&Path::new("/proc").join(pid_of(&folder, name).to_string()).join("cmdline"));
        let (mut command, pid) = self.like_server(name, &arguments[0]);
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it is ours to kill");
        // With its children: PostgreSQL does not start while one of them still has the old memory.
        drain("it is gone", READY_WITHIN, async || living_in(&folder.join(name)).is_empty()).await;
        let done = meanwhile.await;

        let log = std::fs::OpenOptions::new().append(true).open(folder.join(format!("{name}.log"))).expect("its log");
        command.args(&arguments[1..]).process_group(0).stdout(log.try_clone().expect("its log")).stderr(log);
        let mut again = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        // with-servers takes it down with the others.
        let mut servers = std::fs::OpenOptions::new().append(true).open(folder.join("servers")).expect("the list");
        writeln!(servers, "{} KILL", again.id()).expect("the list");
        std::thread::spawn(move || again.wait()); // or it would stay as a zombie, and seem alive
        let address =
            url.rsplit_once('@').and_then(|(_, rest)| rest.split_once('/')).expect("host and port").0.to_owned();
        drain("it accepts connections", READY_WITHIN, async || TcpStream::connect(&address).await.is_ok()).await;
        done
    }
}

impl Drop for OwnServers {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

/// The newest server of this name: the last in the list that lives in its folder.
fn pid_of(folder: &Path, name: &str) -> i32 {
    let list = std::fs::read_to_string(folder.join("servers")).expect("the list of servers");
    let pids = list.lines().rev().filter_map(|line| line.split_whitespace().next()?.parse::<i32>().ok());
    let lives =
        |pid: &i32| std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder.join(name)));
    pids.into_iter().find(lives).unwrap_or_else(|| panic!("{name} does not run"))
}

/// The processes that work in a folder.
fn living_in(folder: &Path) -> Vec<PathBuf> {
    let processes = std::fs::read_dir("/proc").expect("the processes").filter_map(Result::ok).map(|entry| entry.path());
    let lives = |process: &PathBuf| std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
    processes.filter(lives).collect()
}

fn texts(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).expect("it runs");
    let parts = bytes.split(|byte| *byte == 0).filter(|part| !part.is_empty());
    parts.map(|part| String::from_utf8_lossy(part).into_owned()).collect()
}
