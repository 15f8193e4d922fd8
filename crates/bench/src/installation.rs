//! A separate database for a measurement, and the real server on it.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::Outcome;
use crate::costs::{Family, Used};
use crate::server::Server;

const LOG_LINES: usize = 20;

/// A migrated database and a folder, without a server yet.
pub(crate) struct Site {
    folder: PathBuf,
    admin: PgPool,
    database: String,
    pub(crate) url: String,
    pub(crate) db: PgPool,
}

pub(crate) struct Installation {
    pub(crate) site: Site,
    pub(crate) server: Server,
    postgres: Family,
}

impl Site {
    pub(crate) async fn new(pillarbox: &Path) -> Outcome<Site> {
        let postgres = std::env::var("PBX_TEST_POSTGRES_URL");
        let postgres = postgres.map_err(|_| "PBX_TEST_POSTGRES_URL is not set: run `make bench`")?;
        let database = format!("bench_{}", uuid::Uuid::new_v4().simple());
        let folder = std::env::temp_dir().join(&database);
        std::fs::create_dir_all(&folder)?;
        let admin = PgPoolOptions::new().max_connections(1).connect(&postgres).await?;
        sqlx::query(sqlx::AssertSqlSafe(format!("create database {database}"))).execute(&admin).await?;
        let url =
            format!("{}/{database}", postgres.rsplit_once('/').ok_or("PBX_TEST_POSTGRES_URL names no database")?.0);
        let migrating = tokio::process::Command::new(pillarbox)
            .args(["migrate", "--database-url", &url, "--data-dir"])
            .arg(&folder)
            .status();
        if !migrating.await?.success() {
            return Err("pillarbox migrate failed".into());
        }
        let db = PgPoolOptions::new().max_connections(4).connect(&url).await?;
        Ok(Site { folder, admin, database, url, db })
    }

    /// Starts the server with `settings` as its `pillarbox.toml` and `args` as further arguments of `serve`.
    pub(crate) async fn serve(self, pillarbox: &Path, settings: &str, args: &[&str]) -> Outcome<Installation> {
        let file = self.folder.join("pillarbox.toml");
        std::fs::write(&file, settings)?;
        let log = std::fs::File::create(self.log())?;
        let (file, data_dir) = (file.to_string_lossy(), self.folder.to_string_lossy());
        let mut all = vec!["serve", "--config", &*file, "--data-dir", &*data_dir, "--listen", "127.0.0.1:0"];
        all.extend(["--database-url", &self.url]);
        all.extend(args);
        let server = Server::start_logging(pillarbox, &all, Stdio::from(log)).await?;
        let postgres = Family::of_postgres(&self.db).await?;
        Ok(Installation { site: self, server, postgres })
    }

    fn log(&self) -> PathBuf {
        self.folder.join("server.log")
    }
}

impl Installation {
    pub(crate) async fn start(pillarbox: &Path, settings: &str, args: &[&str]) -> Outcome<Installation> {
        Site::new(pillarbox).await?.serve(pillarbox, settings, args).await
    }

    pub(crate) async fn used(&self) -> Outcome<Used> {
        Used::now(&self.server, &self.postgres, &self.site.db).await
    }

    /// The last lines of the server's log.
    pub(crate) fn log_end(&self) -> Outcome<String> {
        let log = std::fs::read_to_string(self.site.log())?;
        let lines: Vec<&str> = log.lines().collect();
        Ok(lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"))
    }

    /// Stops the server and drops the database. Returns the peak memory of the server in MiB.
    pub(crate) async fn end(self) -> Outcome<f64> {
        let peak = self.server.rss_bytes_peak()? as f64 / 1024.0 / 1024.0;
        let log = std::fs::read_to_string(self.site.log())?;
        let complaints: Vec<&str> =
            log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
        if let Some(last) = complaints.last() {
            eprintln!("the server logged {} warnings or errors, last: {last}", complaints.len());
        }
        let Site { folder, admin, database, db, .. } = self.site;
        self.server.stop().await?;
        db.close().await;
        let drop = format!("drop database {database} with (force)");
        sqlx::query(sqlx::AssertSqlSafe(drop)).execute(&admin).await?;
        std::fs::remove_dir_all(&folder)?;
        Ok(peak)
    }
}
