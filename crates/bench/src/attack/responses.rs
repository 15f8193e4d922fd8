//! Attacks with responses that the server has to make and the client barely reads, and with places that a client occupies.

use std::time::Instant;

use serde_json::json;
use sqlx::PgPool;
use uuid::Uuid;

use super::bystander::Bystander;
use super::client::{Client, Request};
use super::finding::{Finding, Measured};
use super::lab::{ATTACKER_IP, BYSTANDER_IP, Lab, Setting};
use super::slow_readers::{SlowReader, read_slowly};
use crate::Outcome;

const TENANT: &str = "attacker";
const ATTACKER: Uuid = Uuid::from_u128(0x6666_0000);
/// Notifications in the attacker's inbox. Each has about 100 KB of text.
const LARGE_NOTIFICATIONS: i64 = 200;
const UNREAD: i64 = 200_000;

/// 100 streams of one account begin at the first of 200 notifications of 100 KB each, and read nothing.
pub(super) async fn inbox_streams(setting: Setting<'_>) -> Outcome<Finding> {
    slow_inbox(setting, "inbox-streams", 100, "/notify/v1/inbox/events?after=0").await
}

/// 300 connections of one account request pages of 10 MB of its inbox, and barely read them.
pub(super) async fn inbox_pages(setting: Setting<'_>) -> Outcome<Finding> {
    slow_inbox(setting, "inbox-pages", 300, "/notify/v1/inbox?limit=100").await
}

async fn slow_inbox(setting: Setting<'_>, name: &str, readers: usize, path: &str) -> Outcome<Finding> {
    let lab = Lab::start(setting, "").await?;
    fill_inbox(lab.db()).await?;
    let reader = SlowReader::new(lab.address(), ATTACKER_IP, ("GET", path, &lab.user_token(ATTACKER)?), "");
    let person = lab.person().await?;
    lab.measure(name, &person, async |_, running| {
        read_slowly(&running, vec![reader; readers]).await?;
        Ok(Vec::new())
    })
    .await
}

/// 50 accounts open 100 streams each, which are idle. The bystander opens streams, too, and closes them at once.
pub(super) async fn streams_of_many_accounts(setting: Setting<'_>) -> Outcome<Finding> {
    let lab = Lab::start(setting, "").await?;
    let mut readers = Vec::new();
    for account in 0..50 {
        let token = lab.user_token(Uuid::from_u128(0x5000_0000 + account))?;
        let reader = SlowReader::new(lab.address(), ATTACKER_IP, ("GET", "/notify/v1/inbox/events", &token), "");
        readers.extend(vec![reader; 100]);
    }
    let client = lab.client(&lab.user_token(Uuid::from_u128(1))?, BYSTANDER_IP);
    let person = Bystander::new(client, |_| Request::get("/notify/v1/inbox/events").head_only());
    lab.measure("streams-of-many-accounts", &person, async |_, running| {
        read_slowly(&running, readers).await?;
        Ok(Vec::new())
    })
    .await
}

/// Three accounts with 200,000 unread notifications each mark all of them as read, and repeat the request if some are left.
pub(super) async fn read_all(setting: Setting<'_>) -> Outcome<Finding> {
    const REQUESTS_MAX: usize = 20;
    let lab = Lab::start(setting, "").await?;
    let accounts: Vec<Uuid> = (0..3).map(|n| Uuid::from_u128(0x7000_0000 + n)).collect();
    fill_unread(lab.db(), &accounts).await?;
    let person = lab.person().await?;
    lab.measure("read-all", &person, async |lab, running| {
        let (mut longest_ms, mut left) = (0.0_f64, 0);
        for account in accounts {
            let client = lab.client(&lab.user_token(account)?, ATTACKER_IP);
            let mut unread = UNREAD;
            for _ in 0..REQUESTS_MAX {
                let sent_at = Instant::now();
                let answer = client.send(&Request::post("/notify/v1/inbox/read", json!({"up_to": UNREAD}))).await;
                longest_ms = longest_ms.max(sent_at.elapsed().as_secs_f64() * 1e3);
                running.answers.add_answer(&answer);
                let state = client.expect(&Request::get("/notify/v1/inbox/unread-count")).await?;
                unread = state["unread_count"].as_i64().ok_or("no count of unread notifications")?;
                if unread == 0 || Instant::now() > running.until {
                    break;
                }
            }
            left += unread;
        }
        let longest = Measured::new("the longest answer", longest_ms, "ms");
        Ok(vec![longest, Measured::new("unread afterwards", left as f64, "notifications").at_most(0.0)])
    })
    .await
}

/// 15 connections export a catalogue of about 38 MB, and barely read it.
pub(super) async fn catalogue_exports(setting: Setting<'_>) -> Outcome<Finding> {
    slow_catalogue(setting, "catalogue-exports", "/hub/v1/catalogue/file").await
}

/// 15 connections request the HTML page of this catalogue, and barely read it.
pub(super) async fn catalogue_pages(setting: Setting<'_>) -> Outcome<Finding> {
    slow_catalogue(setting, "catalogue-pages", "/hub/v1/catalogue/page").await
}

async fn slow_catalogue(setting: Setting<'_>, name: &str, path: &str) -> Outcome<Finding> {
    let lab = Lab::start(setting, "").await?;
    let key = lab.create_tenant(TENANT).await?;
    fill_catalogue(&lab.client(&key, ATTACKER_IP)).await;
    let reader = SlowReader::new(lab.address(), ATTACKER_IP, ("GET", path, &key), "");
    let neighbour = lab.neighbour().await?;
    lab.measure(name, &neighbour, async |_, running| {
        read_slowly(&running, vec![reader; 15]).await?;
        Ok(Vec::new())
    })
    .await
}

/// Imports files until there are 560 types of 68 KB each. A limit of the tenant ends this earlier: what there is will be read.
async fn fill_catalogue(importer: &Client) {
    const TYPES_IN_A_FILE: usize = 14;
    for first in (0..560).step_by(TYPES_IN_A_FILE) {
        let types: Vec<_> = (first..first + TYPES_IN_A_FILE)
            .map(|n| {
                let schema = json!({"description": "d".repeat(60_000)});
                let version = json!({"version": 1, "schema": schema, "examples": ["e".repeat(8_000)]});
                json!({"name": format!("exported.t{n}"), "versions": [version]})
            })
            .collect();
        let import = Request::with_body("PUT", "/hub/v1/catalogue/file", json!({"event_types": types}));
        if importer.expect(&import).await.is_err() {
            break;
        }
    }
}

/// 300 connections pull the same 5 MB of a stream, and barely read them.
pub(super) async fn slow_pulls(setting: Setting<'_>) -> Outcome<Finding> {
    let lab = Lab::start(setting, "").await?;
    let key = lab.create_tenant(TENANT).await?;
    let attacker = lab.client(&key, ATTACKER_IP);
    create_stream(&attacker).await?;
    for _ in 0..22 {
        let event = json!({"event_type": "large.posted", "payload": "p".repeat(250_000)});
        attacker.expect(&Request::post("/hub/v1/events", event)).await?;
    }
    // One reader has all parts of the stream, and gets the same messages until it acknowledges them.
    let pull = json!({"reader": "reader", "max": 100}).to_string();
    let reader = SlowReader::new(lab.address(), ATTACKER_IP, ("POST", "/hub/v1/streams/pulled/pull", &key), &pull);
    let neighbour = lab.neighbour().await?;
    lab.measure("slow-pulls", &neighbour, async |_, running| {
        read_slowly(&running, vec![reader; 300]).await?;
        Ok(Vec::new())
    })
    .await
}

/// 11 portal tokens of one tenant wait with 100 pulls each. The bystander pulls, too, and waits for a tenth of a second.
pub(super) async fn waiting_pulls(setting: Setting<'_>) -> Outcome<Finding> {
    let lab = Lab::start(setting, "").await?;
    let manager = lab.client(&lab.create_tenant(TENANT).await?, ATTACKER_IP);
    create_stream(&manager).await?;
    let mut portals = Vec::new();
    for _ in 0..11 {
        let made = manager.expect(&Request::post("/hub/v1/portal-tokens", json!({"access": "manage"}))).await?;
        let token = made["token"].as_str().ok_or("a portal token without its text")?;
        portals.push(lab.client(token, ATTACKER_IP));
    }
    let neighbour = lab.client(&lab.create_tenant("neighbour").await?, BYSTANDER_IP);
    create_stream(&neighbour).await?;
    let pull = json!({"reader": "reader", "wait_ms": 100});
    let neighbour = Bystander::new(neighbour, move |_| Request::post("/hub/v1/streams/pulled/pull", &pull));
    lab.measure("waiting-pulls", &neighbour, async |_, running| {
        let pull = Request::post("/hub/v1/streams/pulled/pull", json!({"reader": "reader", "wait_ms": 12_000}));
        let waiting = portals.iter().map(|portal| {
            let pull = pull.clone();
            running.flood(portal, 100, move |_| pull.clone())
        });
        futures_util::future::try_join_all(waiting).await?;
        Ok(Vec::new())
    })
    .await
}

async fn create_stream(manager: &Client) -> Outcome<()> {
    let stream = json!({"name": "pulled", "event_types": ["*"]});
    manager.expect(&Request::post("/hub/v1/streams", stream)).await.map(drop)
}

/// Notifications with as much text as the default template shows: 50 fields of 500 characters of 4 bytes.
async fn fill_inbox(db: &PgPool) -> Outcome<()> {
    let fields: serde_json::Map<_, _> = (0..50).map(|n| (format!("field_{n}"), json!("𝕏".repeat(500)))).collect();
    sqlx::query(
        "with event as (
             insert into pillarbox_notify.business_event (id, event_type, payload, at)
             select gen_random_uuid(), 'LARGE', $2::json, now() from generate_series(1, $3::bigint) returning id)
         insert into pillarbox_notify.notification (event_id, user_id, channel, status, seq, created_at)
         select id, $1, 'in_app', 'delivered', row_number() over (), now() from event",
    )
    .bind(ATTACKER)
    .bind(serde_json::Value::Object(fields).to_string())
    .bind(LARGE_NOTIFICATIONS)
    .execute(db)
    .await?;
    count_inbox(db, &[ATTACKER], LARGE_NOTIFICATIONS).await
}

async fn fill_unread(db: &PgPool, accounts: &[Uuid]) -> Outcome<()> {
    sqlx::query(
        "insert into pillarbox_notify.notification (event_id, user_id, channel, status, seq, created_at)
         select gen_random_uuid(), account, 'in_app', 'delivered', n, now()
         from unnest($1::uuid[]) as account, generate_series(1, $2::bigint) as n",
    )
    .bind(accounts)
    .bind(UNREAD)
    .execute(db)
    .await?;
    sqlx::query("vacuum analyze pillarbox_notify.notification").execute(db).await?;
    count_inbox(db, accounts, UNREAD).await
}

async fn count_inbox(db: &PgPool, accounts: &[Uuid], count: i64) -> Outcome<()> {
    let query = "insert into pillarbox_notify.inbox (user_id, last_seq, unread)
                 select account, $2, $2::integer from unnest($1::uuid[]) as account";
    sqlx::query(query).bind(accounts).bind(count).execute(db).await?;
    Ok(())
}
