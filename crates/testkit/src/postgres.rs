//! A database per test.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;

use pillarbox::database::Migrations;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use crate::{servers, unique_name, watchdog};

/// A database for one test. Dropping the value drops the database, even if clients are still connected to it.
///
/// It is a copy of a template database in which the migrations have run. Only the first test pays for the migrations;
/// copying is much cheaper.
pub struct TestDatabase {
    /// The URL of the server's maintenance database, as a superuser.
    server: String,
    name: String,
    pool: PgPool,
}

impl TestDatabase {
    /// Creates a database with all migrations applied.
    pub async fn new(migrations: &Migrations) -> TestDatabase {
        TestDatabase::on(servers::postgres_url(), migrations).await
    }

    /// The same on another server, given by the URL of its maintenance database.
    pub(crate) async fn on(server: String, migrations: &Migrations) -> TestDatabase {
        watchdog::register_test();
        let mut admin = connect_as_admin(&server).await;
        let template = ensure_template(&mut admin, &server, migrations).await;
        TestDatabase::create(admin, server, &template).await
    }

    /// Creates an empty database.
    pub async fn empty() -> TestDatabase {
        watchdog::register_test();
        let server = servers::postgres_url();
        TestDatabase::create(connect_as_admin(&server).await, server, "template0").await
    }

    pub fn url(&self) -> String {
        url_of(&self.server, &self.name)
    }

    pub fn connect_options(&self) -> PgConnectOptions {
        options_of(&self.server, &self.name)
    }

    /// A pool for the test itself. It connects when it is first used.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    async fn create(mut admin: PgConnection, server: String, template: &str) -> TestDatabase {
        let name = unique_name();
        // The default strategy writes every page of the copy to the WAL: it takes 1.4 s here, copying the files 0.05 s.
        execute(&mut admin, format!("create database {name} template {template} strategy file_copy")).await;
        close(admin).await;
        let pool = PgPoolOptions::new().connect_lazy_with(options_of(&server, &name));
        TestDatabase { server, name, pool }
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        let (sql, server) = (format!("drop database {} with (force)", self.name), self.server.clone());
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        // On a separate thread and runtime: the runtime of the test may have ended, or may not be allowed to block.
        let dropping = std::thread::spawn(move || {
            let _sender = sender; // It is dropped when the thread ends.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let mut admin = connect_as_admin(&server).await;
                execute(&mut admin, sql).await;
                close(admin).await;
            });
        });
        // PostgreSQL waits until every session has noticed the drop, also one whose login cannot continue because this thread
        // runs its runtime. So the wait is bounded; the login ends with the runtime.
        if receiver.recv_timeout(DROP_TIME_MAX) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            return;
        }
        let dropped = dropping.join();
        // The thread has printed the reason. A second panic would abort the process and hide the first one.
        if dropped.is_err() && !std::thread::panicking() {
            panic!("cannot drop database {}", self.name);
        }
    }
}

/// Returns the name of the template for these migrations. Creates the template if it does not exist yet.
async fn ensure_template(admin: &mut PgConnection, server: &str, migrations: &Migrations) -> String {
    let name = template_name(migrations);
    if is_complete(admin, &name).await == Some(true) {
        return name;
    }

    // Test processes run at the same time: one of them creates the template while the others wait for this lock.
    sqlx::query("select pg_advisory_lock(hashtext($1))").bind(&name).execute(&mut *admin).await.expect("the lock");
    let complete = is_complete(admin, &name).await;
    if complete != Some(true) {
        if complete.is_some() {
            // The process that created it was killed half-way.
            execute(admin, format!("drop database {name} with (force)")).await;
        }
        create_template(admin, server, &name, migrations).await;
    }
    sqlx::query("select pg_advisory_unlock(hashtext($1))").bind(&name).execute(&mut *admin).await.expect("the unlock");
    name
}

async fn create_template(admin: &mut PgConnection, server: &str, name: &str, migrations: &Migrations) {
    execute(admin, format!("create database {name} template template0")).await;
    let mut db = PgConnection::connect_with(&options_of(server, name)).await.expect("a connection to the template");
    pillarbox::database::apply_migrations(&mut db, migrations).await.expect("the migrations run");
    let insert = sqlx::query("insert into pillarbox.tenant (name) select unnest($1::text[])").bind(TENANTS);
    insert.execute(&mut db).await.expect("the tenants");
    close(db).await;
    // The flag comes last: it distinguishes a complete template from an incomplete one.
    execute(admin, format!("alter database {name} with is_template true allow_connections false")).await;
}

/// The tenants that tests post and subscribe for, beside `main`.
const TENANTS: [&str; 5] = ["acme", "other", "rival", "slow", "zeta"];

/// Returns `None` if there is no such template, and `Some(false)` if it is incomplete.
async fn is_complete(admin: &mut PgConnection, name: &str) -> Option<bool> {
    sqlx::query_scalar("select datistemplate from pg_database where datname = $1")
        .bind(name)
        .fetch_optional(admin)
        .await
        .expect("the list of databases")
}

/// The same migrations result in the same name in every process (`DefaultHasher::new` has fixed keys).
fn template_name(migrations: &Migrations) -> String {
    let mut hasher = DefaultHasher::new();
    for (migration, text) in migrations.iter() {
        (migration.schema, migration.version, text).hash(&mut hasher);
    }
    TENANTS.hash(&mut hasher);
    format!("template_{:016x}", hasher.finish())
}

/// How long a test waits until its database is dropped.
const DROP_TIME_MAX: std::time::Duration = std::time::Duration::from_secs(3);

async fn connect_as_admin(server: &str) -> PgConnection {
    PgConnection::connect(server).await.expect("a connection to the test's PostgreSQL")
}

fn options_of(server: &str, database: &str) -> PgConnectOptions {
    PgConnectOptions::from_str(&url_of(server, database)).expect("PBX_TEST_POSTGRES_URL is a URL")
}

fn url_of(server: &str, database: &str) -> String {
    let (server, _) = server.rsplit_once('/').expect("PBX_TEST_POSTGRES_URL ends with a database");
    format!("{server}/{database}")
}

/// For statements about databases, which accept no parameters. All names in them are generated here.
async fn execute(connection: &mut PgConnection, sql: String) {
    if let Err(error) = sqlx::raw_sql(AssertSqlSafe(sql.as_str())).execute(connection).await {
        panic!("{sql}: {error}");
    }
}

async fn close(connection: PgConnection) {
    connection.close().await.expect("the connection closes");
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use pillarbox::database::SchemaMigrations;
    use sqlx::Executor;
    use tokio::task::JoinSet;

    use super::*;
    use crate::eventually;

    #[tokio::test]
    async fn twenty_racers_share_a_template_but_no_database() {
        let migrations = Arc::new(migrations("create table item (id int)"));
        let mut racers = JoinSet::new();
        for _ in 0..20 {
            let migrations = Arc::clone(&migrations);
            racers.spawn(async move {
                let db = TestDatabase::new(&migrations).await;
                let inserted = db.pool().execute("insert into item values (1)").await;
                inserted.expect("the migration has run");
                db
            });
        }
        for db in racers.join_all().await {
            let rows: i64 = sqlx::query_scalar("select count(*) from item").fetch_one(db.pool()).await.unwrap();
            assert_eq!(rows, 1);
        }
    }

    #[tokio::test]
    async fn an_incomplete_template_is_replaced() {
        let migrations = migrations("create table half (id int)");
        let mut admin = connect_as_admin(&servers::postgres_url()).await;
        // A killed process leaves the database without the flag, and a session that PostgreSQL has not ended yet.
        execute(&mut admin, format!("create database {}", template_name(&migrations))).await;
        let mut creator =
            PgConnection::connect_with(&options_of(&servers::postgres_url(), &template_name(&migrations)))
                .await
                .unwrap();
        creator.execute("create table half (id int)").await.unwrap();

        let db = TestDatabase::new(&migrations).await;

        db.pool().execute("select id from half").await.expect("the migration has run once");
    }

    #[tokio::test]
    async fn a_panic_drops_the_database_despite_open_connections() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let test = tokio::spawn(async {
            let db = TestDatabase::empty().await;
            db.pool().execute("select 1").await.unwrap();
            sender.send(db.name.clone()).unwrap();
            panic!("a failing test");
        });
        let name = receiver.await.unwrap();
        assert!(test.await.unwrap_err().is_panic());

        let mut admin = connect_as_admin(&servers::postgres_url()).await;
        let is_dropped = async || is_complete(&mut admin, &name).await.is_none();
        eventually("the database is dropped", Duration::from_secs(10), is_dropped).await;
    }

    #[tokio::test]
    async fn the_url_connects_to_the_database() {
        let db = TestDatabase::empty().await;
        let mut connection = PgConnection::connect(&db.url()).await.unwrap();
        let name: String = sqlx::query_scalar("select current_database()").fetch_one(&mut connection).await.unwrap();
        assert_eq!(name, db.name);
    }

    /// Migrations without a template, even if the servers have run this test before.
    fn migrations(sql: &str) -> Migrations {
        let text: &'static str = format!("{sql} -- {}", unique_name()).leak();
        Migrations::default().with([SchemaMigrations { schema: "test", texts: vec![text].leak() }])
    }
}
