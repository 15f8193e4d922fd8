//! Dual publishing: both exchanges receive the same e-mails, and both consumers of an e-mail have one effect.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use contracts::EventId;
use lapin::ExchangeKind;
use relay::{Broker, IntakeFormat, IntakeQueue};
use runtime::secret::Secret;
use server::migrations;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use uuid::Uuid;

use crate::confidential::support::{
    EmailHandler, blank, create_email_table, email, email_subscription, occurrences, post_email, recorded_emails,
};
use crate::consumers::support::{Process, fast_options};
use crate::operator::commands::Cli;
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, relay_to, relayed, signer_of};

/// The old exchange and its queue, as another system has declared them.
pub(crate) async fn declare_old_exchange(amqp: &BrokerClient) {
    amqp.exchange("smtp_send_email_exc", ExchangeKind::Fanout).await;
    amqp.queue("smtp_send_email", "smtp_send_email_exc", "").await;
}

fn old_queue() -> IntakeQueue {
    IntakeQueue { format: IntakeFormat::Email, ..IntakeQueue::new("smtp_send_email") }
}

async fn log_count(db: &PgPool, source: &str) -> i64 {
    let query = "select count(*) from pillarbox.log where source = $1";
    sqlx::query_scalar(query).bind(source).fetch_one(db).await.unwrap()
}

/// Posts e-mails to the database `here`; the consumer reads them in `there`, over the given bus, and from the old queue.
async fn both_consumers_have_one_effect(here: &TestDatabase, there: &TestDatabase, over_the_broker: bool) {
    let vhost = TestVhost::new().await;
    let (amqp, db) = (BrokerClient::connect(&vhost).await, there.pool());
    declare_old_exchange(&amqp).await;
    create_email_table(db).await;
    let app = TestApp::start_with(here, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
        settings.relay.intake = if over_the_broker { Vec::new() } else { vec![old_queue()] };
    })
    .await;
    let mut settings = app.settings.relay.clone();
    settings.intake = vec![old_queue()];
    let (process, broker) = (Process::idle(db), Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap()));
    let subscription = email_subscription(Arc::new(EmailHandler::default()), fast_options());
    match over_the_broker {
        false => {
            amqp.exchange("smap.events", ExchangeKind::Topic).await;
            amqp.queue("others", "smap.events", "email.#").await;
            process.runtime.subscribe(&relay::bus::with_intake_sources(&settings, subscription));
        }
        true => {
            relay::bus::subscribe(&process.runtime, &settings, &broker, &signer_of(&app), subscription);
            // The process that reads the queues relays nothing itself.
            settings.routes.clear();
            settings.enable_dual_publish = false;
            settings.topology = relay::Topology::default();
            relay::start(&process.runtime, &settings, &broker, &signer_of(&app), false);
            amqp.wait_for_queue("smtp_send_email_v2.dlq").await;
            amqp.bind("smtp_send_email_v2", "smap.events", "email.#").await; // the process creates the same binding
        }
    }
    eventually("the legacy route is registered", TIMEOUT, async || relayed(here.pool(), "relay.legacy").await).await;
    let mut posted = BTreeSet::new();
    for number in 0..20 {
        posted.insert(post_email(here.pool(), &email(&format!("u{}", number % 3), "s3cret-both")).await);
    }
    eventually("the old queue is read", TIMEOUT, async || match log_count(db, "amqp:smtp_send_email").await {
        20 => Ok(()),
        found => Err(found),
    })
    .await;
    // A stranger cannot use the id of another e-mail, which would then not be sent.
    let stolen = EventId(*posted.first().unwrap()).to_string();
    amqp.publish("smtp_send_email", Some(&stolen), None, None, br#"{"to": "a@b.example"}"#).await;
    eventually("everything is processed", TIMEOUT, async || {
        let recorded = recorded_emails(db).await;
        let is_read = relayed(db, "notify.mail").await.is_ok() && relayed(here.pool(), "relay.email").await.is_ok();
        if recorded.len() == 21 && is_read { Ok(()) } else { Err(recorded.len()) }
    })
    .await;
    let recorded: BTreeSet<Uuid> = recorded_emails(db).await.into_iter().collect();
    assert_eq!(recorded.len(), 21, "no e-mail twice");
    assert!(posted.is_subset(&recorded), "both copies have the id of the event");
    eventually("the copies are also blanked", TIMEOUT, async || {
        blank(here.pool()).await;
        blank(db).await;
        occurrences(there, "s3cret-both").await + occurrences(here, "s3cret-both").await == 0
    })
    .await;
    process.stop().await;
    app.stop().await;
}

#[tokio::test]
async fn an_email_that_arrives_over_both_exchanges_is_processed_once() {
    let here = TestDatabase::new(&migrations()).await;
    both_consumers_have_one_effect(&here, &here, false).await;
}

#[tokio::test]
async fn an_email_that_arrives_in_both_queues_of_another_database_is_processed_once() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    both_consumers_have_one_effect(&here, &there, true).await;
}

/// Starts the relay, lets it publish for a while, and stops it.
async fn relay_for_a_while(database: &TestDatabase, vhost: &TestVhost, dual: bool) {
    let app = TestApp::start_with(database, |settings| {
        relay_to(vhost)(settings);
        settings.relay.enable_dual_publish = dual;
    })
    .await;
    let published = "select count(*) from pillarbox.position where consumer = 'relay.email' and at > $1";
    let started: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("select clock_timestamp()").fetch_one(database.pool()).await.unwrap();
    eventually("the relay has published some batches", TIMEOUT, async || {
        sqlx::query_scalar::<_, i64>(published).bind(started).fetch_one(database.pool()).await.unwrap() >= 10
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn parity_is_exact_when_dual_publishing_is_on_off_and_on_again_under_load() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let (db, amqp, cli) = (database.pool(), BrokerClient::connect(&vhost).await, Cli::new(&database));
    declare_old_exchange(&amqp).await;
    amqp.exchange("smap.events", ExchangeKind::Topic).await;
    amqp.queue("smtp_send_email_v2", "smap.events", "email.#").await;
    relay_without_load(&database, &vhost, false).await;
    // Posted before dual publishing is first on: the old system has sent these e-mails itself.
    let before = post_email(db, &email("u0", "s3cret")).await;
    relay_without_load(&database, &vhost, false).await;
    relay_without_load(&database, &vhost, true).await;

    let is_over = AtomicBool::new(false);
    let load = async {
        let mut posted = BTreeSet::new();
        while !is_over.load(Ordering::SeqCst) {
            posted.insert(post_email(db, &email(&format!("u{}", posted.len() % 7), "s3cret")).await);
        }
        posted
    };
    let switching = async {
        for dual in [true, false, true] {
            relay_for_a_while(&database, &vhost, dual).await;
        }
        is_over.store(true, Ordering::SeqCst);
    };
    let (posted, ()) = tokio::join!(load, switching);
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.enable_dual_publish = true;
    })
    .await;
    for consumer in ["relay.email", "relay.legacy"] {
        eventually("everything is published", TIMEOUT, async || relayed(db, consumer).await).await;
    }
    let ids = async |queue: &str, count: usize| {
        let mut received = Vec::new();
        amqp.consume_until(queue, &mut received, |received| crate::relay::support::distinct(received) >= count).await;
        let id = |message: &crate::relay::broker_client::Received| message.message_id.parse::<EventId>().unwrap().0;
        received.iter().map(id).collect::<BTreeSet<Uuid>>()
    };
    let legacy = ids("smtp_send_email", posted.len()).await;
    let mut new = ids("smtp_send_email_v2", posted.len() + 1).await;
    assert_eq!(legacy, posted, "the old exchange has everything from the start of dual publishing on");
    assert!(new.remove(&before));
    assert_eq!(new, posted, "the new exchange has everything");
    let output = cli.ok("parity --check --exchanges-only").await;
    let row = |count: usize, states: &str| {
        let words = format!("{count} {states}");
        output.lines().any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").starts_with(&words))
    };
    assert!(row(posted.len(), "sent sent"), "{} in {output}", posted.len());
    assert!(row(1, "sent skipped"), "{output}");
    let metrics = app.anonymous().get("/metrics").await.text;
    assert!(metrics.contains("event_publish_duration_seconds_bucket{route=\"legacy\",le=\"0.1\"}"), "{metrics}");
    app.stop().await;

    // An event that one side lacks is named.
    let missing = post_email(db, &email("u1", "s3cret")).await;
    relay_without_load(&database, &vhost, false).await;
    let (code, out, error) = cli.run("parity --check --exchanges-only").await;
    let expected = format!("{}  new: sent  legacy: pending", EventId(missing));
    assert!(code == Some(1) && error.contains(&expected), "{out}{error}");
    let (_, out, _) = cli.run("parity --json --from 1h").await;
    let lines: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1, "{out}");
    assert_eq!(lines[0]["event_id"], EventId(missing).to_string());
    assert_eq!((&lines[0]["new"], &lines[0]["legacy"]), (&"sent".into(), &"pending".into()));
    cli.ok("parity --check --exchanges-only --from 2h --to 1h").await;
}

/// Starts the relay until it has published everything.
async fn relay_without_load(database: &TestDatabase, vhost: &TestVhost, dual: bool) {
    let app = TestApp::start_with(database, |settings| {
        relay_to(vhost)(settings);
        settings.relay.enable_dual_publish = dual;
    })
    .await;
    let consumer = if dual { "relay.legacy" } else { "relay.email" };
    eventually("everything is published", TIMEOUT, async || relayed(database.pool(), consumer).await).await;
    app.stop().await;
}
