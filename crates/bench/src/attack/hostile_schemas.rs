//! Types with hostile schemas: each keyword of JSON Schema as often as the server accepts it, and payloads that make it work.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use self::hostile::{APPLICATORS, Largest, keywords, payloads, placed};
use super::catalogue::{SQL_RATIO_MAX, TENANT, attacked, connect_as_producer, new_type, post_time};
use super::client::{Client, Request};
use super::finding::{Finding, Measured};
use super::lab::{ATTACKER_IP, Setting};
use crate::Outcome;

// The generator of the tests of the catalogue.
#[path = "../../../hub/src/event_types/schema/hostile.rs"]
mod hostile;

/// How much longer another tenant waits for its answers.
const P99_RATIO_MAX: f64 = 3.0;
/// Connections that register types, and that post events.
const REGISTERING: u64 = 2;
const POSTING: u64 = 4;

/// Registers a type for each keyword and place, again and again, posts each payload to each of them over HTTP, and posts the
/// payloads in SQL: the time of the producer's transaction, compared with that of the same payload with a type that has no schema.
pub(super) async fn hostile_schemas(setting: Setting<'_>) -> Outcome<Finding> {
    let (lab, attacker) = attacked(setting).await?;
    // How often a keyword is accepted is found out as another tenant, whose catalogue is not attacked.
    let prober = lab.client(&lab.create_tenant("prober").await?, ATTACKER_IP);
    let mut types = Vec::new();
    for (at, (_, schema)) in keywords().into_iter().enumerate() {
        let count = largest(&prober, |count| placed(APPLICATORS[2].1, schema(count))).await?;
        for (place, (_, applicator)) in APPLICATORS.iter().enumerate() {
            types.push((format!("hostile.t{at}p{place}"), placed(*applicator, schema(count))));
        }
    }
    let registrations: Arc<[Request]> = types.iter().map(|(name, schema)| new_type(name, schema, &[])).collect();
    let payloads: Vec<String> = payloads().iter().map(Value::to_string).collect();
    let names: Arc<[String]> = types.into_iter().map(|(name, _)| name).collect();
    let producer = connect_as_producer(&lab, 1).await?;
    let neighbour = lab.neighbour().await?.within(P99_RATIO_MAX);
    lab.measure("hostile-schemas", &neighbour, async |_, running| {
        let register = move |number: u64| registrations[number as usize % registrations.len()].clone();
        let (posted_names, bodies): (_, Arc<[String]>) = (names.clone(), payloads.clone().into());
        let post = move |number: u64| {
            let (name, payload) = pair(number as usize, &posted_names, &bodies);
            Request::post("/hub/v1/events", format!(r#"{{"event_type":"{name}","payload":{payload}}}"#))
        };
        let posts_in_sql = async {
            let mut ratios = Vec::new();
            while Instant::now() < running.until {
                let (name, payload) = pair(ratios.len(), &names, &payloads);
                let unchecked = post_time(&producer, TENANT, "unchecked", payload, &running).await;
                ratios.push(post_time(&producer, TENANT, name, payload, &running).await / unchecked);
            }
            Ok(ratios)
        };
        let ((), (), mut ratios) = tokio::try_join!(
            running.flood(&attacker, REGISTERING, register),
            running.flood(&attacker, POSTING, post),
            posts_in_sql
        )?;
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios[ratios.len() / 2];
        Ok(vec![
            Measured::new("pairs of posts in SQL", ratios.len() as f64, "pairs").at_least(10.0),
            Measured::new("a post in SQL, ratio", ratio, "times").at_most(SQL_RATIO_MAX),
        ])
    })
    .await
}

/// A type and a payload. All pairs occur, and the next number has another type and another payload.
fn pair<'a>(number: usize, names: &'a [String], payloads: &'a [String]) -> (&'a str, &'a str) {
    let payload = number + number / (names.len() * payloads.len());
    (&names[number % names.len()], &payloads[(payload + number / names.len()) % payloads.len()])
}

/// The largest number for which the server accepts the schema.
async fn largest(client: &Client, schema: impl Fn(usize) -> Value) -> Outcome<usize> {
    let mut largest = Largest::new();
    while let Some(number) = largest.next() {
        let body = json!({"event_types": [{"name": "probe", "versions": [{"version": 1, "schema": schema(number)}]}]});
        let dry_run = Request::with_body("PUT", "/hub/v1/catalogue/file?dry_run=true", body);
        let is_accepted = loop {
            match client.send(&dry_run).await?.status {
                200 => break true,
                413 | 422 => break false,
                503 => {}
                other => return Err(format!("the import of a schema was answered with {other}").into()),
            }
        };
        largest.tried(number, is_accepted);
    }
    Ok(largest.found())
}
