//! A primary with a standby, behind a proxy that fails over from one to the other.

use std::collections::BTreeSet;
use std::time::Duration;

use hyper::Method;
use serde_json::Value;
use server::settings::Settings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use testkit::{Client, FaultProxy, LeftBehind, PrivateServers, Server, Standby, TestApp, eventually};

use crate::support::DEADLINE;

pub(super) struct Cluster {
    servers: PrivateServers,
    pub(super) standby: Standby,
    pub(super) proxy: FaultProxy,
}

impl Cluster {
    /// Starts a migrated primary and its standby.
    pub(super) async fn start() -> Cluster {
        let servers = PrivateServers::start(&[Server::Postgres]).await;
        let options: PgConnectOptions = servers.postgres_url().parse().unwrap();
        pillarbox::database::migrate_all(&options, &server::migrations()).await.unwrap();
        let (standby, proxy) = (Standby::start(&servers).await, FaultProxy::in_front_of(servers.postgres_url()).await);
        Cluster { servers, standby, proxy }
    }

    /// Starts Pillarbox with short leases, connected through the proxy.
    pub(super) async fn start_app(&self, change: impl FnOnce(&mut Settings)) -> TestApp {
        let with_short_leases = |settings: &mut Settings| {
            settings.lease_ms = 1_000;
            change(settings);
        };
        TestApp::start_on(&self.proxy.url(self.servers.postgres_url()), with_short_leases).await
    }

    /// Ends replication. The standby has everything that was committed before, and nothing that is committed from now on.
    pub(super) async fn cut_replication(&self) {
        self.standby.catch_up().await;
        self.standby.cut_replication();
    }

    /// All connections fall silent, the standby is promoted, and new connections lead to it. The existing ones are reset.
    pub(super) async fn fail_over(&self) {
        self.fail_over_except(&BTreeSet::new(), LeftBehind::Silent).await;
    }

    /// The same, but the connections with these ports are left open.
    pub(super) async fn fail_over_except(&self, left: &BTreeSet<u16>, left_behind: LeftBehind) {
        self.proxy.stall();
        self.standby.promote().await;
        self.proxy.fail_over(self.standby.url(), &left.iter().copied().collect::<Vec<_>>(), left_behind);
    }

    /// The client ports of the connections that the watcher and the heartbeat share. They use them in turn, so each of
    /// them polls the log from time to time.
    pub(super) async fn vital_ports(&self) -> BTreeSet<u16> {
        const SAMPLES: usize = 40;
        let mut primary = PgConnection::connect(self.servers.postgres_url()).await.unwrap();
        let query = "select client_port from pg_stat_activity
                     where application_name = 'pillarbox' and query like '%pg_snapshot_xip(pg_current_snapshot())%'";
        let mut ports = BTreeSet::new();
        for _ in 0..SAMPLES {
            let found: Vec<i32> = sqlx::query_scalar(query).fetch_all(&mut primary).await.unwrap();
            ports.extend(found.into_iter().map(|port| u16::try_from(port).unwrap()));
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        assert!(!ports.is_empty(), "no connection polls the log");
        ports
    }

    /// Makes the promoted standby assign transaction ids up to this one, which the old primary has assigned, as other
    /// clients of the database do with time.
    pub(super) async fn assign_again_up_to(&self, xid: i64) {
        let mut db = PgConnection::connect(self.standby.url()).await.unwrap();
        let statement =
            format!("do $$ begin while pg_current_xact_id()::text::bigint <= {xid} loop commit; end loop; end $$");
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut db).await.unwrap();
    }

    /// The last transaction id that the old primary has assigned.
    pub(super) async fn last_xid(&self) -> i64 {
        let mut db = PgConnection::connect(self.servers.postgres_url()).await.unwrap();
        sqlx::query_scalar("select pg_current_xact_id()::text::bigint").fetch_one(&mut db).await.unwrap()
    }
}

/// Posts a hub event until it is accepted: the server answers 503 until its connections are open again.
pub(super) async fn post_again(admin: &Client, event: Value) {
    eventually(&format!("{event} is accepted"), DEADLINE, async || {
        match admin.send(Method::POST, "/hub/v1/events", Some(event.clone())).await.status {
            202 => Ok(()),
            503 => Err(503),
            other => panic!("{event} was answered {other}"),
        }
    })
    .await;
}
