//! A Redis that belongs to one test, which may kill it, restart it from what it has saved, and limit its memory.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::{eventually, servers, unique_name, watchdog};

const READY_WITHIN: Duration = Duration::from_secs(20);

/// A running Redis on a separate port. Dropping it kills it and deletes its files.
pub struct PrivateRedis {
    folder: PathBuf,
    port: u16,
    child: Option<Child>,
}

impl PrivateRedis {
    /// Starts an empty Redis that saves nothing by itself. `options` are further options of `redis-server`.
    pub async fn start(options: &[&str]) -> PrivateRedis {
        watchdog::register_test();
        let folder = servers::folder().join(unique_name());
        std::fs::create_dir(&folder).expect("a new folder");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        drop(listener);
        let mut redis = PrivateRedis { folder, port, child: None };
        redis.start_again(options).await;
        redis
    }

    /// Starts it again after [`PrivateRedis::kill9`], with the files that it has saved.
    pub async fn start_again(&mut self, options: &[&str]) {
        let port = self.port.to_string();
        let log = std::fs::File::create(self.folder.join("log")).expect("a log file");
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--dir"]).arg(&self.folder).args(options);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a descriptor")).stderr(log);
        let child = command.spawn().expect("redis-server runs");
        // The script stops the servers of this list at its end, if this process cannot.
        let list = std::fs::OpenOptions::new().append(true).open(servers::folder().join("servers"));
        writeln!(list.expect("the list of servers"), "{} KILL", child.id()).expect("the list of servers is writable");
        self.child = Some(child);
        eventually("Redis answers", READY_WITHIN, async || self.try_command("PING").await == Some("+PONG".to_owned()))
            .await;
    }

    /// Kills it with SIGKILL, so that it saves nothing.
    pub fn kill9(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("SIGKILL");
            child.wait().expect("the child is ours");
        }
    }

    /// Deletes what it has saved.
    pub fn delete_files(&self) {
        for name in ["dump.rdb", "appendonlydir"] {
            let path: &Path = &self.folder.join(name);
            let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Runs a command in one line, and returns the first line of the answer. Panics if it fails.
    pub async fn command(&self, command: &str) -> String {
        let answer = self.try_command(command).await.unwrap_or_else(|| panic!("{command}: no answer"));
        assert!(!answer.starts_with('-'), "{command}: {answer}");
        answer
    }

    async fn try_command(&self, command: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.ok()?;
        stream.write_all(format!("SELECT 1\r\n{command}\r\nQUIT\r\n").as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        answer.lines().nth(1).map(str::to_owned)
    }
}

impl Drop for PrivateRedis {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
