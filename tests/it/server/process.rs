//! Support for tests of the binary: data folders, processes and commands.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::{Client, Pillarbox, TestDatabase, program};

/// How long a command may run.
const RUN_TIME_MAX: Duration = Duration::from_secs(60);

/// The path of a data folder. Dropping it deletes the folder.
pub(crate) struct DataFolder(PathBuf);

impl DataFolder {
    pub(crate) fn new() -> DataFolder {
        DataFolder(std::env::temp_dir().join(format!("pillarbox-it-{}", uuid::Uuid::new_v4().simple())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Connects to the embedded PostgreSQL of this folder, as an operator does.
    pub(crate) async fn database(&self) -> sqlx::PgPool {
        let socket = self.0.join("run");
        let options =
            sqlx::postgres::PgConnectOptions::new().socket(socket).username("pillarbox").database("pillarbox");
        sqlx::PgPool::connect_with(options).await.unwrap()
    }

    pub(crate) fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for DataFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Starts `pillarbox up` on a free port.
pub(crate) fn up(folder: &DataFolder, env: &[(&str, &str)]) -> Pillarbox {
    Pillarbox::start(program(), &["up", "--listen", "127.0.0.1:0", "--data-dir", folder.text()], env)
}

/// Starts `pillarbox serve` on a free port with the database of the test.
pub(crate) fn serve(folder: &DataFolder, database: &TestDatabase, env: &[(&str, &str)]) -> Pillarbox {
    let url = database.url();
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url];
    Pillarbox::start(program(), &args, env)
}

/// Runs a command to its end. Returns its exit code, standard output and standard error. Panics if the command does not end, such
/// as a server that ought to refuse to start.
pub(crate) fn run(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = testkit::command(program(), args, env);
    command.current_dir(std::env::temp_dir()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let (output, has_ended) = match ended.recv_timeout(RUN_TIME_MAX) {
        Ok(output) => (output.unwrap(), true),
        Err(_) => {
            // A server stops then, with its PostgreSQL. It fails for a process that has just ended, which does no harm.
            let _ = kill(pid, Signal::SIGTERM);
            (ended.recv().unwrap().unwrap(), false)
        }
    };
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, error) = (text(output.stdout), text(output.stderr));
    assert!(has_ended, "{args:?} does not end within {RUN_TIME_MAX:?}: {out}{error}");
    (output.status.code(), out, error)
}

pub(crate) const ADMIN_KEY: &str = "pbx_0123456789abcdefghijklmn";

pub(crate) async fn admin_of(process: &Pillarbox) -> Client {
    Client::new(&process.base_url().await).bearer(ADMIN_KEY)
}
