//! The program itself, as its users run it.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::drain;

const READY_WITHIN: Duration = Duration::from_secs(60);
const DRAINS_WITHIN: Duration = Duration::from_secs(30);
const READS_WITHIN: Duration = Duration::from_secs(2);

/// A running `pillarbox`. Killed when dropped.
pub struct Pillarbox {
    child: Child,
    output: Arc<Mutex<Output>>,
}

struct Output {
    lines: Vec<String>,
    open_streams: usize,
}

/// The binary with its arguments. Of the caller's environment it gets everything but `PILLARBOX_*`: the settings of a
/// developer's shell are not those of a test.
pub fn command(binary: impl AsRef<Path>, args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(binary.as_ref());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("PILLARBOX_") {
            command.env_remove(name);
        }
    }
    command.args(args).envs(env.iter().copied());
    command
}

impl Pillarbox {
    /// Starts the binary, which a test names by `env!("CARGO_BIN_EXE_pillarbox")`, as [`command`] does.
    pub fn start(binary: impl AsRef<Path>, args: &[&str], env: &[(&str, &str)]) -> Pillarbox {
        let mut command = command(binary.as_ref(), args, env);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{}: {error}", binary.as_ref().display()));

        let output = Arc::new(Mutex::new(Output { lines: Vec::new(), open_streams: 2 }));
        collect(child.stdout.take().expect("stdout is piped"), Arc::clone(&output));
        collect(child.stderr.take().expect("stderr is piped"), Arc::clone(&output));
        Pillarbox { child, output }
    }

    /// Where it serves, as it says once it is ready: `listening on http://127.0.0.1:PORT`.
    pub async fn base_url(&self) -> String {
        let line = self.wait_for_line(|line| line.contains("listening on http://"), READY_WITHIN).await;
        let (_, url) = line.split_once("listening on ").expect("the line was chosen by it");
        let end = url.find(|c: char| !(c.is_ascii_alphanumeric() || ":/.-[]".contains(c))).unwrap_or(url.len());
        url[..end].to_owned()
    }

    /// The first line, on standard output or standard error, that `wanted` accepts.
    ///
    /// # Panics
    /// At the deadline, or as soon as the process has ended without such a line; with its output.
    pub async fn wait_for_line(&self, wanted: impl Fn(&str) -> bool, deadline: Duration) -> String {
        let line = drain("a line of output", deadline, async || {
            let output = self.output.lock().expect("no reader panics");
            match output.lines.iter().find(|line| wanted(line)) {
                Some(line) => Ok(Some(line.clone())),
                None if output.open_streams == 0 => Ok(None),
                None => Err(Verbatim(output.lines.join("\n"))),
            }
        })
        .await;
        line.unwrap_or_else(|| panic!("it ended before the line came:\n{}", self.logs()))
    }

    /// Everything it has printed so far; after [`terminate`](Self::terminate) or [`kill9`](Self::kill9), everything.
    pub fn logs(&self) -> String {
        self.output.lock().expect("no reader panics").lines.join("\n")
    }

    /// The memory it holds, as the kernel counts it.
    pub fn rss_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the process runs");
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB")?.trim().parse().ok());
        kib.map(|kib: u64| kib * 1024).unwrap_or_else(|| panic!("no VmRSS: it has ended:\n{}", self.logs()))
    }

    /// Ends it the way a power cut does: at once, with nothing put in order.
    pub fn kill9(&mut self) {
        self.child.kill().expect("SIGKILL");
        self.child.wait().expect("the child is ours");
        self.read_to_the_end();
    }

    /// Asks it to end, and waits while it finishes its work.
    pub async fn terminate(&mut self) -> ExitStatus {
        let pid = Pid::from_raw(self.child.id().try_into().expect("a process id fits"));
        // Until it is waited for, which only this struct does, an ended process keeps its id: no stranger is hit.
        if self.child.try_wait().expect("the child is ours").is_none() {
            kill(pid, Signal::SIGTERM).expect("SIGTERM");
        }
        self.ended().await
    }

    /// Waits until it ends.
    pub async fn ended(&mut self) -> ExitStatus {
        let status = drain("the process ends", DRAINS_WITHIN, async || {
            let ended = self.child.try_wait().expect("the child is ours");
            ended.ok_or_else(|| Verbatim(self.output.lock().expect("no reader panics").lines.join("\n")))
        })
        .await;
        self.read_to_the_end();
        status
    }

    /// What an ended process wrote last may still be in the pipe, or in the hands of a reader. Bounded, because a child
    /// that it left behind may hold the pipe open for good.
    fn read_to_the_end(&self) {
        let ends_at = Instant::now() + READS_WITHIN;
        while self.output.lock().expect("no reader panics").open_streams > 0 && Instant::now() < ends_at {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Pillarbox {
    fn drop(&mut self) {
        // Both fail only for a process that has ended, which is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads on a thread, not on the test's runtime: a test that blocks must not block the process it watches.
fn collect(stream: impl Read + Send + 'static, output: Arc<Mutex<Output>>) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
            output.lock().expect("no reader panics").lines.push(text);
            line.clear();
        }
        output.lock().expect("no reader panics").open_streams -= 1;
    });
}

/// Output in a panic message keeps its line breaks.
struct Verbatim(String);

impl std::fmt::Debug for Verbatim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn finds_the_url_in_a_log_line_with_colours_and_fields() {
        let process =
            shell("printf '\\033[2mINFO\\033[0m listening on http://127.0.0.1:8025\\033[0m pid=1\\n'; sleep 60");
        assert_eq!(process.base_url().await, "http://127.0.0.1:8025");
    }

    #[tokio::test]
    async fn terminate_returns_the_status_of_an_orderly_end() {
        let mut process = shell("trap 'echo drained >&2; exit 3' TERM; echo ready; while :; do sleep 0.01; done");
        process.wait_for_line(|line| line == "ready", SOON).await;
        assert_eq!(process.terminate().await.code(), Some(3));
        process.wait_for_line(|line| line == "drained", SOON).await;
    }

    #[tokio::test]
    async fn kill9_gives_no_chance_to_drain() {
        let mut process = shell("trap 'echo drained; exit 0' TERM; echo ready; while :; do sleep 0.01; done");
        process.wait_for_line(|line| line == "ready", SOON).await;
        assert!(process.rss_bytes() > 0);
        process.kill9();
        assert_eq!(process.logs(), "ready");
    }

    #[tokio::test]
    async fn logs_after_the_end_have_what_was_written_last() {
        // The child it leaves behind stands for a slow reader: the line comes after the process has ended.
        let late = "(sleep 0.3; echo late) & exit 0";
        let mut process = shell(&format!("trap '{late}' TERM; echo ready; while :; do sleep 0.01; done"));
        process.wait_for_line(|line| line == "ready", SOON).await;
        process.terminate().await;
        assert_eq!(process.logs(), "ready\nlate");

        let mut process = shell("(sleep 0.3; echo late) & echo ready; while :; do sleep 0.01; done");
        process.wait_for_line(|line| line == "ready", SOON).await;
        process.kill9();
        assert_eq!(process.logs(), "ready\nlate");
    }

    #[tokio::test]
    #[should_panic(expected = "it ended before the line came:\nno configuration")]
    async fn an_early_end_is_told_at_once_with_the_output() {
        shell("echo no configuration >&2; exit 2").base_url().await;
    }

    #[tokio::test]
    async fn gets_the_environment_that_the_test_gives() {
        let process = Pillarbox::start("/usr/bin/env", &[], &[("PILLARBOX_BUS", "rabbitmq")]);
        process.wait_for_line(|line| line == "PILLARBOX_BUS=rabbitmq", SOON).await;
    }

    fn shell(script: &str) -> Pillarbox {
        Pillarbox::start("/bin/sh", &["-c", script], &[])
    }
}
