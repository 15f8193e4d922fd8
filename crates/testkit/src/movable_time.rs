//! A database whose time a test moves, for promises that need days. `libfaketime` answers the questions for the time of
//! day with a difference that it reads from a file; the monotonic clock, and with it every timeout, is real.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use pillarbox::database::Migrations;

use crate::{PrivateServers, Server, TestDatabase};

/// A migrated database on a separate PostgreSQL. Its time begins with the real one and is moved by the test.
pub struct MovableTime {
    database: TestDatabase,
    ahead: Mutex<Duration>,
    // After the database, which is dropped first.
    servers: PrivateServers,
}

impl MovableTime {
    pub async fn start(migrations: &Migrations) -> MovableTime {
        let servers = PrivateServers::start_with(&[Server::Postgres], &[("PBX_TEST_MOVABLE_TIME", "1")]).await;
        let database = TestDatabase::on(servers.postgres_url().to_owned(), migrations).await;
        MovableTime { database, ahead: Mutex::new(Duration::ZERO), servers }
    }

    pub fn database(&self) -> &TestDatabase {
        &self.database
    }

    /// Moves the time of the database, and of all processes with [`MovableTime::environment`].
    pub fn advance(&self, by: Duration) {
        let mut ahead = self.ahead.lock().expect("no test panics here");
        *ahead += by;
        write(&self.file(), *ahead);
    }

    /// The environment of a process that has the same time as the database.
    pub fn environment(&self) -> Vec<(String, String)> {
        environment(&self.file())
    }

    /// The environment of a process whose clock is ahead of the machine's by this time. The database's is not.
    pub fn environment_ahead(&self, by: Duration) -> Vec<(String, String)> {
        let file = self.servers.folder().join(format!("process-{}", by.as_secs()));
        write(&file, by);
        environment(&file)
    }

    fn file(&self) -> PathBuf {
        self.servers.folder().join("time")
    }
}

fn environment(file: &Path) -> Vec<(String, String)> {
    let folders = std::fs::read_dir("/usr/lib").expect("/usr/lib is readable").filter_map(Result::ok);
    let mut candidates = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    let library = candidates.find(|path| path.exists()).expect("libfaketime is not installed: run scripts/setup test");
    [
        ("LD_PRELOAD", library.display().to_string()),
        ("FAKETIME_TIMESTAMP_FILE", file.display().to_string()),
        ("FAKETIME_NO_CACHE", "1".to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// Replaces the file in one step: a process reads it whenever it needs the time.
fn write(file: &Path, ahead: Duration) {
    let new = file.with_extension("new");
    std::fs::write(&new, format!("+{}\n", ahead.as_secs())).expect("the folder is writable");
    std::fs::rename(new, file).expect("the folder is writable");
}
