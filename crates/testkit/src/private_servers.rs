//! Servers that belong to one test, which may kill and restart them. The shared servers are in use by every test.

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

use crate::{eventually, watchdog};

const READY_WITHIN: Duration = Duration::from_secs(60);

/// A kind of server that [`PrivateServers`] can start.
#[derive(Debug, Clone, Copy)]
pub enum Server {
    Postgres,
    RabbitMq,
}

impl Server {
    /// The name by which `scripts/with-servers` knows it.
    fn name(self) -> &'static str {
        match self {
            Server::Postgres => "postgres",
            Server::RabbitMq => "rabbitmq",
        }
    }
}

/// Servers of `scripts/with-servers`, started for one test. Dropping the value stops them.
pub struct PrivateServers {
    child: Child,
    variables: HashMap<String, String>,
}

impl PrivateServers {
    /// Starts the given kinds of servers and no others: each of them costs the test some seconds.
    pub async fn start(servers: &[Server]) -> PrivateServers {
        PrivateServers::start_with(servers, &[]).await
    }

    /// The same, with more settings of `scripts/with-servers`.
    pub(crate) async fn start_with(servers: &[Server], settings: &'static [(&str, &str)]) -> PrivateServers {
        watchdog::register_test();
        let names: Vec<&str> = servers.iter().map(|server| server.name()).collect();
        let names = names.join(" ");
        tokio::task::spawn_blocking(move || start_blocking(&names, settings)).await.expect("the servers start")
    }

    pub fn postgres_url(&self) -> &str {
        &self.variables["PBX_TEST_POSTGRES_URL"]
    }

    pub fn amqp_url(&self) -> &str {
        &self.variables["PBX_TEST_AMQP_URL"]
    }

    /// Kills RabbitMQ with SIGKILL and starts it again. Returns when it accepts connections.
    pub async fn restart_broker(&self) {
        self.while_down(Server::RabbitMq, self.amqp_url(), async {}).await;
    }

    /// Kills PostgreSQL with SIGKILL and starts it again. Returns when it accepts connections.
    pub async fn restart_postgres(&self) {
        self.while_postgres_is_down(async {}).await;
    }

    /// Kills PostgreSQL with SIGKILL, runs `action`, and starts PostgreSQL again. Returns the result of `action`.
    pub async fn while_postgres_is_down<T>(&self, action: impl Future<Output = T>) -> T {
        self.while_down(Server::Postgres, self.postgres_url(), action).await
    }

    /// Makes RabbitMQ believe that its memory is exhausted: it blocks publishers until the alarm is cleared.
    pub async fn raise_memory_alarm(&self) {
        self.rabbitmqctl(&["set_vm_memory_high_watermark", "0"]).await;
    }

    pub async fn clear_memory_alarm(&self) {
        self.rabbitmqctl(&["set_vm_memory_high_watermark", "0.6"]).await;
    }

    /// The state of each connection to RabbitMQ: `running`, or `blocked` if it has published during a memory alarm.
    pub async fn connection_states(&self) -> Vec<String> {
        let states = self.rabbitmqctl(&["--quiet", "list_connections", "--no-table-headers", "state"]).await;
        states.lines().map(str::to_owned).collect()
    }

    async fn rabbitmqctl(&self, arguments: &[&str]) -> String {
        let pid = pid_of(&self.folder(), Server::RabbitMq.name());
        let mut command = self.command_like(Server::RabbitMq, pid, "/usr/lib/rabbitmq/bin/rabbitmqctl");
        command.args(arguments);
        let output = tokio::task::spawn_blocking(move || command.output()).await.expect("rabbitmqctl ends");
        let output = output.expect("rabbitmqctl runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a program of PostgreSQL's installation, such as `pg_basebackup`, as the user of the server.
    pub(crate) async fn run_postgres_program(&self, program: &str, arguments: &[&str]) {
        let mut command = self.postgres_command(program);
        command.args(arguments);
        let output = tokio::task::spawn_blocking(move || command.output()).await.expect("the program ends");
        let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Starts another PostgreSQL in a separate folder. Its output is in `NAME.log`. It is stopped with the others.
    pub(crate) fn start_postgres_in(&self, name: &str, arguments: &[&str]) {
        let log = std::fs::File::create(self.folder().join(format!("{name}.log"))).expect("a log file");
        let mut command = self.postgres_command("postgres");
        command.args(arguments).current_dir(self.folder().join(name)).process_group(0);
        command.stdout(log.try_clone().expect("a descriptor")).stderr(log);
        self.spawn_listed(command, name);
    }

    /// Creates a folder that belongs to the user of the PostgreSQL server.
    pub(crate) fn create_folder(&self, name: &str) -> PathBuf {
        let folder = self.folder().join(name);
        std::fs::create_dir(&folder).expect("a new folder");
        let owner = std::fs::metadata(self.folder().join(Server::Postgres.name())).expect("the server's folder");
        std::os::unix::fs::chown(&folder, Some(owner.uid()), Some(owner.gid())).expect("the folder changes its owner");
        folder
    }

    fn postgres_command(&self, program: &str) -> Command {
        let pid = pid_of(&self.folder(), Server::Postgres.name());
        let server = null_separated(&Path::new("/proc").join(pid.to_string()).join("cmdline"));
        let program = Path::new(&server[0]).with_file_name(program);
        self.command_like(Server::Postgres, pid, program.to_str().expect("a path in UTF-8"))
    }

    /// Starts a server and lists it, so that it is stopped at the end.
    fn spawn_listed(&self, mut command: Command, name: &str) {
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        // The script stops the servers of this list at its end.
        let list = std::fs::OpenOptions::new().append(true).open(self.folder().join("servers"));
        writeln!(list.expect("the list of servers"), "{} KILL", child.id()).expect("the list of servers is writable");
        // Without the wait, the process would become a zombie when it ends, and look alive.
        std::thread::spawn(move || child.wait());
    }

    async fn while_down<T>(&self, server: Server, url: &str, action: impl Future<Output = T>) -> T {
        let (name, folder) = (server.name(), self.folder());
        let pid = pid_of(&folder, name);
        let arguments = null_separated(&Path::new("/proc").join(pid.to_string()).join("cmdline"));
        let mut command = self.command_like(server, pid, &arguments[0]);
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("the server can be killed");
        // Its children must also end: PostgreSQL refuses to start while one of them uses the old shared memory.
        let has_ended = async || processes_in(&folder.join(name)).is_empty();
        eventually("the server and its children have ended", READY_WITHIN, has_ended).await;
        let result = action.await;

        let log = std::fs::OpenOptions::new().append(true).open(folder.join(format!("{name}.log")));
        let log = log.expect("the log file");
        command.args(&arguments[1..]).process_group(0).stdout(log.try_clone().expect("a descriptor")).stderr(log);
        self.spawn_listed(command, name);
        let address = url.rsplit_once('@').and_then(|(_, rest)| rest.split_once('/')).expect("a URL with a host").0;
        let accepts = async || TcpStream::connect(address).await.is_ok();
        eventually("the server accepts connections", READY_WITHIN, accepts).await;
        result
    }

    /// A command with the working directory, environment and user of a running server.
    fn command_like(&self, server: Server, pid: i32, program: &str) -> Command {
        let process = Path::new("/proc").join(pid.to_string());
        let owner = std::fs::metadata(&process).expect("the server runs");
        let environment = null_separated(&process.join("environ"));
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs(environment.iter().filter_map(|variable| variable.split_once('=')))
            .current_dir(self.folder().join(server.name()))
            .uid(owner.uid())
            .gid(owner.gid())
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn folder(&self) -> PathBuf {
        PathBuf::from(&self.variables["PBX_TEST_DIR"])
    }
}

impl Drop for PrivateServers {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

fn start_blocking(servers: &str, settings: &[(&str, &str)]) -> PrivateServers {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/with-servers");
    let mut child = Command::new(script)
        .args(["bash", "-c", "env | grep ^PBX_TEST_; echo; exec sleep 600"])
        .env("PBX_TEST_SERVERS", servers)
        .envs(settings.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("with-servers runs");
    let lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
    let lines = lines.map_while(Result::ok).take_while(|line| !line.is_empty());
    let variables = lines.filter_map(|line| line.split_once('=').map(|(n, v)| (n.to_owned(), v.to_owned()))).collect();
    PrivateServers { child, variables }
}

/// The newest server of this name: the last one in the list whose working directory is that of the server.
fn pid_of(folder: &Path, name: &str) -> i32 {
    let list = std::fs::read_to_string(folder.join("servers")).expect("the list of servers");
    let mut pids = list.lines().rev().filter_map(|line| line.split_whitespace().next()?.parse::<i32>().ok());
    pids.find(|pid| works_in(Path::new(&format!("/proc/{pid}")), &folder.join(name)))
        .unwrap_or_else(|| panic!("{name} is not running"))
}

/// The processes whose working directory is in this folder.
fn processes_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc").expect("/proc is readable");
    let processes = entries.filter_map(Result::ok).map(|entry| entry.path());
    processes.filter(|process| works_in(process, folder)).collect()
}

fn works_in(process: &Path, folder: &Path) -> bool {
    std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder))
}

/// The NUL-separated strings of a file in `/proc`.
fn null_separated(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).expect("the process runs");
    let parts = bytes.split(|byte| *byte == 0).filter(|part| !part.is_empty());
    parts.map(|part| String::from_utf8_lossy(part).into_owned()).collect()
}
