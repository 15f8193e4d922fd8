//! Messages in the queue of a subscription that no relay of the installation has published.

use std::sync::Arc;

use contracts::EventId;
use lapin::ExchangeKind;
use pillarbox::consumers::{Handler, HandlerFuture, StartAt, Subscription};
use pillarbox::log::{Message, MessagePattern};
use relay::{Broker, IntakeQueue, RelaySettings};
use runtime::secret::{MasterKey, Secret};
use serde_json::json;
use server::migrations;
use sqlx::{PgPool, Postgres, Transaction};
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::consumers::support::{Process, fast_options};
use crate::relay::broker_client::{BrokerClient, Received};
use crate::relay::support::{TIMEOUT, relay_to, signer_of};

/// Records the tenant and the number of each message.
struct Recorder;

impl Handler for Recorder {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let insert = "insert into recorded (tenant, number) values ($1, $2::text::bigint)";
            sqlx::query(insert).bind(&message.tenant).bind(message.payload.get()).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

/// A database with a relay, and another one whose consumer `c` receives its messages over the broker.
struct Installation {
    vhost: TestVhost,
    amqp: BrokerClient,
    publishing: TestDatabase,
    relay: TestApp,
    receiving: TestDatabase,
    process: Process,
}

const QUEUE: &str = "pillarbox.c";

impl Installation {
    /// `sources`: those of the subscription. `change`: changes the settings of the consumer.
    async fn start(sources: &[&str], change: impl FnOnce(&mut RelaySettings)) -> Installation {
        let (publishing, receiving) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
        let vhost = TestVhost::new().await;
        let amqp = BrokerClient::connect(&vhost).await;
        amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
        amqp.queue("copy", "pillarbox.events", "test.#").await;
        let relay = TestApp::start_with(&publishing, relay_to(&vhost)).await;
        create_table(receiving.pool()).await;
        let process = Process::idle(receiving.pool());
        let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
        let mut settings = relay.settings.relay.clone();
        change(&mut settings);
        let sources = sources.iter().map(|&source| source.to_owned()).collect();
        let subscription = recording("c", MessagePattern { sources, ..MessagePattern::topic("test.#") });
        relay::bus::subscribe(&process.runtime, &settings, &broker, &signer_of(&relay), subscription);
        amqp.wait_for_consumer_queue("c").await;
        amqp.bind(QUEUE, "pillarbox.events", "test.#").await; // the process creates the same binding
        Installation { vhost, amqp, publishing, relay, receiving, process }
    }

    /// Posts a message of the tenant `acme` and returns the copy that RabbitMQ received.
    async fn post(&self, number: i64) -> Received {
        post(self.publishing.pool(), number).await;
        self.amqp.consume("copy", 1).await.remove(0)
    }

    async fn wait_for_numbers(&self, expected: &[i64]) {
        wait_for(self.receiving.pool(), expected).await;
    }

    async fn wait_for_dead_letters(&self, count: i64) {
        eventually("the dead letters exist", TIMEOUT, async || {
            let query = "select count(*) from pillarbox.dead_letter where consumer = 'amqp:pillarbox.c'
                         and last_error like 'the message has no valid signature%'";
            let found: i64 = sqlx::query_scalar(query).fetch_one(self.receiving.pool()).await.unwrap();
            if found == count { Ok(()) } else { Err(found) }
        })
        .await;
    }

    async fn stop(self) {
        self.process.stop().await;
        self.relay.stop().await;
    }
}

fn recording(consumer: &'static str, matching: MessagePattern) -> Subscription {
    let (start, handler, options) = (StartAt::Beginning, Arc::new(Recorder), fast_options());
    Subscription { consumer: consumer.into(), matching, start, handler, options }
}

async fn create_table(db: &PgPool) {
    sqlx::query("create table recorded (tenant text, number bigint)").execute(db).await.unwrap();
}

async fn post(db: &PgPool, number: i64) {
    let post = "select pillarbox.post('test.posted', to_json($1::bigint), key => 'k', tenant => 'acme')";
    sqlx::query(post).bind(number).execute(db).await.unwrap();
}

async fn wait_for(db: &PgPool, expected: &[i64]) {
    eventually("the effects exist", TIMEOUT, async || {
        let query = "select number from recorded order by number";
        let found: Vec<i64> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
        if found == expected { Ok(()) } else { Err(found) }
    })
    .await;
}

/// An envelope as a stranger can write it.
fn envelope(id: Uuid, number: i64) -> Vec<u8> {
    let body = json!({"event_id": EventId(id), "event_type": "test.posted", "timestamp": "2026-01-01T00:00:00Z",
        "schema_version": 1, "payload": number});
    body.to_string().into_bytes()
}

#[tokio::test]
async fn only_a_signed_message_is_believed_to_be_a_services() {
    let here = Installation::start(&["sql"], |_| {}).await;
    let genuine = here.post(1).await;
    here.wait_for_numbers(&[1]).await;
    let changed = |change: &dyn Fn(&mut Received)| {
        let mut copy = genuine.clone();
        change(&mut copy);
        copy
    };
    let header = |name: &'static str, value: &'static str| {
        changed(&|copy| drop(copy.headers.insert(name.to_owned(), value.to_owned())))
    };
    let event_id = |copy: &Received| copy.body["event_id"].as_str().unwrap().to_owned();
    let new_id = EventId(Uuid::now_v7()).to_string();
    let without = |name: &'static str| changed(&|copy| drop(copy.headers.remove(name)));
    let forged = [
        ("no signature", without("pillarbox-signature")),
        ("neither signature nor source", {
            let mut copy = without("pillarbox-signature");
            copy.headers.remove("pillarbox-source");
            copy
        }),
        ("an invented signature", header("pillarbox-signature", "v1,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")),
        ("another body", changed(&|copy| *copy.body_bytes.last_mut().unwrap() = b' ')),
        ("another payload", {
            let replaced = |text: &[u8]| String::from_utf8_lossy(text).replace("\"payload\":1", "\"payload\":2");
            changed(&|copy| copy.body_bytes = replaced(&copy.body_bytes).into_bytes())
        }),
        ("another event id", {
            let replaced =
                |copy: &Received| String::from_utf8_lossy(&copy.body_bytes).replace(&event_id(copy), &new_id);
            changed(&|copy| copy.body_bytes = replaced(copy).into_bytes())
        }),
        ("another message id", changed(&|copy| copy.message_id.clone_from(&new_id))),
        ("another type", changed(&|copy| "test.other".clone_into(&mut copy.kind))),
        ("another source", header("pillarbox-source", "events")),
        ("another tenant", header("pillarbox-tenant", "main")),
        ("another key", header("pillarbox-key", "other")),
        ("no key", without("pillarbox-key")),
    ];
    for (_, copy) in &forged {
        here.amqp.publish_copy(QUEUE, copy).await;
    }
    // Another installation that uses the same broker signs with another key.
    let elsewhere = TestDatabase::new(&migrations()).await;
    let stranger = TestApp::start_with(&elsewhere, |settings| {
        relay_to(&here.vhost)(settings);
        settings.secret_key = Some(Secret::new(MasterKey::generate().to_base64()));
    })
    .await;
    post(elsewhere.pool(), 3).await;
    here.wait_for_dead_letters(forged.len() as i64 + 1).await;
    here.amqp.consume("copy", 1).await; // the stranger's
    // The genuine message again: it is accepted, and it is a repeat.
    here.amqp.publish_copy(QUEUE, &genuine).await;
    here.post(4).await;
    here.wait_for_numbers(&[1, 4]).await;
    here.wait_for_dead_letters(forged.len() as i64 + 1).await;
    let tenants: Vec<String> =
        sqlx::query_scalar("select tenant from recorded").fetch_all(here.receiving.pool()).await.unwrap();
    assert_eq!(tenants, ["acme", "acme"]);
    stranger.stop().await;
    here.stop().await;
}

#[tokio::test]
async fn a_strangers_id_does_not_suppress_a_signed_message() {
    // The subscription accepts all sources, so a stranger's message takes effect as well.
    let here = Installation::start(&[], |_| {}).await;
    let mut tx = here.publishing.pool().begin().await.unwrap();
    let post = "select pillarbox.post('test.posted', '1', key => 'k', tenant => 'acme')";
    let id: Uuid = sqlx::query_scalar(post).fetch_one(&mut *tx).await.unwrap();
    let id_text = EventId(id).to_string();
    // The stranger knows the id before the message is published, and pretends to be the service.
    let headers = [("pillarbox-source", "sql"), ("pillarbox-tenant", "acme"), ("pillarbox-key", "k")];
    for message_id in [id_text.as_str(), &format!("signed sql {id_text}")] {
        let body = envelope(if message_id == id_text { id } else { Uuid::now_v7() }, 2);
        here.amqp.publish_with_headers(QUEUE, Some(message_id), Some("test.posted"), &headers, &body).await;
    }
    here.wait_for_numbers(&[2, 2]).await;
    tx.commit().await.unwrap();
    here.wait_for_numbers(&[1, 2, 2]).await;
    let query = "select tenant from recorded order by number";
    let tenants: Vec<String> = sqlx::query_scalar(query).fetch_all(here.receiving.pool()).await.unwrap();
    assert_eq!(tenants, ["acme", "main", "main"], "a stranger does not choose its tenant");
    here.stop().await;
}

#[tokio::test]
async fn an_id_from_one_queue_suppresses_no_message_from_elsewhere() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp) = (database.pool(), BrokerClient::connect(&vhost).await);
    create_table(db).await;
    let process = Process::idle(db);
    let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
    for queue in ["orders", "returns"] {
        amqp.queue(queue, "", "").await;
        relay::start_intake(&process.runtime, &IntakeQueue::new(queue), &broker);
    }
    // One consumer of all sources: its inbox knows only the id of a message.
    process.runtime.subscribe(&recording("c", MessagePattern::topic("test.#")));
    let mut tx = db.begin().await.unwrap();
    let id: Uuid = sqlx::query_scalar("select pillarbox.post('test.posted', '1')").fetch_one(&mut *tx).await.unwrap();
    amqp.publish("orders", Some("a"), None, None, &envelope(id, 2)).await;
    wait_for(db, &[2]).await;
    amqp.publish("returns", Some("a"), None, None, &envelope(id, 3)).await;
    amqp.publish("orders", Some("b"), None, None, &envelope(id, 4)).await; // a repeat within its queue
    amqp.publish("orders", Some("c"), None, None, &envelope(Uuid::now_v7(), 5)).await;
    tx.commit().await.unwrap();
    wait_for(db, &[1, 2, 3, 5]).await;
    process.stop().await;
}
