//! Support for tests of the relay: settings, messages and the state of routes.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use pillarbox::log::{Post, Source};
use relay::{MessageSigner, Route};
use runtime::secret::{MasterKey, Secret, digest};
use serde_json::json;
use serde_json::value::to_raw_value;
use server::settings::{Role, Settings};
use sqlx::PgPool;
use testkit::{TestApp, TestVhost, eventually};

use crate::relay::broker_client::Received;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Settings of a process that relays to the vhost without an initial delay.
pub(crate) fn relay_to(vhost: &TestVhost) -> impl Fn(&mut Settings) + use<> {
    relay_to_url(vhost.amqp_url())
}

fn relay_to_url(amqp_url: String) -> impl Fn(&mut Settings) {
    move |settings| {
        settings.secret_key = Some(Secret::new(installation_key(&amqp_url).to_base64()));
        settings.amqp_url = Some(Secret::new(amqp_url.clone()));
        settings.relay.initial_delay_ms = 0;
        settings.relay.enable_routes = vec!["notifications".to_owned(), "email".to_owned()];
        settings.roles = vec![Role::Api, Role::Relay];
        settings.pool_max = 12;
        settings.lease_ms = 2_000;
    }
}

/// The secret key of the installation that uses a vhost. All of its databases have the same, because services accept only
/// messages that are signed with it.
pub(crate) fn installation_key(amqp_url: &str) -> MasterKey {
    let (_, vhost) = amqp_url.rsplit_once('/').unwrap();
    MasterKey::from_bytes(digest(vhost))
}

/// Signs and verifies as the processes of the same installation do.
pub(crate) fn signer_of(app: &TestApp) -> MessageSigner {
    MessageSigner::new(&[app.settings.master_key_given().unwrap().unwrap()])
}

/// Settings with a single route, for the topics under `test`.
pub(crate) fn one_route(vhost: &TestVhost) -> impl Fn(&mut Settings) + use<> {
    one_route_to(vhost.amqp_url())
}

/// The same for the broker of a URL.
pub(crate) fn one_route_to(amqp_url: String) -> impl Fn(&mut Settings) {
    move |settings| {
        relay_to_url(amqp_url.clone())(settings);
        settings.relay.routes =
            vec![Route { topics: vec!["test.#".to_owned()], ..Route::new("test", "test.exchange") }];
    }
}

/// Waits until a process has registered a route: the first routes of an installation publish what is posted from then on.
pub(crate) async fn wait_until_registered(db: &PgPool, consumer: &str) {
    let query = "select exists (select from pillarbox.position where consumer = $1)";
    eventually("the route is registered", TIMEOUT, async || {
        sqlx::query_scalar::<_, bool>(query).bind(consumer).fetch_one(db).await.unwrap()
    })
    .await;
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

/// Posts a message as the code of this source does, in a transaction of its own.
pub(crate) async fn post_from(db: &PgPool, source: &'static str, message: &Post) {
    let mut tx = db.begin().await.unwrap();
    pillarbox::log::post(&mut tx, &Source::new(source), message).await.unwrap();
    tx.commit().await.unwrap();
}

/// A message with a number as its payload.
pub(crate) fn numbered(topic: &str, key: Option<&str>, number: usize) -> Post {
    Post { key: key.map(str::to_owned), ..Post::new(topic, to_raw_value(&json!(number)).unwrap()) }
}

/// The statuses of all messages with this topic for a consumer, in the order of the log.
pub(crate) async fn statuses(db: &PgPool, consumer: &str, topic: &str) -> Vec<String> {
    let query =
        "select status from pillarbox.outbox_status where consumer = $1 and event_type = $2 order by created_at";
    sqlx::query_scalar(query).bind(consumer).bind(topic).fetch_all(db).await.unwrap()
}

/// The numbers of each key, in the order of the first copy of each message.
pub(crate) fn first_copies(received: &[Received]) -> HashMap<String, Vec<u64>> {
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

/// Returns `Ok` if the consumer has sent all of its messages, and otherwise the number of those that are not sent.
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

/// The number of parked messages that have failed, and the number of all parked messages.
pub(crate) async fn parked(db: &PgPool) -> (i64, i64) {
    sqlx::query_as("select count(*) filter (where attempts > 0), count(*) from pillarbox.parked")
        .fetch_one(db)
        .await
        .unwrap()
}
