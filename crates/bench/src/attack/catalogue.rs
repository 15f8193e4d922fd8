//! Attacks on the catalogue of event types, by a tenant with a key of the role `manage`. During the attack another
//! tenant posts events and lists its subscribers.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use super::client::{Client, Request};
use super::finding::{Finding, Measured};
use super::lab::{ATTACKER_IP, BYSTANDER_IP, Lab, Running, Setting};
use super::seeded::Seeded;
use crate::Outcome;
use crate::hub::receiver::Receiver;

pub(super) const TENANT: &str = "attacker";
/// Another tenant that posts in SQL.
const CUSTOMER: &str = "customer";
/// How much longer another tenant waits for its answers.
const P99_RATIO_MAX: f64 = 3.0;
/// How much longer a post in SQL may take because its type has a schema.
pub(super) const SQL_RATIO_MAX: f64 = 3.0;
/// Connections over which a flood of posts in SQL arrives.
const FLOODING: u32 = 4;
/// The time from another tenant's post in SQL to its webhook, beside the flood.
const DELIVERY_MS_MAX: f64 = 500.0;
/// A webhook that does not arrive in this time is not awaited any longer.
const DELIVERY_WAIT_MAX: Duration = Duration::from_secs(30);
/// The pause between two posts of the other tenant.
const CUSTOMER_PAUSE: Duration = Duration::from_millis(100);

/// Compares two versions over and over. The old one is `anyOf` of 150 lists, the new one `anyOf` of 123 patterns; each list
/// but the last matches the last pattern only, so that all pairs are compared, and the last list none, so that the version is
/// refused and nothing changes. Both requests are below 64 KB. Refusing the schemas is as good as comparing them quickly.
pub(super) async fn compare_versions(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, attacker) = attacked(setting).await?;
    let old: Vec<Value> =
        (0..150).map(|n| json!({"enum": [if n < 149 { format!("v{n}") } else { "-".to_owned() }]})).collect();
    let slow = (0..122).map(|n| json!({"pattern": format!(r"\W{{77}}{n}")}));
    let new: Vec<Value> = slow.chain([json!({"pattern": "^v"})]).collect();
    let neighbour = lab.neighbour().await?.within(P99_RATIO_MAX);
    lab.measure("compare-versions", &neighbour, async |_, running| {
        let created = new_type("compared", &json!({"anyOf": old}), &[]);
        running.answers.add_answer(&attacker.send(&created).await);
        let version = Request::post("/hub/v1/event-types/compared/versions", json!({"schema": {"anyOf": new}}));
        running.flood(&attacker, 2, move |_| version.clone()).await?;
        Ok(Vec::new())
    })
    .await
}

/// Defines a type whose 38 patterns are slow to search, with an example of 60 KB that none of them matches. The type is
/// refused, so the request can be repeated without end.
pub(super) async fn slow_example(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, attacker) = attacked(setting).await?;
    let patterns: Vec<Value> = (0..38).map(|n| json!({"pattern": format!("[ab]*a[ab]{{240}}{n}")})).collect();
    let example = Seeded::new(1).text("ab", 60_000);
    let created = new_type("searched", &json!({"anyOf": patterns}), &[json!(example)]);
    let neighbour = lab.neighbour().await?.within(P99_RATIO_MAX);
    lab.measure("slow-example", &neighbour, async |_, running| {
        running.flood(&attacker, 2, move |_| created.clone()).await?;
        Ok(Vec::new())
    })
    .await
}

/// Defines a type whose items have `dependentRequired` with 7,200 keys, each of which is looked up in each item, and posts
/// lists of 7,000 objects over 12 connections. An optimising compiler removes the lookups in empty objects, so each has a
/// property. A first post with an empty list has the schema compiled: payloads of this size are then checked where they arrive.
pub(super) async fn dependent_required(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, attacker) = attacked(setting).await?;
    // Three characters each, so that the schema has less than 64 KB.
    let keys: serde_json::Map<String, Value> = (0..7_200).map(|n| (short_name(n), json!([]))).collect();
    let created = new_type("dependent", &json!({"items": {"dependentRequired": keys}}), &[]);
    let payload = format!(r#"[{}{{"":0}}]"#, r#"{"":0},"#.repeat(7_000));
    let event =
        |payload: &str| Request::post("/hub/v1/events", format!(r#"{{"event_type":"dependent","payload":{payload}}}"#));
    let (first, large) = (event("[]"), event(&payload));
    let neighbour = lab.neighbour().await?.within(P99_RATIO_MAX);
    lab.measure("dependent-required", &neighbour, async |_, running| {
        running.answers.add_answer(&attacker.send(&created).await);
        running.answers.add_answer(&attacker.send(&first).await);
        running.flood(&attacker, 12, move |_| large.clone()).await?;
        Ok(Vec::new())
    })
    .await
}

/// Imports 150 types with 39 patterns each, which need much memory when they are compiled, and posts batches with an event of
/// each type. No event is valid: rejected ones also compile the schemas. Then posts single events of all types, in case
/// the batch was refused.
pub(super) async fn compiled_memory(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, attacker) = attacked(setting).await?;
    let types: Vec<Value> = (0..150)
        .map(|n| {
            let patterns: Vec<Value> = (0..39).map(|at| json!({"pattern": format!(r"\W{{246}}{n}x{at}")})).collect();
            json!({"name": format!("large.t{n}"), "versions": [{"version": 1, "schema": {"anyOf": patterns}}]})
        })
        .collect();
    let event = |n: u64| json!({"event_type": format!("large.t{n}"), "payload": "-"});
    let batch = Request::post("/hub/v1/events/batch", json!({"events": (0..150).map(event).collect::<Vec<_>>()}));
    let neighbour = lab.neighbour().await?.within(P99_RATIO_MAX);
    lab.measure("compiled-memory", &neighbour, async |_, running| {
        for part in types.chunks(50) {
            let import = Request::with_body("PUT", "/hub/v1/catalogue/file", json!({"event_types": part}));
            running.answers.add_answer(&attacker.send(&import).await);
        }
        running.answers.add_answer(&attacker.send(&batch).await);
        running.flood(&attacker, 4, move |number| Request::post("/hub/v1/events", event(number % 150))).await?;
        Ok(Vec::new())
    })
    .await
}

/// Defines a type whose items are `anyOf` of 991 constants, and posts lists in SQL: the time of the producer's transaction,
/// compared with that of the same payload with a type that has no schema. Then posts such lists over four connections until the
/// end: the time until an event that another tenant posts in SQL arrives at its subscriber, before and beside this flood.
pub(super) async fn posts_in_sql(setting: Setting<'_>) -> Outcome<Finding> {
    let lab = Lab::start(setting, "[hub]\nallowed_networks = [\"127.0.0.0/8\"]\n").await?;
    let attacker = lab.client(&lab.create_tenant(TENANT).await?, ATTACKER_IP);
    let constants: Vec<Value> = (0..990).map(|n| json!({"const": n})).collect();
    let created = new_type("checked", &json!({"items": {"anyOf": constants}}), &[]);
    let (receiver, producer) = (Receiver::start().await?, connect_as_producer(&lab, FLOODING + 1).await?);
    let customer = lab.client(&lab.create_tenant(CUSTOMER).await?, BYSTANDER_IP);
    let subscriber = json!({"name": "orders", "url": receiver.url("/0"), "event_types": ["*"]});
    customer.expect(&Request::post("/hub/v1/subscribers", subscriber)).await?;
    let neighbour = lab.neighbour().await?.within(P99_RATIO_MAX);
    lab.measure("posts-in-sql", &neighbour, async |_, running| {
        let mut measured = Vec::new();
        let alone = deliveries_ms(&producer, &receiver, 1..=20, running.until).await?;
        measured.push(Measured::new("from a post in SQL to its webhook, p50 alone", percentile(alone, 50), "ms"));
        running.answers.add_answer(&attacker.send(&created).await);
        // The last of the constants is the only one that matches, so all are compared.
        let payload = |bytes: usize| format!("[{}989]", "989,".repeat(bytes / 4));
        for bytes in [4_000, 40_000] {
            let payload = payload(bytes);
            let unchecked = post_times(&producer, "unchecked", &payload, &running).await;
            let checked = post_times(&producer, "checked", &payload, &running).await;
            let what = format!("a post of {} KB in SQL", bytes / 1_000);
            measured.push(Measured::new(format!("{what}, unchecked"), unchecked * 1e3, "ms"));
            measured.push(Measured::new(format!("{what}, with a schema"), checked * 1e3, "ms"));
            measured.push(Measured::new(format!("{what}, ratio"), checked / unchecked, "times").at_most(SQL_RATIO_MAX));
        }
        let large = payload(40_000);
        let flood = futures_util::future::join_all((0..FLOODING).map(|_| flood(&producer, &large, &running)));
        let (beside, posted) = tokio::join!(deliveries_ms(&producer, &receiver, 21..=u64::MAX, running.until), flood);
        let beside = beside?;
        measured.push(Measured::new("posts of the flood", posted.iter().sum::<u32>().into(), "posts").at_least(100.0));
        measured.push(Measured::new("deliveries beside the flood", beside.len() as f64, "webhooks").at_least(5.0));
        let p99 = percentile(beside, 99);
        measured.push(Measured::new("from a post in SQL to its webhook, p99", p99, "ms").at_most(DELIVERY_MS_MAX));
        Ok(measured)
    })
    .await
}

/// Two tenants import files with costly schemas over 24 connections each.
pub(super) async fn parallel_imports(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, first) = attacked(setting).await?;
    let second = lab.client(&lab.create_tenant("accomplice").await?, ATTACKER_IP);
    let patterns: Vec<Value> = (0..39).map(|at| json!({"pattern": format!(r"\W{{240}}{at}")})).collect();
    let types: Vec<Value> = (0..100)
        .map(|n| json!({"name": format!("imported.t{n}"), "versions": [{"version": 1, "schema": {"anyOf": patterns}}]}))
        .collect();
    let import = Request::with_body("PUT", "/hub/v1/catalogue/file?dry_run=true", json!({"event_types": types}));
    let neighbour = lab.neighbour().await?.within(P99_RATIO_MAX);
    lab.measure("parallel-imports", &neighbour, async |_, running| {
        let again = import.clone();
        let (one, other) = tokio::join!(
            running.flood(&first, 24, move |_| import.clone()),
            running.flood(&second, 24, move |_| again.clone())
        );
        one.and(other).map(|()| Vec::new())
    })
    .await
}

/// A server, and a client with a key of the attacking tenant.
pub(super) async fn attacked(setting: Setting<'_>) -> Outcome<(Lab, Client)> {
    let lab = Lab::start(setting, "").await?;
    let key = lab.create_tenant(TENANT).await?;
    let attacker = lab.client(&key, ATTACKER_IP);
    Ok((lab, attacker))
}

pub(super) fn new_type(name: &str, schema: &Value, examples: &[Value]) -> Request {
    Request::post("/hub/v1/event-types", json!({"name": name, "schema": schema, "examples": examples}))
}

/// Three characters that are different for each number below 17,576.
fn short_name(number: usize) -> String {
    let letter = |digit: usize| char::from(b'A' + (digit % 26) as u8);
    [number / 676, number / 26, number].into_iter().map(letter).collect()
}

/// Connections of a role that may only post.
pub(super) async fn connect_as_producer(lab: &Lab, connections: u32) -> Outcome<PgPool> {
    let role = format!("producer_{}", uuid::Uuid::new_v4().simple());
    let statements = format!(
        "create role {role} login password '{role}' in role pillarbox_producer;
         alter role {role} set statement_timeout = '60s'"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(lab.db()).await?;
    let (_, after) = lab.database_url().split_once('@').ok_or("the address of the database has no user")?;
    Ok(PgPoolOptions::new().max_connections(connections).connect(&format!("postgres://{role}:{role}@{after}")).await?)
}

/// The median time of a post in SQL in seconds.
async fn post_times(producer: &PgPool, topic: &str, payload: &str, running: &Running) -> f64 {
    const POSTS_MAX: usize = 21;
    const TIME_MAX: Duration = Duration::from_secs(20);
    let (began, mut times) = (Instant::now(), Vec::new());
    while times.len() < POSTS_MAX && began.elapsed() < TIME_MAX {
        times.push(post_time(producer, TENANT, topic, payload, running).await);
    }
    percentile(times, 50)
}

/// The time of a post in SQL in seconds. One that PostgreSQL refuses or cancels counts with its time.
pub(super) async fn post_time(producer: &PgPool, tenant: &str, topic: &str, payload: &str, running: &Running) -> f64 {
    let posted_at = Instant::now();
    let posted = post(producer, tenant, topic, payload).await;
    let time = posted_at.elapsed().as_secs_f64();
    running.answers.add(if posted.is_ok() { "posted" } else { "not posted" });
    time
}

async fn post(producer: &PgPool, tenant: &str, topic: &str, payload: &str) -> Outcome<()> {
    let posting = sqlx::query("select pillarbox.post($1, $2::text, tenant => $3)");
    posting.bind(topic).bind(payload).bind(tenant).execute(producer).await?;
    Ok(())
}

/// Posts the same payload over one connection until the end. Returns how often.
async fn flood(producer: &PgPool, payload: &str, running: &Running) -> u32 {
    let mut posts = 0;
    while Instant::now() < running.until {
        post_time(producer, TENANT, "checked", payload, running).await;
        posts += 1;
    }
    posts
}

/// Posts events of the other tenant in SQL, one after the other, until the end. Returns the times until their webhooks arrived.
async fn deliveries_ms(
    producer: &PgPool,
    receiver: &Receiver,
    numbers: impl Iterator<Item = u64>,
    until: Instant,
) -> Outcome<Vec<f64>> {
    let mut times = Vec::new();
    for number in numbers {
        if Instant::now() >= until {
            break;
        }
        let posted_at = Instant::now();
        post(producer, CUSTOMER, "order.paid", &format!(r#"{{"n":{number}}}"#)).await?;
        let arrival = loop {
            match receiver.arrival(number) {
                Some(at) => break at.saturating_duration_since(posted_at),
                None if posted_at.elapsed() > DELIVERY_WAIT_MAX => break DELIVERY_WAIT_MAX,
                None => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        };
        times.push(arrival.as_secs_f64() * 1e3);
        tokio::time::sleep(CUSTOMER_PAUSE).await;
    }
    Ok(times)
}

/// Some percentile of the values; 0 without any.
fn percentile(mut values: Vec<f64>, percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() * percent / 100).copied().unwrap_or(0.0)
}
