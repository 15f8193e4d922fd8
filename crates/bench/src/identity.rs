//! Sign-ins over HTTP, compared with the raw rate of Argon2id on the same cores; and pages of the events feed, alone and
//! while 200 clients sign in.

use std::path::Path;
use std::time::{Duration, Instant};

use argon2::{Algorithm, Argon2, Block, Params, PasswordHasher, Version};
use http_kit::auth::TokenSigner;
use runtime::clock::Clock;
use runtime::secret::MasterKey;
use serde_json::json;
use uuid::Uuid;

use crate::Outcome;
use crate::hub::poster::Poster;
use crate::installation::Installation;
use crate::load::Connection;
use crate::report::{Pairs, Report};

const CLIENTS: usize = 200;
const EVENTS: usize = 100;
const PASSWORD: &str = "correct horse battery staple";
const TOKEN_TIME: Duration = Duration::from_secs(3600);

pub(crate) async fn measure(pillarbox: &Path, pairs: usize, seconds: u64) -> Outcome<Report> {
    let key = MasterKey::generate();
    // No limits: all clients have one address, which may use an eighth of the queue.
    let settings = format!(
        "secret_key = \"{}\"\n[identity]\nlogin_failures_max = 0\nlogin_failures_per_network_max = 0\nhash_queue_max = {}\n",
        key.to_base64(),
        8 * CLIENTS
    );
    let args = ["--services", "identity,events", "--roles", "api,consume,maintain"];
    let installation = Installation::start(pillarbox, &settings, &args).await?;
    let mut report = Report::default();
    let time = Duration::from_secs(seconds);
    let outcome = measure_both(&installation, &TokenSigner::new(&key), pairs, time, &mut report).await;
    installation.end().await?;
    outcome.map(|()| report)
}

async fn measure_both(
    installation: &Installation,
    signer: &TokenSigner,
    pairs: usize,
    time: Duration,
    report: &mut Report,
) -> Outcome<()> {
    insert_accounts(installation).await?;
    publish_events(installation, signer).await?;
    sign_in_for(installation, Duration::from_secs(1)).await?; // warm-up
    let ours = async || sign_in_for(installation, time).await;
    let runs = Pairs::run("sign-ins", pairs, async || raw_rate(time).await, ours).await?;
    report.add("Argon2id alone", "/s", runs.raws);
    report.add(&format!("sign-ins, {CLIENTS} clients"), "/s", runs.ours);
    report.add("sign-ins, ratio", "", runs.ratios);
    let (mut alone, mut busy, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 1..=pairs {
        let quiet = page_p99(installation, time, pair).await?;
        let (loaded, signed_in) =
            tokio::join!(page_p99(installation, time, pair + pairs), sign_in_for(installation, time));
        let (loaded, rate) = (loaded?, signed_in?);
        eprintln!("feed page: pair {pair} of {pairs}: p99 {quiet:.1} ms, {loaded:.1} ms during {rate:.0} sign-ins/s");
        alone.push(quiet);
        busy.push(loaded);
        ratios.push(loaded / quiet);
    }
    report.add("feed page alone, p99", "ms", alone);
    report.add(&format!("feed page while {CLIENTS} clients sign in, p99"), "ms", busy);
    report.add("feed page, ratio", "", ratios);
    Ok(())
}

/// Hashes per second on all cores, each with memory that is reused.
async fn raw_rate(time: Duration) -> Outcome<f64> {
    let cores = std::thread::available_parallelism()?.get();
    let hash_until_end = move || -> u64 {
        let params = Params::default();
        let mut memory = vec![Block::default(); params.block_count()];
        let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        let (began, mut hash, mut count) = (Instant::now(), [0; 32], 0);
        while began.elapsed() < time {
            let done = argon2.hash_password_into_with_memory(PASSWORD.as_bytes(), &[7; 16], &mut hash, &mut memory);
            count += u64::from(done.is_ok());
        }
        count
    };
    let began = Instant::now();
    let tasks: Vec<_> = (0..cores).map(|_| tokio::task::spawn_blocking(hash_until_end)).collect();
    let mut count = 0;
    for task in tasks {
        count += task.await?;
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// Sign-ins per second, each client one after the other.
async fn sign_in_for(installation: &Installation, time: Duration) -> Outcome<f64> {
    let mut posters = Vec::new();
    for _ in 0..CLIENTS {
        posters.push(Poster::connect(&installation.server.address, "").await?);
    }
    let began = Instant::now();
    let client = |(number, poster)| tokio::spawn(sign_in_until(poster, number, began + time));
    let tasks: Vec<_> = posters.into_iter().enumerate().map(client).collect();
    let mut count = 0;
    for task in tasks {
        count += task.await??;
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

async fn sign_in_until(mut poster: Poster, number: usize, until: Instant) -> Outcome<u64> {
    let body = json!({"email": address(number), "password": PASSWORD}).to_string();
    let mut count = 0;
    while Instant::now() < until {
        let (status, answer) = poster.send_with("POST", "/identity/v1/login", "", &body).await?;
        if status != 200 {
            return Err(format!("login: {status}: {}", String::from_utf8_lossy(answer)).into());
        }
        count += 1;
    }
    Ok(count)
}

/// The p99 of a page in milliseconds. Each page is requested once, so that none is cached.
async fn page_p99(installation: &Installation, time: Duration, run: usize) -> Outcome<f64> {
    let mut connection = Connection::open(&installation.server.address).await?;
    let (began, mut times) = (Instant::now(), Vec::new());
    while began.elapsed() < time {
        let sent_at = Instant::now();
        let number = times.len();
        connection.get(&format!("/event/v1/events?to=90{run:02}-01-01T00:00:00.{number:06}Z")).await?;
        times.push(sent_at.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() * 99 / 100])
}

fn address(number: usize) -> String {
    format!("user{number}@example.org")
}

/// One account for each client, all with the same password.
async fn insert_accounts(installation: &Installation) -> Outcome<()> {
    let hash = Argon2::default().hash_password(PASSWORD.as_bytes()).map_err(|error| error.to_string())?;
    let addresses: Vec<String> = (0..CLIENTS).map(address).collect();
    sqlx::query(
        "insert into pillarbox_identity.account
             (id, email, name, locale, password_hash, verified_at, created_at, updated_at)
         select gen_random_uuid(), address, 'User', 'en', $2, now(), now(), now() from unnest($1::text[]) as address",
    )
    .bind(addresses)
    .bind(hash.to_string())
    .execute(&installation.site.db)
    .await?;
    Ok(())
}

async fn publish_events(installation: &Installation, signer: &TokenSigner) -> Outcome<()> {
    let token = signer.sign(Uuid::new_v4(), None, Clock::system().now(), TOKEN_TIME)?;
    let mut poster = Poster::connect(&installation.server.address, &token).await?;
    for number in 0..EVENTS {
        let event = json!({
            "title": format!("Event {number}"),
            "city": "Zürich",
            "category": "tech",
            "start_time": "2090-03-01T18:00:00Z",
            "end_time": "2090-03-01T21:00:00Z",
            "time_zone": "Europe/Zurich",
        });
        let (status, answer) = poster.send_with("POST", "/event/v1/events", "", &event.to_string()).await?;
        if status != 201 {
            return Err(format!("create an event: {status}: {}", String::from_utf8_lossy(answer)).into());
        }
        let created: serde_json::Value = serde_json::from_slice(answer)?;
        let id = created["id"].as_str().ok_or("an event without an id")?.to_owned();
        let (status, _) = poster.send_with("POST", &format!("/event/v1/events/{id}/publish"), "", "").await?;
        if status != 200 {
            return Err(format!("publish an event: {status}").into());
        }
    }
    Ok(())
}
