//! A database of a measurement's own, and the real server on it, as an operator runs it.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::Outcome;
use crate::server::Server;

pub(crate) struct Installation {
    folder: PathBuf,
    admin: PgPool,
    database: String,
    pub(crate) url: String,
    pub(crate) db: PgPool,
    pub(crate) server: Server,
}

impl Installation {
    /// `settings` is what stands in its `pillarbox.toml`, `args` what is said to `serve` besides.
    pub(crate) async fn start(pillarbox: &Path, settings: &str, args: &[&str]) -> Outcome<Installation> {
        let postgres = std::env::var("PBX_TEST_POSTGRES_URL");
        let postgres = postgres.map_err(|_| "PBX_TEST_POSTGRES_URL is not set: run `make bench`")?;
        let database = format!("bench_{}", uuid::Uuid::new_v4().simple());
        let folder = std::env::temp_dir().join(&database);
        std::fs::create_dir_all(&folder)?;
        let admin = PgPoolOptions::new().max_connections(1).connect(&postgres).await?;
        sqlx::query(sqlx::AssertSqlSafe(format!("create database {database}"))).execute(&admin).await?;
        let url = format!("{}/{database}", postgres.rsplit_once('/').ok_or("no database in the address")?.0);
        let migrating = tokio::process::Command::new(pillarbox)
            .args(["migrate", "--database-url", &url, "--data-dir"])
            .arg(&folder)
            .status();
        if !migrating.await?.success() {
            return Err("pillarbox migrate failed".into());
        }
        let file = folder.join("pillarbox.toml");
        std::fs::write(&file, settings)?;
        let log = std::fs::File::create(folder.join("server.log"))?;
        let (file, data_dir) = (file.to_string_lossy(), folder.to_string_lossy());
        let mut all = vec!["serve", "--config", &*file, "--data-dir", &*data_dir, "--listen", "127.0.0.1:0"];
        all.extend(["--database-url", &url]);
        all.extend(args);
        let server = Server::start_logging(pillarbox, &all, Stdio::from(log)).await?;
        let db = PgPoolOptions::new().max_connections(4).connect(&url).await?;
        Ok(Installation { folder, admin, database, url, db, server })
    }

    pub(crate) async fn end(self) -> Outcome<()> {
        let log = std::fs::read_to_string(self.folder.join("server.log"))?;
        let complaints: Vec<&str> =
            log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
        if let Some(last) = complaints.last() {
            eprintln!("the server complained {} times, last: {last}", complaints.len());
        }
        self.server.stop().await?;
        self.db.close().await;
        let drop = format!("drop database {} with (force)", self.database);
        sqlx::query(sqlx::AssertSqlSafe(drop)).execute(&self.admin).await?;
        std::fs::remove_dir_all(&self.folder)?;
        Ok(())
    }
}
