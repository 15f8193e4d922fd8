//! A database and a server for one part of the measurement, a webhook receiver, and its subscribers.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::{PgPool, Postgres, Transaction};

use super::poster::{Load, Posted, Poster};
use super::receiver::Receiver;
use crate::Outcome;
use crate::costs::Used;
use crate::installation::Installation;

/// A number whose arrival time is not recorded.
pub(super) const UNNOTED: u64 = 999_999_999;
pub(super) const TENANT: &str = "bench";
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// A run without a webhook for this long has failed.
const STUCK_AFTER: Duration = Duration::from_secs(60);

pub(super) struct Fixture {
    installation: Installation,
    pub(super) receiver: Receiver,
    admin_key: String,
    ingest_key: String,
    manage_key: String,
}

impl Fixture {
    /// Starts the real server with these roles.
    pub(super) async fn new(pillarbox: &Path, roles: &str) -> Outcome<Fixture> {
        let admin_key = format!("pbx_{}", uuid::Uuid::new_v4().simple());
        let settings = format!("admin_key = \"{admin_key}\"\n[hub]\nallowed_networks = [\"127.0.0.0/8\"]\n");
        let installation = Installation::start(pillarbox, &settings, &["--roles", roles]).await?;
        let receiver = Receiver::start().await?;
        let (ingest_key, manage_key) = (String::new(), String::new());
        let mut fixture = Fixture { installation, receiver, admin_key, ingest_key, manage_key };
        fixture.request(&fixture.admin_key, "POST", "/admin/v1/tenants", &json!({"name": TENANT})).await?;
        fixture.ingest_key = fixture.create_key("ingest").await?;
        fixture.manage_key = fixture.create_key("manage").await?;
        Ok(fixture)
    }

    pub(super) fn address(&self) -> &str {
        &self.installation.server.address
    }

    /// An admin key of the tenant `main`.
    pub(super) fn admin_key(&self) -> &str {
        &self.admin_key
    }

    pub(super) fn db(&self) -> &PgPool {
        &self.installation.site.db
    }

    async fn create_key(&self, role: &str) -> Outcome<String> {
        let body = json!({"name": role, "role": role, "tenant": TENANT});
        let made = self.request(&self.admin_key, "POST", "/admin/v1/keys", &body).await?;
        Ok(made["key"].as_str().ok_or("no key")?.to_owned())
    }

    async fn request(&self, key: &str, method: &str, path: &str, body: &Value) -> Outcome<Value> {
        let mut poster = Poster::connect(&self.installation.server.address, key).await?;
        match poster.send(method, path, &body.to_string()).await? {
            (200..300, answer) => Ok(serde_json::from_slice(answer).unwrap_or(Value::Null)),
            (status, answer) => Err(format!("{method} {path}: {status}: {}", String::from_utf8_lossy(answer)).into()),
        }
    }

    /// Creates a subscriber for an event type. Returns its id.
    pub(super) async fn subscribe(&self, event_type: &str, path: &str) -> Outcome<String> {
        let url = self.receiver.url(path);
        let body = json!({"name": path, "url": url, "event_types": [event_type]});
        let made = self.request(&self.manage_key, "POST", "/hub/v1/subscribers", &body).await?;
        Ok(made["id"].as_str().ok_or("no id")?.to_owned())
    }

    pub(super) async fn pause(&self, subscriber: &str) -> Outcome<()> {
        let path = format!("/hub/v1/subscribers/{subscriber}/pause");
        self.request(&self.manage_key, "POST", &path, &json!({})).await.map(drop)
    }

    pub(super) async fn resume(&self, subscriber: &str) -> Outcome<()> {
        let path = format!("/hub/v1/subscribers/{subscriber}/resume");
        self.request(&self.manage_key, "POST", &path, &json!({})).await.map(drop)
    }

    /// Requests that events of a type from the last hour are sent again. Returns the path of the replay.
    pub(super) async fn replay(&self, event_type: &str) -> Outcome<String> {
        let from = chrono::Utc::now() - chrono::TimeDelta::hours(1);
        let body = json!({"from": from.to_rfc3339(), "event_types": [event_type]});
        let made = self.request(&self.manage_key, "POST", "/hub/v1/replays", &body).await?;
        Ok(format!("/hub/v1/replays/{}", made["id"].as_str().ok_or("no id")?))
    }

    /// The state of a replay and its counts.
    pub(super) async fn show(&self, path: &str) -> Outcome<Value> {
        self.request(&self.manage_key, "GET", path, &json!({})).await
    }

    /// Cancels a replay, and waits until the messages that it has created are delivered.
    pub(super) async fn cancel(&self, path: &str) -> Outcome<()> {
        self.request(&self.manage_key, "POST", &format!("{path}/cancel"), &json!({})).await?;
        let began = Instant::now();
        while self.show(path).await?["waiting"] != 0 {
            if began.elapsed() > STUCK_AFTER {
                return Err(format!("timeout: {path} has undelivered messages\n{}", self.log_end()?).into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Plain POSTs to the receiver, with the same payload.
    pub(super) fn raw(&self) -> Load {
        Load {
            address: self.receiver.address.clone(),
            path: "/raw",
            token: String::new(),
            body: Arc::new(|_| payload(UNNOTED)),
            status: 200,
            rate_max: None,
        }
    }

    /// Events of a type, one per request, in `lanes` lanes if given.
    pub(super) fn events(&self, event_type: &str, lanes: Option<u64>) -> Load {
        let event_type = event_type.to_owned();
        let body = move |number: u64| {
            let lane = lanes.map_or(String::new(), |lanes| format!(r#","ordering_key":"lane-{}""#, number % lanes));
            format!(r#"{{"event_type":"{event_type}","payload":{}{lane}}}"#, payload(number))
        };
        Load {
            address: self.installation.server.address.clone(),
            path: "/hub/v1/events",
            token: self.ingest_key.clone(),
            body: Arc::new(body),
            status: 202,
            rate_max: None,
        }
    }

    /// Posts `count` events and waits until these endpoints have received all. Returns the deliveries per second.
    pub(super) async fn deliver(&self, load: &Load, count: u64, endpoints: Range<usize>) -> Outcome<(f64, Posted)> {
        let wanted = count * endpoints.len() as u64;
        let (posted, passed) = tokio::try_join!(load.run(count), self.receive(endpoints, wanted))?;
        let ended = passed.last().ok_or("no webhook was expected")?.1;
        Ok((wanted as f64 / (ended - posted.began).as_secs_f64(), posted))
    }

    /// Waits until these endpoints have received `wanted` more webhooks. Returns the counts with their times. Counts from
    /// this call on, not from the first poll of the future: a webhook of a concurrent post may arrive before that poll.
    pub(super) fn receive(
        &self,
        endpoints: Range<usize>,
        wanted: u64,
    ) -> impl Future<Output = Outcome<Vec<(u64, Instant)>>> {
        let before = self.receiver.count(endpoints.clone());
        async move {
            let (mut passed, mut moved_at) = (Vec::new(), Instant::now());
            let mut most = 0;
            while most < wanted {
                tokio::time::sleep(POLL_INTERVAL).await;
                let (count, now) = (self.receiver.count(endpoints.clone()) - before, Instant::now());
                if count > most {
                    (most, moved_at) = (count, now);
                    passed.push((count, now));
                } else if now - moved_at > STUCK_AFTER {
                    return Err(
                        format!("timeout: {count} of {wanted} webhooks were received\n{}", self.log_end()?).into()
                    );
                }
            }
            Ok(passed)
        }
    }

    pub(super) fn log_end(&self) -> Outcome<String> {
        self.installation.log_end()
    }

    pub(super) async fn used(&self) -> Outcome<Used> {
        self.installation.used().await
    }

    /// Starts a transaction whose snapshot prevents vacuum from removing later row versions.
    pub(super) async fn pin(&self) -> Outcome<Transaction<'static, Postgres>> {
        let mut pin = self.db().begin().await?;
        sqlx::query("set transaction isolation level repeatable read").execute(&mut *pin).await?;
        sqlx::query("select pg_current_xact_id()").execute(&mut *pin).await?;
        Ok(pin)
    }

    /// Stops the server and drops the database. Returns the peak memory of the server in MiB.
    pub(super) async fn end(self) -> Outcome<f64> {
        self.installation.end().await
    }
}

/// A payload of 50 bytes that starts with the number.
pub(super) fn payload(number: u64) -> String {
    format!(r#"{{"n":{number},"text":"{:x<1$}"}}"#, "", 34 - number.to_string().len())
}
