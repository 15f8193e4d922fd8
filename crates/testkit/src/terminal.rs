//! A shell in a terminal, into which a test pastes commands as a person would.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::process::{FREE_LISTEN, NO_DATA, NO_FOLDERS, NO_USER_FILES, is_of_developer};
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
    has_bracketed_paste: bool,
}

/// Around a paste, if the terminal has bracketed paste: the shell then runs the lines as one command, when Enter is pressed.
const PASTE: (&str, &str) = ("\x1b[200~", "\x1b[201~");

impl Terminal {
    /// Opens a terminal in a folder. Its environment is that of a new shell: without the variables that cargo and the
    /// test servers define, without the settings of the developer, and with `env`. A paste is typed line by line.
    pub fn open(folder: &Path, env: &[(&str, &str)]) -> Terminal {
        Terminal::open_with(folder, env, false)
    }

    /// As [`open`](Self::open), with bracketed paste, as terminals of today have it: what is pasted is one command, so a program
    /// that it starts in the foreground, such as another shell, does not read the lines after it.
    pub fn open_with_bracketed_paste(folder: &Path, env: &[(&str, &str)]) -> Terminal {
        Terminal::open_with(folder, env, true)
    }

    fn open_with(folder: &Path, env: &[(&str, &str)], has_bracketed_paste: bool) -> Terminal {
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
            let of_test = ["CARGO_", "OUT_DIR", "RUST_", "PBX_TEST_"];
            let of_test = of_test.iter().any(|prefix| name.starts_with(prefix)) || is_of_developer(&name);
            if of_test && !["CARGO_HOME", "CARGO_TARGET_DIR"].contains(&&*name) {
                command.env_remove(&*name);
            }
        }
        // `make` needs the tools that are installed in the home of the developer, and none of their settings.
        if let Some(home) = std::env::var_os("HOME").map(PathBuf::from) {
            for (name, folder) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup"), ("npm_config_cache", ".npm")] {
                if std::env::var_os(name).is_none() {
                    command.env(name, home.join(folder));
                }
            }
        }
        command.env("TERM", if has_bracketed_paste { "xterm" } else { "dumb" }).env("INPUTRC", "/dev/null");
        command.env("PS1", "$ ").envs(NO_FOLDERS).envs([NO_DATA, NO_USER_FILES, FREE_LISTEN]).envs(env.iter().copied());
        command.current_dir(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("util-linux has `script`");
        let keyboard = child.stdin.take().expect("stdin is piped");
        let screen = Arc::new(Mutex::new(String::new()));
        show(child.stdout.take().expect("stdout is piped"), Arc::clone(&screen));
        Terminal { child, keyboard, screen, pasted_at: 0, pastes: 0, has_bracketed_paste }
    }

    /// Pastes commands and presses Enter, without waiting for them, for a command that stays in the foreground.
    pub fn paste(&mut self, commands: &str) {
        self.pasted_at = self.text().len();
        let (begin, end) = if self.has_bracketed_paste { PASTE } else { ("", "") };
        self.write(&format!("{begin}{commands}{end}\n"));
    }

    /// Pastes commands, waits until all of them have ended, and returns the output, which includes the commands.
    pub async fn run(&mut self, commands: &str, deadline: Duration) -> String {
        self.paste(commands);
        self.pastes += 1;
        // The terminal also shows the command; only its output has the number in it.
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

    /// Without the sequences that move the cursor and set colours.
    fn text(&self) -> String {
        without_sequences(&self.screen.lock().expect("no reader panics"))
    }

    fn write(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).expect("the terminal is open");
        self.keyboard.flush().expect("the terminal is open");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A command in the foreground ends by Ctrl-C; `exit` also ends each shell inside the shell. Writing fails only if
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

/// Drops sequences such as `ESC [ ? 2004 h`, also one whose end has not arrived yet.
fn without_sequences(screen: &str) -> String {
    let mut parts = screen.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        let end = part.find(|c: char| ('@'..='~').contains(&c));
        text + end.map_or("", |end| &part[end + 1..])
    })
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

    #[tokio::test]
    async fn a_shell_reads_the_rest_of_a_paste_unless_it_is_bracketed() {
        let paste = "bash --noprofile --norc -i\necho \"level $SHLVL\"";
        let level = |output: &str| {
            let line = output.lines().filter_map(|line| line.strip_prefix("level ")?.parse::<u32>().ok()).next_back();
            line.unwrap_or_else(|| panic!("no level in {output}"))
        };
        let mut typed = Terminal::open(Path::new("/"), &[]);
        let outer = level(&typed.run("echo \"level $SHLVL\"", SOON).await);
        assert_eq!(level(&typed.run(paste, SOON).await), outer + 1, "the inner shell has read the second line");

        let mut pasted = Terminal::open_with_bracketed_paste(Path::new("/"), &[]);
        assert_eq!(level(&pasted.run("echo \"level $SHLVL\"", SOON).await), outer);
        assert!(!pasted.run(paste, SOON).await.contains("level 1"), "it waits until the inner shell ends");
        assert_eq!(level(&pasted.run("exit", SOON).await), outer);
    }

    #[test]
    fn sequences_of_a_terminal_are_no_text() {
        assert_eq!(without_sequences("\x1b[?2004h$ \x1b[7mls\x1b[27m\n\x1b[200~x"), "$ ls\nx");
        assert_eq!(without_sequences("$ \x1b[?20"), "$ ");
    }
}
