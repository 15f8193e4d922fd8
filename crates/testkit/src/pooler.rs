//! PgBouncer between a test and the shared PostgreSQL.

use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use tokio::net::UnixStream;

use crate::{drain, servers, unique_name};

const READY_WITHIN: Duration = Duration::from_secs(20);

/// A PgBouncer that hands out another session for each transaction, to any number of clients. Gone with this value.
pub struct TestPooler {
    child: Child,
    folder: PathBuf,
}

impl TestPooler {
    /// At most so many, so that clients are given each other's.
    pub const SESSIONS: usize = 4;

    /// `program`: where `scripts/setup test` has put it. `statements`: how many prepared ones it keeps for each session.
    pub async fn start(program: &str, statements: u32) -> TestPooler {
        let url = servers::postgres_url();
        let postgres: PgConnectOptions = url.parse().expect("PBX_TEST_POSTGRES_URL is a URL");
        let (login, _) = url.rsplit_once('@').expect("a URL with a login");
        let (_, password) = login.rsplit_once(':').expect("a login with a password");
        let shared = servers::folder();
        // PgBouncer, too, refuses to run as root.
        let user = std::fs::metadata(shared.join("postgres")).expect("PostgreSQL's folder");
        let folder = shared.join(unique_name());
        std::fs::create_dir(&folder).expect("a folder");
        // A socket, as no other test can take its port.
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
            chown(folder.join(name), Some(user.uid()), Some(user.gid())).expect("a file of its own");
        }
        // That user may not reach the folder of the build. By another process: whoever is started by this one meanwhile would
        // hold the copy open for writing, and it could not be run.
        let copied = Command::new("cp").arg(program).arg(folder.join("pgbouncer")).status();
        assert!(copied.is_ok_and(|status| status.success()), "no {program}: run scripts/setup test");
        chown(&folder, Some(user.uid()), Some(user.gid())).expect("a folder of its own");
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
        drain("PgBouncer accepts connections", READY_WITHIN, async || {
            let log = std::fs::read_to_string(pooler.folder.join("log")).unwrap_or_default();
            UnixStream::connect(pooler.folder.join(".s.PGSQL.6432")).await.map(drop).map_err(|_| log)
        })
        .await;
        pooler
    }

    /// The same database through it.
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
