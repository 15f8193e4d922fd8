//! A server with tenants and users for one attack, and the measurement beside the attack.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use http_kit::auth::TokenSigner;
use runtime::clock::Clock;
use runtime::secret::MasterKey;
use serde_json::json;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::bystander::{Bystander, Latencies};
use super::client::{Client, Request, Tally};
use super::finding::{Finding, Measured, Memory};
use crate::Outcome;
use crate::installation::{Installation, Site};

const WARM_UP: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(5);
/// Between the end of the attack and the last measurement of the memory.
const CALM: Duration = Duration::from_secs(3);
/// A server that does not stop in this time is killed.
const STOP_TIME_MAX: Duration = Duration::from_secs(30);
const TOKEN_TIME: Duration = Duration::from_secs(3600);
const MIB: f64 = 1024.0 * 1024.0;

/// Where the requests of the bystander begin, and those of the attacker: other networks.
pub(super) const BYSTANDER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
pub(super) const ATTACKER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 66, 6, 6));

/// How an attack is run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting<'s> {
    pub(super) pillarbox: &'s Path,
    pub(super) time: Duration,
}

/// A server that is attacked.
pub(super) struct Lab {
    installation: Installation,
    admin: Client,
    signer: TokenSigner,
    time: Duration,
}

/// What a running attack needs. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Running {
    pub(super) until: Instant,
    pub(super) answers: Tally,
}

impl Lab {
    /// Starts a server with the shipped settings, and `more` of them.
    pub(super) async fn start(setting: Setting<'_>, more: &str) -> Outcome<Lab> {
        let site = Site::new(setting.pillarbox).await?;
        Lab::start_on(site, setting, more, &[]).await
    }

    /// The same on a database that is filled already, with more arguments of `serve`.
    pub(super) async fn start_on(site: Site, setting: Setting<'_>, more: &str, args: &[&str]) -> Outcome<Lab> {
        let (key, admin_key) = (MasterKey::generate(), format!("pbx_{}", Uuid::new_v4().simple()));
        let settings = format!("admin_key = \"{admin_key}\"\nsecret_key = \"{}\"\n{more}", key.to_base64());
        let installation = site.serve(setting.pillarbox, &settings, args).await?;
        let admin = Client::new(&installation.server.address, &admin_key, BYSTANDER_IP);
        Ok(Lab { installation, admin, signer: TokenSigner::new(&key), time: setting.time })
    }

    pub(super) fn address(&self) -> &str {
        &self.installation.server.address
    }

    pub(super) fn db(&self) -> &PgPool {
        &self.installation.site.db
    }

    /// The address of the database.
    pub(super) fn database_url(&self) -> &str {
        &self.installation.site.url
    }

    /// A client with a bearer token; without one it is a stranger.
    pub(super) fn client(&self, token: &str, from: IpAddr) -> Client {
        Client::new(self.address(), token, from)
    }

    /// Creates a tenant. Returns a key with the role `manage` of it.
    pub(super) async fn create_tenant(&self, name: &str) -> Outcome<String> {
        self.admin.expect(&Request::post("/admin/v1/tenants", json!({"name": name}))).await?;
        self.create_key(name, "manage").await
    }

    pub(super) async fn create_key(&self, tenant: &str, role: &str) -> Outcome<String> {
        let body = json!({"name": role, "role": role, "tenant": tenant});
        let made = self.admin.expect(&Request::post("/admin/v1/keys", body)).await?;
        Ok(made["key"].as_str().ok_or("no key")?.to_owned())
    }

    /// A token of a user.
    pub(super) fn user_token(&self, user: Uuid) -> Outcome<String> {
        Ok(self.signer.sign(user, None, Clock::system().now(), TOKEN_TIME)?)
    }

    /// A neighbour: another tenant that posts events of a type with a schema, small ones and large ones, lists its subscribers, and
    /// asks whether the server is healthy.
    pub(super) async fn neighbour(&self) -> Outcome<Bystander> {
        let client = self.client(&self.create_tenant("neighbour").await?, BYSTANDER_IP);
        let numbers = json!({"type": "array", "items": {"type": "integer", "minimum": 0}});
        let schema = json!({"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}, "numbers": numbers}});
        let created = json!({"name": "neighbour.posted", "schema": schema});
        client.expect(&Request::post("/hub/v1/event-types", created)).await?;
        let event =
            |numbers: Vec<u32>| json!({"event_type": "neighbour.posted", "payload": {"id": 17, "numbers": numbers}});
        // A payload of more than 16 KB is checked on the threads that compute what all tenants ask of the catalogue.
        let (small, large) = (event(vec![1, 2, 3]), event((0..5_000).collect()));
        Ok(Bystander::new(client, move |number| match number % 4 {
            0 => Request::post("/hub/v1/events", &small),
            1 => Request::get("/hub/v1/subscribers"),
            2 => Request::post("/hub/v1/events", &large),
            _ => Request::get("/healthz"),
        }))
    }

    /// A signed-in person who shows an event, reads their inbox and registrations, and creates drafts.
    pub(super) async fn person(&self) -> Outcome<Bystander> {
        let client = self.client(&self.user_token(Uuid::from_u128(1))?, BYSTANDER_IP);
        let event = publish_event(&client, "A concert").await?;
        Ok(Bystander::new(client, move |number| match number % 4 {
            0 => Request::get(format!("/event/v1/events/{event}")),
            1 => Request::get("/notify/v1/inbox"),
            2 => Request::get("/join/v1/me/joins"),
            _ => new_event("A draft"),
        }))
    }

    /// Measures the bystander alone, then beside the attack, and stops the server. The attack returns what it has measured
    /// itself; it may take a little longer than [`Running::until`].
    pub(super) async fn measure(
        self,
        attack: &str,
        bystander: &Bystander,
        run: impl AsyncFnOnce(&Lab, Running) -> Outcome<Vec<Measured>>,
    ) -> Outcome<Finding> {
        let measured = self.measure_both(attack, bystander, run).await;
        let log_end = self.installation.log_end();
        if tokio::time::timeout(STOP_TIME_MAX, self.installation.end()).await.is_err() {
            eprintln!("{attack}: the server did not stop in {} s and was killed", STOP_TIME_MAX.as_secs());
        }
        let mut finding = measured.map_err(|error| match log_end {
            Ok(log) => format!("{attack}: {error}; the server logged\n{log}").into(),
            Err(_) => error,
        })?;
        finding.judge();
        Ok(finding)
    }

    async fn measure_both(
        &self,
        attack: &str,
        bystander: &Bystander,
        run: impl AsyncFnOnce(&Lab, Running) -> Outcome<Vec<Measured>>,
    ) -> Outcome<Finding> {
        self.watch_for(bystander, WARM_UP).await?;
        let idle = self.watch_for(bystander, IDLE).await?;
        let server = &self.installation.server;
        let before_mib = server.rss_bytes()? as f64 / MIB;
        server.reset_rss_bytes_peak();
        let (stop, answers) = (CancellationToken::new(), Tally::default());
        let watching = bystander.watch(stop.clone());
        let began = Instant::now();
        let measured = run(self, Running { until: began + self.time, answers: answers.clone() }).await;
        // The bystander is measured for the whole time, also if the attacker is refused early.
        tokio::time::sleep_until((began + self.time).into()).await;
        stop.cancel();
        let attacked = watching.await?;
        tokio::time::sleep(CALM).await;
        let (peak_mib, after_mib) = (server.rss_bytes_peak()? as f64 / MIB, server.rss_bytes()? as f64 / MIB);
        let mut measured = measured?;
        if let Some(ratio_max) = bystander.ratio_max() {
            let ratio = attacked.p99_ms / idle.p99_ms;
            measured.push(Measured::new("p99 of the bystander, compared with idle", ratio, "times").at_most(ratio_max));
        }
        Ok(Finding {
            attack: attack.to_owned(),
            idle,
            attacked,
            answers: answers.counts(),
            memory: Memory { before_mib, peak_mib, after_mib },
            measured,
            missed: Vec::new(),
        })
    }

    async fn watch_for(&self, bystander: &Bystander, time: Duration) -> Outcome<Latencies> {
        let stop = CancellationToken::new();
        let watching = bystander.watch(stop.clone());
        tokio::time::sleep(time).await;
        stop.cancel();
        watching.await
    }
}

/// Creates and publishes an event. Returns its id.
pub(super) async fn publish_event(organizer: &Client, title: &str) -> Outcome<String> {
    let created = organizer.expect(&new_event(title)).await?;
    let id = created["id"].as_str().ok_or("an event without an id")?.to_owned();
    organizer.expect(&Request::post(format!("/event/v1/events/{id}/publish"), "")).await?;
    Ok(id)
}

fn new_event(title: &str) -> Request {
    let event = json!({
        "title": title,
        "city": "Zürich",
        "category": "tech",
        "start_time": "2090-03-01T18:00:00Z",
        "end_time": "2090-03-01T21:00:00Z",
        "time_zone": "Europe/Zurich",
    });
    Request::post("/event/v1/events", event)
}

impl Running {
    /// Sends requests over `connections` connections, one after the other on each, until the attack ends. `request` gets a
    /// number that is used once.
    pub(super) async fn flood(
        &self,
        client: &Client,
        connections: u64,
        request: impl Fn(u64) -> Request + Clone + Send + 'static,
    ) -> Outcome<()> {
        let tasks: Vec<_> = (0..connections)
            .map(|first| {
                let (running, client, request) = (self.clone(), client.clone(), request.clone());
                tokio::spawn(async move {
                    let mut number = first;
                    while Instant::now() < running.until {
                        let answer = client.send(&request(number)).await;
                        running.answers.add_answer(&answer);
                        if answer.is_err() {
                            tokio::time::sleep(Duration::from_millis(100)).await;
                        }
                        number += connections;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await?;
        }
        Ok(())
    }
}
