//! The events feed with many events: first pages, deep pages, filters and searches; and cached pages compared with
//! `/healthz` of the same server.

pub(crate) mod fixture;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::Outcome;
use crate::load::{Connection, rate};
use crate::report::{Pairs, Report};
use fixture::Fixture;

const CONNECTIONS: usize = 32;
const RUN: Duration = Duration::from_secs(2);
/// Pages of a run. Each is requested once, so that none is cached.
const PAGES: usize = 50;
const DEPTH: u64 = 100_000;
const WALK_LIMIT: u64 = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Pages at the depth of 100,000 events, between runs of first pages
    Deep,
    /// First pages of a city and a category, between runs of first pages
    Filtered,
    /// First pages of a search, between runs of first pages
    Searched,
    /// First pages of the trending order, between runs of first pages
    Trending,
    /// A cached page, between runs of /healthz
    Cached,
}

pub(crate) async fn measure(pillarbox: &Path, pairs: usize, only: &[Part], events: u64) -> Outcome<Report> {
    let mut report = Report::default();
    let fixture = Fixture::new(pillarbox, events).await?;
    let queries = Queries::default();
    for part in Part::value_variants() {
        if !only.is_empty() && !only.contains(part) {
            continue;
        }
        match part {
            Part::Deep => deep(&fixture, &queries, pairs, events, &mut report).await?,
            Part::Filtered => {
                beside_first(&fixture, &queries, pairs, "filtered", "&city=city%207&category=kind%203", &mut report)
                    .await?
            }
            Part::Searched => beside_first(&fixture, &queries, pairs, "searched", "&q=word7", &mut report).await?,
            Part::Trending => {
                beside_first(&fixture, &queries, pairs, "trending", "&sort=trending", &mut report).await?
            }
            Part::Cached => cached(&fixture, pairs, &mut report).await?,
        }
    }
    report.add("peak memory of the server", "MiB", vec![fixture.end().await?]);
    Ok(report)
}

/// Creates a different query each time, with an end time after all events.
#[derive(Default)]
struct Queries(AtomicU64);

impl Queries {
    fn next(&self) -> String {
        let number = self.0.fetch_add(1, Ordering::Relaxed);
        format!("/event/v1/events?to=9000-01-01T00:00:00.{number:06}Z")
    }
}

/// The rate of one connection that results from the median time of these pages.
async fn median_rate(connection: &mut Connection, paths: &[String]) -> Outcome<f64> {
    let mut times = Vec::with_capacity(paths.len());
    for path in paths {
        let sent_at = Instant::now();
        connection.get(path).await?;
        times.push(sent_at.elapsed().as_secs_f64());
    }
    Ok(rate_of_median(times))
}

fn rate_of_median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    1.0 / seconds[seconds.len() / 2]
}

async fn first_pages(fixture: &Fixture, queries: &Queries, filters: &str) -> Outcome<f64> {
    let paths: Vec<String> = (0..PAGES).map(|_| format!("{}{filters}", queries.next())).collect();
    median_rate(&mut Connection::open(fixture.address()).await?, &paths).await
}

async fn beside_first(
    fixture: &Fixture,
    queries: &Queries,
    pairs: usize,
    what: &str,
    filters: &str,
    report: &mut Report,
) -> Outcome<()> {
    let runs = Pairs::run(
        what,
        pairs,
        async || first_pages(fixture, queries, "").await,
        async || first_pages(fixture, queries, filters).await,
    );
    add_times(report, &format!("first page, {what}"), &runs.await?);
    Ok(())
}

/// Reads up to the depth once, and continues from there with every run.
async fn deep(fixture: &Fixture, queries: &Queries, pairs: usize, events: u64, report: &mut Report) -> Outcome<()> {
    let depth = DEPTH.min(events.saturating_sub(PAGES as u64 * (pairs as u64 + 1) * 20) / WALK_LIMIT * WALK_LIMIT);
    let walked = queries.next();
    let mut connection = Connection::open(fixture.address()).await?;
    let mut cursor = String::new();
    for _ in 0..depth / WALK_LIMIT {
        let page = connection.get(&format!("{walked}&limit={WALK_LIMIT}{cursor}")).await?;
        cursor = format!("&cursor={}", next_cursor(page)?);
    }
    let deep_pages = async || {
        let mut times = Vec::with_capacity(PAGES);
        for _ in 0..PAGES {
            let path = format!("{walked}{cursor}");
            let sent_at = Instant::now();
            let page = connection.get(&path).await?;
            times.push(sent_at.elapsed().as_secs_f64());
            cursor = format!("&cursor={}", next_cursor(page)?);
        }
        Ok(rate_of_median(times))
    };
    let runs = Pairs::run("deep", pairs, async || first_pages(fixture, queries, "").await, deep_pages);
    add_times(report, &format!("page at depth {depth}"), &runs.await?);
    Ok(())
}

async fn cached(fixture: &Fixture, pairs: usize, report: &mut Report) -> Outcome<()> {
    let address = fixture.address();
    let runs = Pairs::run(
        "cached",
        pairs,
        async || rate(address, "/healthz", CONNECTIONS, RUN).await,
        async || rate(address, "/event/v1/events", CONNECTIONS, RUN).await,
    );
    let runs = runs.await?;
    report.add("GET /healthz", "req/s", runs.raws);
    report.add("GET a cached page of the feed", "req/s", runs.ours);
    report.add("ratio to /healthz", "", runs.ratios);
    Ok(())
}

/// Adds the rates of one connection as times. The ratio is relative to the time of a first page.
fn add_times(report: &mut Report, what: &str, runs: &Pairs) {
    let millis = |rates: &[f64]| rates.iter().map(|rate| 1_000.0 / rate).collect();
    report.add("first page", "ms", millis(&runs.raws));
    report.add(what, "ms", millis(&runs.ours));
    report.add(
        &format!("{what}, ratio to the time of a first page"),
        "",
        runs.ratios.iter().map(|ratio| 1.0 / ratio).collect(),
    );
}

fn next_cursor(page: &[u8]) -> Outcome<String> {
    let page: serde_json::Value = serde_json::from_slice(page)?;
    Ok(page["next_cursor"].as_str().ok_or("there is no next page")?.to_owned())
}
