//! Mistakes on the broker, with `bus = "rabbitmq"`: the queue of the joins service is deleted, replaced or unbound while events
//! are published. No event must be missing in joins a minute later, without an operator.

use std::time::{Duration, Instant};

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use sqlx::PgPool;
use uuid::Uuid;

use super::client::{Client, Request, Tally};
use super::finding::{Finding, Measured};
use super::lab::{ATTACKER_IP, BYSTANDER_IP, Lab, Running, Setting, publish_event};
use crate::Outcome;
use crate::installation::Site;

const QUEUE: &str = "pillarbox.joins.events";
const EXCHANGES: [&str; 3] = ["pillarbox.events", "smap.events", "notifications.exchange"];
const TOPICS: [&str; 6] =
    ["event.published", "event.updated", "event.unpublished", "event.canceled", "event.versions", "event.restated"];
/// Within this time after the last publication, joins must know every event.
const REPAIR_TIME_MAX: Duration = Duration::from_secs(60);
const ORGANIZERS: u128 = 4;

/// What happens to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    Deleted,
    /// Deleted, and declared again as a classic queue whose messages expire at once.
    Replaced,
    Unbound,
}

/// The queue is deleted, again and again.
pub(super) async fn queue_deleted(setting: Setting<'_>) -> Outcome<Finding> {
    mistake(setting, "queue-deleted", Mistake::Deleted).await
}

/// The queue is replaced once by a classic one whose messages expire after a millisecond.
pub(super) async fn queue_replaced(setting: Setting<'_>) -> Outcome<Finding> {
    mistake(setting, "queue-replaced", Mistake::Replaced).await
}

/// The bindings of the queue are removed, again and again.
pub(super) async fn bindings_removed(setting: Setting<'_>) -> Outcome<Finding> {
    mistake(setting, "bindings-removed", Mistake::Unbound).await
}

async fn mistake(setting: Setting<'_>, name: &str, mistake: Mistake) -> Outcome<Finding> {
    let amqp_url = std::env::var("PBX_TEST_AMQP_URL").map_err(|_| "PBX_TEST_AMQP_URL is not set: run `make bench`")?;
    let connection = Connection::connect(&amqp_url, ConnectionProperties::default()).await?;
    delete(&connection.create_channel().await?).await?;
    let site = Site::new(setting.pillarbox).await?;
    let lab = Lab::start_on(site, setting, "bus = \"rabbitmq\"\n", &["--amqp-url", &amqp_url]).await?;
    wait_for_queue(&connection).await?;
    let person = lab.person().await?;
    lab.measure(name, &person, async |lab, running| {
        let organizers = (0..ORGANIZERS).map(|n| {
            let client = lab.user_token(Uuid::from_u128(0x6666_0000 + n)).map(|token| lab.client(&token, ATTACKER_IP));
            publish_until(client, running.clone())
        });
        let publishing = futures_util::future::try_join_all(organizers);
        let (published, ()) = tokio::try_join!(publishing, make_mistakes(&connection, mistake, &running))?;
        let published = published.concat();
        let began = Instant::now();
        let mut missing = missing_in_joins(lab.db(), &published).await?;
        while missing > 0 && began.elapsed() < REPAIR_TIME_MAX {
            show_readiness(&lab.client("", BYSTANDER_IP), &running.answers).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            missing = missing_in_joins(lab.db(), &published).await?;
        }
        let mut measured = vec![
            Measured::new("events published", published.len() as f64, "events"),
            Measured::new("events that joins does not know", missing as f64, "events").at_most(0.0),
            Measured::new("waited until joins knew them, at most a minute", began.elapsed().as_secs_f64(), "s"),
        ];
        if mistake == Mistake::Replaced {
            // Its arguments stay wrong until an operator deletes it.
            let reported = wait_until_reported(&lab.client("", BYSTANDER_IP)).await;
            measured
                .push(Measured::new("/readyz names the replaced queue", f64::from(reported), "times").at_least(1.0));
        }
        Ok(measured)
    })
    .await
}

/// Publishes events, one after the other. Returns those that were accepted.
async fn publish_until(client: Outcome<Client>, running: Running) -> Outcome<Vec<Uuid>> {
    let (client, mut published) = (client?, Vec::new());
    while Instant::now() < running.until {
        match publish_event(&client, "A concert").await {
            Ok(id) => {
                published.push(id.parse()?);
                running.answers.add("published");
            }
            Err(_) => running.answers.add("not published"),
        }
    }
    Ok(published)
}

/// Makes the mistake at a quarter, a half and three quarters of the time.
async fn make_mistakes(connection: &Connection, mistake: Mistake, running: &Running) -> Outcome<()> {
    let quarter = running.until.saturating_duration_since(Instant::now()) / 4;
    for round in 0..3 {
        tokio::time::sleep(quarter).await;
        match mistake {
            Mistake::Deleted => delete(&connection.create_channel().await?).await?,
            Mistake::Replaced if round == 0 => replace(connection).await?,
            Mistake::Replaced => {}
            Mistake::Unbound => unbind(&connection.create_channel().await?).await?,
        }
    }
    Ok(())
}

async fn delete(channel: &Channel) -> Outcome<()> {
    channel.queue_delete(QUEUE.into(), QueueDeleteOptions::default()).await?;
    Ok(())
}

/// The server may declare its queue first: then it is deleted again.
async fn replace(connection: &Connection) -> Outcome<()> {
    let mut result = Ok(());
    for _ in 0..100 {
        let channel = connection.create_channel().await?;
        delete(&channel).await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-message-ttl".into(), AMQPValue::LongInt(1));
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        result = channel.queue_declare(QUEUE.into(), options, arguments).await.map(drop);
        if result.is_ok() {
            return Ok(());
        }
    }
    Ok(result?)
}

async fn unbind(channel: &Channel) -> Outcome<()> {
    for (exchange, topic) in EXCHANGES.iter().flat_map(|exchange| TOPICS.map(|topic| (*exchange, topic))) {
        channel.queue_unbind(QUEUE.into(), exchange.into(), topic.into(), FieldTable::default()).await?;
    }
    Ok(())
}

async fn wait_for_queue(connection: &Connection) -> Outcome<()> {
    for _ in 0..300 {
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        let channel = connection.create_channel().await?;
        if channel.queue_declare(QUEUE.into(), options, FieldTable::default()).await.is_ok() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(format!("the server did not declare the queue {QUEUE}").into())
}

/// Counts what `/readyz` says.
async fn show_readiness(client: &Client, answers: &Tally) {
    let answer = client.send(&Request::get("/readyz")).await;
    let status = answer.ok().and_then(|answer| serde_json::from_slice::<serde_json::Value>(&answer.body).ok());
    let status = status.and_then(|body| body["status"].as_str().map(str::to_owned));
    answers.add(format!("readyz: {}", status.as_deref().unwrap_or("no answer")));
}

/// Whether `/readyz` says within a minute that the server is not ready because of the queue.
async fn wait_until_reported(client: &Client) -> bool {
    let began = Instant::now();
    while began.elapsed() < REPAIR_TIME_MAX {
        let answer = client.send(&Request::get("/readyz")).await;
        if answer.is_ok_and(|answer| answer.status == 503 && String::from_utf8_lossy(&answer.body).contains(QUEUE)) {
            return true;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    false
}

async fn missing_in_joins(db: &PgPool, published: &[Uuid]) -> Outcome<i64> {
    let query = "select count(*) from unnest($1::uuid[]) as published (id)
                 left join pillarbox_joins.event_capacity on event_id = published.id and status = 'published'
                 where event_id is null";
    Ok(sqlx::query_scalar(query).bind(published).fetch_one(db).await?)
}
