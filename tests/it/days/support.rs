//! Support for tests that move the time of the database.

use std::time::Duration;

use pillarbox::operations::maintenance::{self, Retention};
use server::migrations;
use sqlx::PgPool;
use testkit::{MovableTime, Pillarbox, program};

use crate::server::process::{ADMIN_KEY, DataFolder};

pub(crate) const DAY: Duration = Duration::from_secs(24 * 3600);

/// A database with the table `effect`, in which handlers record what they processed.
pub(crate) async fn start() -> MovableTime {
    let time = MovableTime::start(&migrations()).await;
    let table = "create table effect (n bigint generated always as identity, key text, number bigint, at timestamptz default clock_timestamp())";
    sqlx::query(table).execute(time.database().pool()).await.unwrap();
    time
}

/// Posts a number to the consumer `effects`, with an id of the database's time.
pub(crate) const POST: &str = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, payload)
     values (3, pillarbox.uuid_v7(), 'test', 'main', 'test.posted', 'k', to_json($1::bigint))";

pub(crate) async fn post(db: &PgPool, number: i64) {
    sqlx::query(POST).bind(number).execute(db).await.unwrap();
}

/// Runs the maintenance of the log, for a process that has run for long enough to lapse consumers.
pub(crate) async fn maintain(db: &PgPool, retention: Retention) {
    maintenance::run_once(db, retention, maintenance::CATCH_UP_TIME).await.unwrap();
}

/// The name of the partition of today or an earlier day.
pub(crate) async fn day(db: &PgPool, table: &str, days_ago: i32) -> String {
    let query = "select $1 || to_char((now() at time zone 'UTC')::date - $2, '_YYYYMMDD')";
    sqlx::query_scalar(query).bind(table).bind(days_ago).fetch_one(db).await.unwrap()
}

pub(crate) async fn exists(db: &PgPool, table: &str) -> bool {
    sqlx::query_scalar("select to_regclass($1) is not null").bind(table).fetch_one(db).await.unwrap()
}

/// The newest positions of a consumer in all shards, as text.
pub(crate) async fn positions(db: &PgPool) -> Vec<String> {
    let query = "select format('%s: %s %s %s %s', shard, n, old, new, last_id)
                 from pillarbox.shards() as shard cross join lateral pillarbox.latest_position('effects', shard)
                 order by shard";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

/// A `pillarbox serve` process whose clock the test chooses.
pub(crate) struct Server {
    pub(crate) process: Pillarbox,
    _folder: DataFolder,
}

impl Server {
    /// `environment` is one of those of [`MovableTime`].
    pub(crate) fn start(database_url: &str, secret_key: &str, roles: &str, environment: &[(String, String)]) -> Server {
        let folder = DataFolder::new();
        let serve = ["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
        let args = [&serve[..], &["--database-url", database_url, "--roles", roles]].concat();
        let mut env = vec![
            ("PILLARBOX_ADMIN_KEY", ADMIN_KEY),
            ("PILLARBOX_SECRET_KEY", secret_key),
            ("PILLARBOX_LEASE_MS", "1000"),
            ("PILLARBOX_POOL_MIN", "0"),
            ("PILLARBOX_POOL_MAX", "5"),
            ("PILLARBOX_HUB__ALLOWED_NETWORKS", "127.0.0.0/8"),
            ("PILLARBOX_EVENTS__TRENDING_SECONDS", "1"),
            // The tests post counts of participants that no registration explains; reconciliation would correct them.
            ("PILLARBOX_EVENTS__RECONCILE_MINUTES", "0"),
        ];
        env.extend(environment.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        Server { process: Pillarbox::start(program(), &args, &env), _folder: folder }
    }

    /// A client with the admin key, in the tenant `main`.
    pub(crate) async fn admin(&self) -> testkit::Client {
        crate::server::process::admin_of(&self.process).await
    }
}
