//! A PgBouncer per test in front of the shared PostgreSQL.

use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use tokio::net::UnixStream;

use crate::{eventually, servers, unique_name, watchdog};

const READY_WITHIN: Duration = Duration::from_secs(20);

/// A PgBouncer in transaction mode: each transaction may run in another session. Ends when it is dropped.
pub struct TestPooler {
    child: Child,
    folder: PathBuf,
}

impl TestPooler {
    /// The size of the pool of sessions. It is small, so that clients share sessions.
    pub const SESSIONS: usize = 4;

    /// `program` is the path to which `scripts/setup test` has installed PgBouncer. `statements` is its
    /// `max_prepared_statements`.
    pub async fn start(program: &str, statements: u32) -> TestPooler {
        watchdog::register_test();
        let url = servers::postgres_url();
        let postgres: PgConnectOptions = url.parse().expect("PBX_TEST_POSTGRES_URL is a URL");
        let (login, _) = url.rsplit_once('@').expect("a URL with a login");
        let (_, password) = login.rsplit_once(':').expect("a login with a password");
        let shared = servers::folder();
        // PgBouncer refuses to run as root, so it runs as the user of PostgreSQL.
        let user = std::fs::metadata(shared.join("postgres")).expect("PostgreSQL's folder");
        let folder = shared.join(unique_name());
        std::fs::create_dir(&folder).expect("a folder");
        // It listens on a Unix socket: a TCP port could be in use by another test.
        let settings = format!(
            "[databases]\n* = host={host} port={port}\n\
             [pgbouncer]\nlisten_addr =\nunix_socket_dir = {socket}\nauth_type = trust\nauth_file = users\n\
             pool_mode = transaction\ndefault_pool_size = {sessions}\nmax_client_conn = 500\n\
             max_prepared_statements = {statements}\n",
            host = postgres.get_host(),
            port = postgres.get_port(),
            sessions = TestPooler::SESSIONS,
            socket = folder.display(),
        );
        let users = format!("\"{}\" \"{password}\"\n", postgres.get_username());
        for (name, text) in [("settings", settings), ("users", users)] {
            std::fs::write(folder.join(name), text).expect("a file");
            chown(folder.join(name), Some(user.uid()), Some(user.gid())).expect("the file changes its owner");
        }
        // That user may have no access to the build directory, so the binary is copied. `cp` does it: a child that this process
        // forks at the same time would inherit a descriptor open for writing, and the copy could not be executed.
        let copied = Command::new("cp").arg(program).arg(folder.join("pgbouncer")).status();
        assert!(copied.is_ok_and(|status| status.success()), "no {program}: run scripts/setup test");
        chown(&folder, Some(user.uid()), Some(user.gid())).expect("the folder changes its owner");
        let child = Command::new(folder.join("pgbouncer"))
            .arg("settings")
            .current_dir(&folder)
            .uid(user.uid())
            .gid(user.gid())
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(folder.join("log")).expect("a log"))
            .spawn()
            .expect("PgBouncer runs");
        let pooler = TestPooler { child, folder };
        eventually("PgBouncer accepts connections", READY_WITHIN, async || {
            let log = std::fs::read_to_string(pooler.folder.join("log")).unwrap_or_default();
            UnixStream::connect(pooler.folder.join(".s.PGSQL.6432")).await.map(drop).map_err(|_| log)
        })
        .await;
        pooler
    }

    /// The URL of a database, changed to connect through this pooler.
    pub fn url(&self, database: &str) -> String {
        format!("{database}?host={}&port=6432", self.folder.display())
    }
}

impl Drop for TestPooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
