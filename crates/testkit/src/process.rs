//! The Pillarbox binary as a child process.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{eventually, watchdog};

/// Bounds the wait for the line that announces the address.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Bounds the wait for the process to exit.
const EXITS_WITHIN: Duration = Duration::from_secs(30);
/// Bounds the wait for the last output of a process that has exited.
const OUTPUT_ENDS_WITHIN: Duration = Duration::from_secs(2);

/// A running `pillarbox` process. Dropping it kills the process.
pub struct Pillarbox {
    child: Child,
    output: Arc<Mutex<Output>>,
}

struct Output {
    lines: Vec<String>,
    open_streams: usize,
}

/// Instead of the folders of the developer, in which a test would find contexts and an installation. Nothing can be created
/// below a device, even as root, so a process that would use its default folder fails.
pub(crate) const NO_FOLDERS: [(&str, &str); 2] =
    [("XDG_CONFIG_HOME", "/dev/null/config"), ("XDG_DATA_HOME", "/dev/null/data")];
pub(crate) const NO_USER_FILES: (&str, &str) = ("HOME", "/dev/null/home");
/// The default data folder of root depends on no variable of a folder.
pub(crate) const NO_DATA: (&str, &str) = ("PILLARBOX_DATA_DIR", "/dev/null/data/pillarbox");

/// A free port: a server that a test starts without an address must not take, or talk to, the one of the developer.
pub(crate) const FREE_LISTEN: (&str, &str) = ("PILLARBOX_LISTEN", "127.0.0.1:0");

/// Whether the program, or a library in it, reads this variable of a developer's environment.
pub(crate) fn is_of_developer(name: &str) -> bool {
    let of_developer = ["PILLARBOX_", "PG", "REDIS_", "ENABLE_DUAL_PUBLISH", "SSL_CERT_"];
    of_developer.iter().any(|prefix| name.starts_with(prefix))
}

/// A command for the binary. It inherits the environment except what the binary reads and the folders for configuration and
/// data: the settings, contexts and installations of a developer must not affect a test. A test whose commands have a data folder
/// names it, with `--data-dir` or in a separate context.
pub fn command(binary: impl AsRef<Path>, args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(binary.as_ref());
    for (name, _) in std::env::vars_os() {
        if is_of_developer(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command.envs(NO_FOLDERS).envs([NO_USER_FILES, FREE_LISTEN]).args(args);
    // The variable would replace the folder of a context.
    if !env.iter().any(|(name, _)| ["XDG_CONFIG_HOME", "PILLARBOX_CONTEXTS"].contains(name)) {
        command.envs([NO_DATA]);
    }
    command.envs(env.iter().copied());
    command
}

impl Pillarbox {
    /// Starts the binary with the environment of [`command`]. Tests pass [`program`](crate::program).
    pub fn start(binary: impl AsRef<Path>, args: &[&str], env: &[(&str, &str)]) -> Pillarbox {
        watchdog::register_test();
        let mut command = command(binary.as_ref(), args, env);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{}: {error}", binary.as_ref().display()));

        let output = Arc::new(Mutex::new(Output { lines: Vec::new(), open_streams: 2 }));
        collect(child.stdout.take().expect("stdout is piped"), Arc::clone(&output));
        collect(child.stderr.take().expect("stderr is piped"), Arc::clone(&output));
        Pillarbox { child, output }
    }

    /// Waits until the process logs `listening on http://127.0.0.1:PORT`, and returns that URL.
    pub async fn base_url(&self) -> String {
        let line = self.wait_for_line(|line| line.contains("listening on http://"), READY_WITHIN).await;
        let (_, url) = line.split_once("listening on ").expect("the line contains it");
        let end = url.find(|c: char| !(c.is_ascii_alphanumeric() || ":/.-[]".contains(c))).unwrap_or(url.len());
        url[..end].to_owned()
    }

    /// Waits for a line on standard output or standard error for which `matches` is true, and returns it.
    ///
    /// # Panics
    /// At the deadline, or as soon as the process has exited without such a line. The message contains the output.
    pub async fn wait_for_line(&self, matches: impl Fn(&str) -> bool, deadline: Duration) -> String {
        let line = eventually("a line of output", deadline, async || {
            let output = self.output.lock().expect("no reader panics");
            match output.lines.iter().find(|line| matches(line)) {
                Some(line) => Ok(Some(line.clone())),
                None if output.open_streams == 0 => Ok(None),
                None => Err(Verbatim(output.lines.join("\n"))),
            }
        })
        .await;
        line.unwrap_or_else(|| panic!("the process exited without the expected line:\n{}", self.logs()))
    }

    /// The output so far. It is complete after [`terminate`](Self::terminate) or [`kill9`](Self::kill9).
    pub fn logs(&self) -> String {
        self.output.lock().expect("no reader panics").lines.join("\n")
    }

    /// The resident set size of the process. Panics if the process has exited.
    pub fn rss_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The memory that the process has allocated and uses, without the pages of its binary. Panics if the process has exited.
    pub fn allocated_bytes(&self) -> u64 {
        self.memory("RssAnon:")
    }

    /// The largest resident set size that the process has had. Panics if the process has exited.
    pub fn rss_peak_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the process runs");
        let kib = status.lines().find_map(|line| line.strip_prefix(field)?.strip_suffix("kB")?.trim().parse().ok());
        kib.map(|kib: u64| kib * 1024).unwrap_or_else(|| panic!("no {field} The process has exited:\n{}", self.logs()))
    }

    /// Kills the process with SIGKILL, so that it has no chance to clean up.
    pub fn kill9(&mut self) {
        self.child.kill().expect("SIGKILL");
        self.child.wait().expect("the child is ours");
        self.wait_for_output();
    }

    /// Suspends the process with SIGSTOP, until [`resume`](Self::resume). Its connections stay open.
    pub fn suspend(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Resumes a suspended process.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().expect("a process id fits"));
        kill(pid, signal).expect("the child has not been waited for, so its id is not reused");
    }

    /// Sends SIGTERM and waits for the exit.
    pub async fn terminate(&mut self) -> ExitStatus {
        let pid = Pid::from_raw(self.child.id().try_into().expect("a process id fits"));
        // The id of an exited child is not reused until it is waited for, so the signal cannot reach another process.
        if self.child.try_wait().expect("the child is ours").is_none() {
            kill(pid, Signal::SIGTERM).expect("SIGTERM");
        }
        self.wait_for_exit().await
    }

    /// Waits until the process exits.
    pub async fn wait_for_exit(&mut self) -> ExitStatus {
        let status = eventually("the process exits", EXITS_WITHIN, async || {
            let ended = self.child.try_wait().expect("the child is ours");
            ended.ok_or_else(|| Verbatim(self.output.lock().expect("no reader panics").lines.join("\n")))
        })
        .await;
        self.wait_for_output();
        status
    }

    /// Waits for the last output of an exited process, which may still be in the pipe or in a reader thread. The wait is
    /// bounded, because a child that the process left behind may never close the pipe.
    fn wait_for_output(&self) {
        let ends_at = Instant::now() + OUTPUT_ENDS_WITHIN;
        while self.output.lock().expect("no reader panics").open_streams > 0 && Instant::now() < ends_at {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Pillarbox {
    fn drop(&mut self) {
        // Both fail only if the process has already exited, which is the goal.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A process that is killed leaves what libfaketime has created for it.
        for name in ["faketime_shm_", "sem.faketime_sem_"] {
            let _ = std::fs::remove_file(format!("/dev/shm/{name}{}", self.child.id()));
        }
    }
}

/// Reads on a thread, not on the runtime of the test: a test that blocks must not block the process it observes.
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

/// Shows output in a panic message with its line breaks.
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
    async fn the_url_is_found_in_a_log_line_with_colours_and_fields() {
        let process =
            shell("printf '\\033[2mINFO\\033[0m listening on http://127.0.0.1:8025\\033[0m pid=1\\n'; sleep 60");
        assert_eq!(process.base_url().await, "http://127.0.0.1:8025");
    }

    #[test]
    fn a_process_finds_no_folder_of_the_developer() {
        let variables = |env: &[(&str, &str)]| {
            let output = command("env", &[], env).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let of_test = variables(&[]);
        for name in ["HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "PILLARBOX_DATA_DIR"] {
            assert!(of_test.lines().any(|line| line.starts_with(&format!("{name}=/dev/null/"))), "{name}: {of_test}");
        }
        assert!(std::fs::create_dir_all(NO_DATA.1).is_err(), "root cannot create it either");
        let with_contexts = variables(&[("XDG_CONFIG_HOME", "/tmp/contexts")]);
        assert!(with_contexts.contains("XDG_CONFIG_HOME=/tmp/contexts") && !with_contexts.contains("PILLARBOX_DATA"));
    }

    /// In a separate process, whose environment is that of the developer.
    #[test]
    fn a_process_has_no_setting_of_the_developer_and_a_free_port() {
        const OUTER: &str = "PBX_TEST_ENVIRONMENT_OF_A_DEVELOPER";
        let of_developer = [
            ("PILLARBOX_DATABASE_URL", "set-by-a-developer"),
            ("PILLARBOX_LISTEN", "set-by-a-developer"),
            ("PGHOST", "set-by-a-developer"),
            ("PGPASSFILE", "set-by-a-developer"),
            ("REDIS_HOST", "set-by-a-developer"),
            ("ENABLE_DUAL_PUBLISH", "set-by-a-developer"),
            ("SSL_CERT_FILE", "set-by-a-developer"),
            ("HOME", "set-by-a-developer"),
        ];
        if std::env::var_os(OUTER).is_none() {
            let test = "process::tests::a_process_has_no_setting_of_the_developer_and_a_free_port";
            let mut outer = Command::new(std::env::current_exe().unwrap());
            let output = outer.args(["--exact", test]).env(OUTER, "1").envs(of_developer).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            return;
        }
        let output = command("env", &[], &[("REDIS_URL", "redis://of-test")]).output().unwrap();
        let variables = String::from_utf8(output.stdout).unwrap();
        assert!(!variables.contains("set-by-a-developer"), "{variables}");
        for expected in ["PILLARBOX_LISTEN=127.0.0.1:0", "REDIS_URL=redis://of-test"] {
            assert!(variables.lines().any(|line| line == expected), "{expected}: {variables}");
        }
        let given = command("env", &[], &[("PILLARBOX_LISTEN", "127.0.0.1:4711")]).output().unwrap();
        assert!(String::from_utf8(given.stdout).unwrap().contains("PILLARBOX_LISTEN=127.0.0.1:4711"));
    }

    #[tokio::test]
    async fn terminate_returns_the_exit_status() {
        let mut process = shell("trap 'echo drained >&2; exit 3' TERM; echo ready; while :; do sleep 0.01; done");
        process.wait_for_line(|line| line == "ready", SOON).await;
        assert_eq!(process.terminate().await.code(), Some(3));
        process.wait_for_line(|line| line == "drained", SOON).await;
    }

    #[tokio::test]
    async fn a_process_cannot_clean_up_after_kill9() {
        let mut process = shell("trap 'echo drained; exit 0' TERM; echo ready; while :; do sleep 0.01; done");
        process.wait_for_line(|line| line == "ready", SOON).await;
        assert!((1..=process.rss_peak_bytes()).contains(&process.rss_bytes()));
        process.kill9();
        assert_eq!(process.logs(), "ready");
    }

    #[tokio::test]
    async fn a_suspended_process_does_nothing_until_it_is_resumed() {
        let process = shell("echo ready; while read -r _ < /dev/null || sleep 0.01; do echo on; done");
        process.wait_for_line(|line| line == "on", SOON).await;
        process.suspend();
        // The line that was being written when the signal arrived.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let before = process.logs();
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(process.logs(), before);
        process.resume();
        eventually("it continues", SOON, async || process.logs().len() > before.len()).await;
    }

    #[tokio::test]
    async fn logs_after_the_exit_contain_the_last_output() {
        // A background child writes after the exit, like output that a slow reader has not read yet.
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
    #[should_panic(expected = "the process exited without the expected line:\nno configuration")]
    async fn an_early_exit_is_reported_at_once_with_the_output() {
        shell("echo no configuration >&2; exit 2").base_url().await;
    }

    #[tokio::test]
    async fn the_process_has_the_environment_of_the_test() {
        let process = Pillarbox::start("/usr/bin/env", &[], &[("PILLARBOX_BUS", "rabbitmq")]);
        process.wait_for_line(|line| line == "PILLARBOX_BUS=rabbitmq", SOON).await;
    }

    fn shell(script: &str) -> Pillarbox {
        Pillarbox::start("/bin/sh", &["-c", script], &[])
    }
}
