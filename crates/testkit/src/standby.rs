//! A streaming standby of a private PostgreSQL, which a test promotes.

use std::net::TcpListener;
use std::time::Duration;

use sqlx::{Connection, PgConnection};

use crate::{FaultProxy, PrivateServers, eventually};

const READY_WITHIN: Duration = Duration::from_secs(60);

/// A hot standby with asynchronous streaming replication. It belongs to the [`PrivateServers`] and is stopped with them.
pub struct Standby {
    primary_url: String,
    url: String,
    /// The replication connection goes through it.
    replication: FaultProxy,
}

impl Standby {
    /// Copies the primary and starts to follow it.
    pub async fn start(servers: &PrivateServers) -> Standby {
        let primary_url = servers.postgres_url().to_owned();
        let replication = FaultProxy::in_front_of(&primary_url).await;
        let data = servers.create_folder("standby").join("data");
        let data = data.to_str().expect("a path in UTF-8");
        let source = replication.url(&primary_url);
        // `--write-recovery-conf` makes the copy a standby that replicates from the same address.
        let copy = ["--pgdata", data, "--dbname", &source, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"];
        servers.run_postgres_program("pg_basebackup", &copy).await;
        let port = free_port().to_string();
        let socket = format!("--unix_socket_directories={data}");
        let arguments = ["-D", data, "-p", &port, "--listen_addresses=127.0.0.1", &socket, "--max_connections=500"];
        let fast = ["--fsync=off", "--full_page_writes=off", "--jit=off"];
        servers.start_postgres_in("standby", &[&arguments[..], &fast].concat());
        let (server, _) = primary_url.rsplit_once('@').expect("a URL with a user");
        let (_, database) = primary_url.rsplit_once('/').expect("a URL with a database");
        let url = format!("{server}@127.0.0.1:{port}/{database}");
        let standby = Standby { primary_url, url, replication };
        eventually("the standby accepts queries", READY_WITHIN, async || PgConnection::connect(&standby.url).await)
            .await;
        standby
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Waits until the standby has everything that the primary has committed so far.
    pub async fn catch_up(&self) {
        let mut primary = PgConnection::connect(&self.primary_url).await.expect("the primary accepts connections");
        let written = "select pg_current_wal_lsn()::text";
        let written: String = sqlx::query_scalar(written).fetch_one(&mut primary).await.expect("its position");
        let mut standby = PgConnection::connect(&self.url).await.expect("the standby accepts connections");
        eventually("the standby has replayed everything", READY_WITHIN, async || {
            let query = "select pg_last_wal_replay_lsn() >= $1::pg_lsn";
            sqlx::query_scalar::<_, bool>(query).bind(&written).fetch_one(&mut standby).await.expect("its position")
        })
        .await;
    }

    /// Ends replication for good: the standby lacks everything that the primary commits from now on.
    pub fn cut_replication(&self) {
        self.replication.refuse();
    }

    /// Makes the standby a primary. Returns when it accepts writes.
    pub async fn promote(&self) {
        let mut standby = PgConnection::connect(&self.url).await.expect("the standby accepts connections");
        let promoted = sqlx::query_scalar::<_, bool>("select pg_promote()").fetch_one(&mut standby).await;
        assert!(promoted.expect("the promotion starts"), "the promotion did not end within a minute");
    }
}

/// A port that is free now, below the range that the kernel assigns to clients.
fn free_port() -> u16 {
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let candidates = std::iter::repeat_with(|| 20_000 + (uuid::Uuid::new_v4().as_u128() % 6_000) as u16);
    candidates.take(100).find(is_free).expect("a free port")
}
