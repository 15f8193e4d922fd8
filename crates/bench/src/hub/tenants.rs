//! Many tenants, of which one posts much more than each of the others: what the others notice of it.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use super::ROLES;
use super::fixture::{Fixture, UNNOTED, payload};
use super::poster::Poster;
use crate::Outcome;
use crate::report::{Pairs, Report};

const CONNECTIONS: usize = 64;
/// Requests at a time that create tenants and subscribers.
const CREATORS: usize = 16;
const EVENT_TYPE: &str = "bench.tenant";
/// The endpoints of the noisy tenant follow those of the others.
const SUBSCRIBERS_MAX: usize = 16;
/// The p99 of the other tenants must grow by less than this factor.
const RATIO_MAX: f64 = 2.0;

#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Options {
    /// Number of tenants, the noisy one included
    #[arg(long, default_value_t = 1_000)]
    tenants: usize,
    /// Subscribers of each tenant; each event goes to all of its tenant
    #[arg(long, default_value_t = 10)]
    subscribers: usize,
    /// Events per second of all tenants but the noisy one together
    #[arg(long, default_value_t = 100.0)]
    rate: f64,
    /// How many times as much the noisy tenant posts as each of the others
    #[arg(long, default_value_t = 100.0)]
    noise: f64,
    /// Seconds of a run
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
}

/// Measures the time from the accepted event until the last subscriber of its tenant has received it, for all tenants but the
/// noisy one, without it and beside it. Fails if the p99 is at least doubled in every pair.
pub(crate) async fn measure(pillarbox: &Path, pairs: usize, options: Options) -> Outcome<Report> {
    if !(1..=SUBSCRIBERS_MAX).contains(&options.subscribers) || options.tenants < 2 {
        return Err(format!("at least 2 tenants and 1 to {SUBSCRIBERS_MAX} subscribers are possible").into());
    }
    let fixture = Fixture::new(pillarbox, ROLES).await?;
    let began = Instant::now();
    let mut keys = create_tenants(&fixture, options).await?;
    let noisy_key = keys.pop().ok_or("no tenant")?;
    eprintln!("created {} tenants within {:.0} s", options.tenants, began.elapsed().as_secs_f64());
    let others = Posts { keys: keys.into(), rate: options.rate, is_noted: true };
    let noise_rate = options.rate / (options.tenants - 1) as f64 * options.noise;
    let noisy = Posts { keys: [noisy_key].into(), rate: noise_rate, is_noted: false };
    let (own, of_noisy) = (0..options.subscribers, SUBSCRIBERS_MAX..SUBSCRIBERS_MAX + options.subscribers);
    let count = |posts: &Posts| (posts.rate * options.seconds).max(1.0) as u64;

    latencies(&fixture, &others, count(&others), own.clone()).await?; // warm-up: dispatchers load the new subscribers
    let (mut p50s, mut p50s_beside) = (Vec::new(), Vec::new());
    let alone = async || {
        let (p50, p99) = latencies(&fixture, &others, count(&others), own.clone()).await?;
        p50s.push(p50);
        Ok(p99)
    };
    let beside = async || {
        let noise = deliver(&fixture, &noisy, count(&noisy), of_noisy.clone());
        let ((p50, p99), _) = tokio::try_join!(latencies(&fixture, &others, count(&others), own.clone()), noise)?;
        p50s_beside.push(p50);
        Ok(p99)
    };
    let runs = Pairs::run("p99 of the other tenants in ms", pairs, alone, beside).await?;
    let best = runs.ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let mut report = Report::default();
    report.add("events of the noisy tenant", "evt/s", vec![noise_rate]);
    report.add("events of the others together", "evt/s", vec![options.rate]);
    report.add("others without the noisy tenant, p50", "ms", p50s);
    report.add("others without the noisy tenant, p99", "ms", runs.raws);
    report.add("others beside the noisy tenant, p50", "ms", p50s_beside);
    report.add("others beside the noisy tenant, p99", "ms", runs.ours);
    report.add("others, p99 beside to p99 without", "", runs.ratios);
    report.add("peak memory of the server", "MiB", vec![fixture.end().await?]);
    match best < RATIO_MAX {
        true => Ok(report),
        false => {
            report.print();
            Err(format!(
                "the p99 of the other tenants grows by the factor {best:.2}; less than {RATIO_MAX} is promised"
            )
            .into())
        }
    }
}

/// Events that are posted with the keys of tenants in turn.
#[derive(Clone)]
struct Posts {
    keys: Arc<[String]>,
    rate: f64,
    /// Whether the receiver records their arrival.
    is_noted: bool,
}

impl Posts {
    /// Posts `count` events at the rate. Returns when each was accepted.
    async fn run(&self, address: &str, count: u64) -> Outcome<Vec<(u64, Instant)>> {
        let mut posters = Vec::new();
        for _ in 0..CONNECTIONS {
            posters.push(Poster::connect(address, "").await?);
        }
        let (next, began) = (Arc::new(AtomicU64::new(0)), Instant::now());
        let posting = |poster| tokio::spawn(self.clone().post_until_done(poster, next.clone(), count, began));
        let tasks: Vec<_> = posters.into_iter().map(posting).collect();
        let mut accepted = Vec::with_capacity(count as usize);
        for task in tasks {
            accepted.extend(task.await??);
        }
        Ok(accepted)
    }

    async fn post_until_done(
        self,
        mut poster: Poster,
        next: Arc<AtomicU64>,
        count: u64,
        began: Instant,
    ) -> Outcome<Vec<(u64, Instant)>> {
        let mut accepted = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return Ok(accepted);
            }
            tokio::time::sleep_until((began + Duration::from_secs_f64(number as f64 / self.rate)).into()).await;
            let key = &self.keys[number as usize % self.keys.len()];
            let content = payload(if self.is_noted { number } else { UNNOTED });
            let body = format!(r#"{{"event_type":"{EVENT_TYPE}","payload":{content}}}"#);
            let authorization = format!("authorization: Bearer {key}\r\n");
            match poster.send_with("POST", "/hub/v1/events", &authorization, &body).await? {
                (202, _) => accepted.push((number, Instant::now())),
                (status, answer) => return Err(format!("{status}: {}", String::from_utf8_lossy(answer)).into()),
            }
        }
    }
}

/// Posts events, and waits until these endpoints have received all of them. Returns when each was accepted.
async fn deliver(
    fixture: &Fixture,
    posts: &Posts,
    count: u64,
    endpoints: Range<usize>,
) -> Outcome<Vec<(u64, Instant)>> {
    let wanted = count * endpoints.len() as u64;
    let (accepted, _) = tokio::try_join!(posts.run(fixture.address(), count), fixture.receive(endpoints, wanted))?;
    Ok(accepted)
}

/// Returns p50 and p99 in milliseconds, from the response 202 to the last webhook of the event.
async fn latencies(fixture: &Fixture, posts: &Posts, count: u64, endpoints: Range<usize>) -> Outcome<(f64, f64)> {
    fixture.receiver.clear_arrivals();
    let accepted = deliver(fixture, posts, count, endpoints).await?;
    let took = |(number, at): &(u64, Instant)| {
        Some(fixture.receiver.arrival(*number)?.saturating_duration_since(*at).as_secs_f64() * 1e3)
    };
    let mut times: Vec<f64> = accepted.iter().filter_map(took).collect();
    if times.len() < count as usize {
        return Err(format!("{} of {count} events were received", times.len()).into());
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

/// Creates the tenants with their subscribers. Returns an ingest key of each; the last one is that of the noisy tenant.
async fn create_tenants(fixture: &Fixture, options: Options) -> Outcome<Vec<String>> {
    let (next, address) = (Arc::new(AtomicUsize::new(0)), fixture.address().to_owned());
    let url = fixture.receiver.url("");
    let creating = |_| {
        let (next, address, admin_key, url) =
            (next.clone(), address.clone(), fixture.admin_key().to_owned(), url.clone());
        tokio::spawn(async move {
            let mut poster = Poster::connect(&address, &admin_key).await?;
            let mut keys = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= options.tenants {
                    return Outcome::Ok(keys);
                }
                let is_noisy = number + 1 == options.tenants;
                let first = if is_noisy { SUBSCRIBERS_MAX } else { 0 };
                let urls = (first..first + options.subscribers).map(|endpoint| format!("{url}/{endpoint}"));
                keys.push((number, create_tenant(&mut poster, number, urls).await?));
            }
        })
    };
    let tasks: Vec<_> = (0..CREATORS).map(creating).collect();
    let mut keys = Vec::new();
    for task in tasks {
        keys.extend(task.await??);
    }
    keys.sort_unstable();
    Ok(keys.into_iter().map(|(_, key)| key).collect())
}

/// Creates a tenant with a subscriber for each address. Returns an ingest key.
async fn create_tenant(poster: &mut Poster, number: usize, urls: impl Iterator<Item = String>) -> Outcome<String> {
    let name = format!("tenant-{number}");
    create(poster, "/admin/v1/tenants", "", &json!({"name": name})).await?;
    let key = json!({"name": "bench", "role": "ingest", "tenant": name});
    let key = create(poster, "/admin/v1/keys", "", &key).await?;
    let acting = format!("pillarbox-tenant: {name}\r\n");
    for url in urls {
        let subscriber = json!({"name": "bench", "url": url, "event_types": [EVENT_TYPE]});
        create(poster, "/hub/v1/subscribers", &acting, &subscriber).await?;
    }
    Ok(key["key"].as_str().ok_or("no key")?.to_owned())
}

async fn create(poster: &mut Poster, path: &str, headers: &str, body: &Value) -> Outcome<Value> {
    match poster.send_with("POST", path, headers, &body.to_string()).await? {
        (200..300, answer) => Ok(serde_json::from_slice(answer)?),
        (status, answer) => Err(format!("POST {path}: {status}: {}", String::from_utf8_lossy(answer)).into()),
    }
}
