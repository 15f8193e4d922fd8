//! Marks of items over HTTP, in batches, compared with raw `HINCRBY` in pipelines of the same size over as many connections.
//! The counts are checked after every run.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use uuid::Uuid;

use crate::Outcome;
use crate::costs::Costs;
use crate::hub::poster::Poster;
use crate::installation::Installation;
use crate::report::{Pairs, Report};

const BATCH: usize = 100;
const ADMIN_KEY: &str = "pbx_bench_0123456789abcdefghij";
const PROJECTS: &str = "/progress/v1/projects";

/// Measures runs of `count` items with `clients` connections, over `projects` projects.
pub(crate) async fn measure(
    pillarbox: &Path,
    pairs: usize,
    (count, clients, projects): (usize, usize, usize),
) -> Outcome<Report> {
    let url = std::env::var("PBX_TEST_REDIS_URL").map_err(|_| "PBX_TEST_REDIS_URL is not set: run `make bench`")?;
    let prefix = format!("bench_{}:", Uuid::new_v4().simple());
    let settings =
        format!("admin_key = \"{ADMIN_KEY}\"\nredis_prefix = \"{prefix}\"\n[progress]\nredis_url = \"{url}\"\n");
    let args = ["--services", "progress", "--roles", "api,maintain"];
    let installation = Installation::start(pillarbox, &settings, &args).await?;
    let bench = Bench { installation, redis: redis::Client::open(format!("{url}/1"))?, prefix, clients, projects };
    let mut report = Report::default();
    let outcome = bench.measure(pairs, count / BATCH, &mut report).await;
    bench.installation.end().await?;
    outcome.map(|()| report)
}

struct Bench {
    installation: Installation,
    redis: redis::Client,
    prefix: String,
    clients: usize,
    projects: usize,
}

impl Bench {
    async fn measure(&self, pairs: usize, batches: usize, report: &mut Report) -> Outcome<()> {
        self.ours(batches / 4).await?; // warm-up
        let mut costs = Costs::default();
        let ours = async || {
            let began = self.installation.used().await?;
            let rate = self.ours(batches).await?;
            costs.add(began, self.installation.used().await?, (batches * BATCH) as u64);
            Ok(rate)
        };
        let runs = Pairs::run("marks", pairs, async || self.raw(batches).await, ours).await?;
        let clients = self.clients;
        report.add(&format!("raw HINCRBY, pipelines of {BATCH}, {clients} clients"), "/s", runs.raws);
        report.add(&format!("marks over HTTP, batches of {BATCH}, {clients} clients"), "/s", runs.ours);
        report.add("marks, ratio", "", runs.ratios);
        costs.report("marks, per item", report);
        Ok(())
    }

    /// Increments per second: each client sends one pipeline after the other.
    async fn raw(&self, batches: usize) -> Outcome<f64> {
        let next = Arc::new(AtomicUsize::new(0));
        let keys: Arc<Vec<String>> =
            Arc::new((0..self.projects).map(|_| format!("{}raw:{}", self.prefix, Uuid::new_v4())).collect());
        let mut connections = Vec::new();
        for _ in 0..self.clients {
            connections.push(self.redis.get_multiplexed_async_connection().await?);
        }
        let began = Instant::now();
        let client = |redis| tokio::spawn(increment(redis, keys.clone(), next.clone(), batches));
        for task in connections.into_iter().map(client).collect::<Vec<_>>() {
            task.await??;
        }
        let rate = (batches * BATCH) as f64 / began.elapsed().as_secs_f64();
        let mut redis = self.redis.get_multiplexed_async_connection().await?;
        let mut sum = 0;
        for key in keys.iter() {
            sum += redis.hget::<_, _, i64>(key, "done").await?;
            let _: i64 = redis.del(key).await?;
        }
        check(sum, batches)?;
        Ok(rate)
    }

    /// Marks per second: each client sends one request after the other.
    async fn ours(&self, batches: usize) -> Outcome<f64> {
        let mut poster = Poster::connect(&self.installation.server.address, ADMIN_KEY).await?;
        let mut ids = Vec::new();
        for _ in 0..self.projects {
            let id = Uuid::new_v4().to_string();
            let (status, answer) = poster.send_with("POST", PROJECTS, "", &format!("{{\"id\":\"{id}\"}}")).await?;
            if status != 201 {
                return Err(format!("{status}: {}", String::from_utf8_lossy(answer)).into());
            }
            ids.push(id);
        }
        let (next, ids) = (Arc::new(AtomicUsize::new(0)), Arc::new(ids));
        let mut posters = Vec::new();
        for _ in 0..self.clients {
            posters.push(Poster::connect(&self.installation.server.address, ADMIN_KEY).await?);
        }
        let began = Instant::now();
        let client = |poster| tokio::spawn(mark(poster, ids.clone(), next.clone(), batches));
        for task in posters.into_iter().map(client).collect::<Vec<_>>() {
            task.await??;
        }
        let rate = (batches * BATCH) as f64 / began.elapsed().as_secs_f64();
        let mut redis = self.redis.get_multiplexed_async_connection().await?;
        let mut sum = 0;
        for id in ids.iter() {
            let key = format!("{}smap:proj:{id}", self.prefix);
            sum += redis.hget::<_, _, i64>(&key, "done").await?;
            let _: i64 = redis.unlink(&[key.clone(), format!("{key}:items"), format!("{key}:rate")]).await?;
        }
        check(sum, batches)?;
        Ok(rate)
    }
}

fn check(sum: i64, batches: usize) -> Outcome<()> {
    if sum == (batches * BATCH) as i64 {
        return Ok(());
    }
    Err(format!("{sum} items were counted instead of {}", batches * BATCH).into())
}

async fn increment(
    mut redis: MultiplexedConnection,
    keys: Arc<Vec<String>>,
    next: Arc<AtomicUsize>,
    batches: usize,
) -> Outcome<()> {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= batches {
            return Ok(());
        }
        let mut pipe = redis::Pipeline::with_capacity(BATCH);
        for _ in 0..BATCH {
            pipe.hincr(&keys[number % keys.len()], "done", 1).ignore();
        }
        let () = pipe.query_async(&mut redis).await?;
    }
}

async fn mark(mut poster: Poster, ids: Arc<Vec<String>>, next: Arc<AtomicUsize>, batches: usize) -> Outcome<()> {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= batches {
            return Ok(());
        }
        let items: Vec<String> =
            (0..BATCH).map(|item| format!("{{\"id\":\"item-{}\"}}", number * BATCH + item)).collect();
        let path = format!("{PROJECTS}/{}/items", ids[number % ids.len()]);
        let (status, answer) =
            poster.send_with("POST", &path, "", &format!("{{\"items\":[{}]}}", items.join(","))).await?;
        if status != 200 {
            return Err(format!("{path}: {status}: {}", String::from_utf8_lossy(answer)).into());
        }
    }
}
