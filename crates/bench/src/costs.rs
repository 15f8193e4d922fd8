//! The cost of an operation: CPU time of every process, and WAL bytes. Costs vary less than rates.

use sqlx::PgPool;

use crate::Outcome;
use crate::report::Report;
use crate::server::{Server, cpu_in};

/// CPU seconds that the server, PostgreSQL and this process have used, and bytes of WAL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Used {
    cpu: [f64; 3],
    wal: f64,
}

impl Used {
    pub(crate) async fn now(server: &Server, postgres: &Family, db: &PgPool) -> Outcome<Used> {
        let wal: f64 = sqlx::query_scalar("select (pg_current_wal_lsn() - '0/0')::float8").fetch_one(db).await?;
        let own = cpu_in(&std::fs::read_to_string("/proc/self/stat")?)?;
        Ok(Used { cpu: [server.cpu_seconds()?, postgres.cpu_seconds()?, own], wal })
    }
}

#[derive(Default)]
pub(crate) struct Costs([Vec<f64>; 4]);

impl Costs {
    pub(crate) fn add(&mut self, began: Used, ended: Used, count: u64) {
        let [server, postgres, bench, wal] = &mut self.0;
        for ((samples, began), ended) in [server, postgres, bench].into_iter().zip(began.cpu).zip(ended.cpu) {
            samples.push((ended - began) * 1e6 / count as f64);
        }
        wal.push((ended.wal - began.wal) / count as f64);
    }

    /// The CPU time of server and PostgreSQL together, of each run.
    pub(crate) fn of_both(&self) -> Vec<f64> {
        let [server, postgres, ..] = &self.0;
        server.iter().zip(postgres).map(|(server, postgres)| server + postgres).collect()
    }

    pub(crate) fn report(self, what: &str, report: &mut Report) {
        let [server, postgres, bench, wal] = self.0;
        report.add(&format!("{what}, CPU of the server"), "us", server);
        report.add(&format!("{what}, CPU of PostgreSQL"), "us", postgres);
        report.add(&format!("{what}, CPU of the load generator"), "us", bench);
        report.add(&format!("{what}, WAL"), "B", wal);
    }
}

/// A process and its children: PostgreSQL has one per connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Family(u32);

impl Family {
    /// The PostgreSQL server of this pool, which must run on this machine.
    pub(crate) async fn of_postgres(db: &PgPool) -> Outcome<Family> {
        let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(db).await?;
        Ok(Family(parent_in(&std::fs::read_to_string(format!("/proc/{backend}/stat"))?)?))
    }

    /// The CPU seconds of the process and its children, including children that have exited.
    pub(crate) fn cpu_seconds(&self) -> Outcome<f64> {
        let mut seconds = cpu_in(&std::fs::read_to_string(format!("/proc/{}/stat", self.0))?)?;
        for entry in std::fs::read_dir("/proc")? {
            let Ok(stat) = std::fs::read_to_string(entry?.path().join("stat")) else { continue };
            if parent_in(&stat)? == self.0 {
                seconds += cpu_in(&stat)?;
            }
        }
        Ok(seconds)
    }
}

fn parent_in(stat: &str) -> Outcome<u32> {
    let (_, fields) = stat.rsplit_once(')').ok_or("invalid /proc stat line")?;
    Ok(fields.split_whitespace().nth(1).ok_or("no parent")?.parse()?)
}
