//! A shell in a terminal, into which a test pastes commands as a person would.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::{eventually, watchdog};

/// Bounds the wait for the shell to exit when its terminal is closed.
const EXITS_WITHIN: Duration = Duration::from_secs(20);

/// An interactive bash in a pseudo-terminal. Dropping it interrupts the command in the foreground and closes the
/// terminal.
pub struct Terminal {
    child: Child,
    keyboard: ChildStdin,
    screen: Arc<Mutex<String>>,
    /// Where in the text the output of the last paste begins.
    pasted_at: usize,
    pastes: usize,
}

impl Terminal {
    /// Opens a terminal in a folder. Its environment is that of a new shell: without the variables that cargo and the
    /// test servers define, and with `env`.
    pub fn open(folder: &Path, env: &[(&str, &str)]) -> Terminal {
        watchdog::register_test();
        // `script` of util-linux creates the pseudo-terminal. Without a size, programs would stop after each line of output.
        let mut command = Command::new("script");
        command.args([
            "--quiet",
            "--flush",
            "--command",
            "stty rows 50 cols 200; exec bash --noprofile --norc -i",
            "/dev/null",
        ]);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            // cargo sets OUT_DIR for the tests of a package with a build script, and builds crates again that have seen another.
            let of_test = ["CARGO_", "OUT_DIR", "RUST_", "PILLARBOX_", "PBX_TEST_"];
            let of_test = of_test.iter().any(|prefix| name.starts_with(prefix));
            if of_test && !["CARGO_HOME", "CARGO_TARGET_DIR"].contains(&&*name) {
                command.env_remove(&*name);
            }
        }
        command.env("TERM", "dumb").env("PS1", "$ ").envs(env.iter().copied()).current_dir(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("util-linux has `script`");
        let keyboard = child.stdin.take().expect("stdin is piped");
        let screen = Arc::new(Mutex::new(String::new()));
        show(child.stdout.take().expect("stdout is piped"), Arc::clone(&screen));
        Terminal { child, keyboard, screen, pasted_at: 0, pastes: 0 }
    }

    /// Pastes commands without waiting for them, for a command that stays in the foreground.
    pub fn paste(&mut self, commands: &str) {
        self.pasted_at = self.text().len();
        self.write(commands);
        self.write("\n");
    }

    /// Pastes commands, waits until all of them have ended, and returns the output, which includes the commands.
    pub async fn run(&mut self, commands: &str, deadline: Duration) -> String {
        self.paste(commands);
        self.pastes += 1;
        // The terminal shows the command, too; only its output has the number in it.
        self.write(&format!("echo end-of-paste-$(({} + 0))\n", self.pastes));
        self.wait_for(&format!("end-of-paste-{}", self.pastes), deadline).await;
        self.output()
    }

    /// Waits for a text in the output of the last paste.
    pub async fn wait_for(&self, text: &str, deadline: Duration) {
        eventually(&format!("the terminal shows {text:?}"), deadline, async || {
            let output = self.output();
            if output.contains(text) { Ok(()) } else { Err(output) }
        })
        .await;
    }

    /// What the terminal has shown since the last paste.
    pub fn output(&self) -> String {
        self.text()[self.pasted_at..].to_owned()
    }

    /// Presses Ctrl-C.
    pub fn interrupt(&mut self) {
        self.write("\x03");
    }

    fn text(&self) -> String {
        self.screen.lock().expect("no reader panics").clone()
    }

    fn write(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).expect("the terminal is open");
        self.keyboard.flush().expect("the terminal is open");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A command in the foreground ends by Ctrl-C; `exit` ends each shell inside the shell, too. Writing fails only if
        // the shell has ended already.
        let _ = self.keyboard.write_all(b"\x03\nexit\nexit\nexit\n");
        let ends_at = Instant::now() + EXITS_WITHIN;
        while Instant::now() < ends_at && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads on a thread, as the runtime of the test may be blocked. Carriage returns, which the terminal adds, are dropped.
fn show(mut stream: impl Read + Send + 'static, screen: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            let text = String::from_utf8_lossy(&buffer[..length]).replace('\r', "");
            screen.lock().expect("no reader panics").push_str(&text);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn a_paste_is_typed_into_a_terminal_and_ctrl_c_ends_what_it_started() {
        let mut terminal = Terminal::open(Path::new("/"), &[("GREETING", "good morning")]);
        assert!(terminal.run("test -t 0 && echo \"$GREETING\"\npwd", SOON).await.contains("\ngood morning\n"));
        assert!(!terminal.run("echo again", SOON).await.contains("good morning"), "only the output of the last paste");
        // One process, so that Ctrl-C cannot arrive between two commands.
        terminal.paste("sh -c 'echo started; exec sleep 600'");
        terminal.wait_for("\nstarted\n", SOON).await;
        terminal.interrupt();
        assert!(terminal.run("echo \"code $?\"", SOON).await.contains("code 130"));
    }
}
