//! A relay on a vhost of the test's own: what several tests need of it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use kit::secret::Secret;
use pillarbox::settings::{Role, Settings};
use relay::Route;
use sqlx::PgPool;
use testkit::TestVhost;

use crate::broker::Received;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Relays to the vhost, and begins at once.
pub(crate) fn relaying(vhost: &TestVhost) -> impl Fn(&mut Settings) + use<> {
    relaying_to(vhost.amqp_url())
}

fn relaying_to(amqp_url: String) -> impl Fn(&mut Settings) {
    move |settings| {
        settings.amqp_url = Some(Secret::new(amqp_url.clone()));
        settings.relay.initial_delay_ms = 0;
        settings.roles = vec![Role::Api, Role::Relay];
        settings.pool_max = 12;
        settings.lease_ms = 2_000;
    }
}

/// One route for everything under `test`.
pub(crate) fn one_route(vhost: &TestVhost) -> impl Fn(&mut Settings) + use<> {
    one_route_to(vhost.amqp_url())
}

/// The same, to a broker of any kind.
pub(crate) fn one_route_to(amqp_url: String) -> impl Fn(&mut Settings) {
    move |settings| {
        relaying_to(amqp_url.clone())(settings);
        settings.relay.routes =
            vec![Route { topics: vec!["test.#".to_owned()], ..Route::new("test", "test.exchange") }];
    }
}

pub(crate) async fn post(db: &PgPool, topic: &str, key: Option<&str>, number: usize) {
    sqlx::query("select pillarbox.post($1, to_json($2::bigint), key => $3)")
        .bind(topic)
        .bind(number as i64)
        .bind(key)
        .execute(db)
        .await
        .unwrap();
}

/// The numbers of each key in the order of their first appearance.
pub(crate) fn firsts(received: &[Received]) -> HashMap<String, Vec<u64>> {
    let mut seen = HashSet::new();
    let mut by_key: HashMap<String, Vec<u64>> = HashMap::new();
    for message in received.iter().filter(|message| seen.insert(&message.message_id)) {
        let key = message.headers.get("pillarbox-key").cloned().unwrap_or_default();
        by_key.entry(key).or_default().push(message.body["payload"].as_u64().unwrap());
    }
    by_key
}

pub(crate) fn distinct(received: &[Received]) -> usize {
    received.iter().map(|message| &message.message_id).collect::<HashSet<_>>().len()
}

/// Whether everything that was posted for this consumer is sent.
pub(crate) async fn relayed(db: &PgPool, consumer: &str) -> Result<(), i64> {
    let waiting: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.outbox_status where consumer = $1 and status <> 'sent'")
            .bind(consumer)
            .fetch_one(db)
            .await
            .unwrap();
    let known: bool = sqlx::query_scalar("select exists (select from pillarbox.position where consumer = $1)")
        .bind(consumer)
        .fetch_one(db)
        .await
        .unwrap();
    if waiting == 0 && known { Ok(()) } else { Err(waiting) }
}

/// How many have failed, and how many are parked in all.
pub(crate) async fn parked(db: &PgPool) -> (i64, i64) {
    sqlx::query_as("select count(*) filter (where attempts > 0), count(*) from pillarbox.parked")
        .fetch_one(db)
        .await
        .unwrap()
}
