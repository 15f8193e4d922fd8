//! Consumers whose messages come over the broker.

use std::sync::Arc;
use std::time::Duration;

use kit::clock::Clock;
use kit::health::Health;
use kit::secret::Secret;
use lapin::ExchangeKind;
use mailbox::cursor::Start;
use mailbox::database::migrations;
use mailbox::filter::Matching;
use mailbox::handler::{Handler, Handling};
use mailbox::log::Message;
use mailbox::replica::Replica;
use mailbox::runtime::{Rhythm, Runtime, Subscription};
use relay::{Broker, IntakeQueue};
use serde_json::json;
use sqlx::{Postgres, Transaction};
use testkit::{TestApp, TestDatabase, TestVhost, drain};
use tokio_util::sync::CancellationToken;

use crate::broker::Outside;
use crate::relaying::{PATIENCE, post, relaying};

/// The same handler on both buses.
struct Doubled;

impl Handler for Doubled {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            let number: i64 = message.payload.get().parse()?;
            if number < 0 {
                return Err("negative".into());
            }
            let insert = "insert into doubled (key, number) values ($1, $2)";
            sqlx::query(insert).bind(message.key.as_deref()).bind(number * 2).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

fn doubling() -> Subscription {
    let matching = Matching { sources: vec!["sql".to_owned()], ..Matching::topic("test.#") };
    Subscription { consumer: "doubling", matching, start: Start::Beginning, handler: Arc::new(Doubled) }
}

#[tokio::test]
async fn the_same_handler_works_over_the_broker_with_a_database_of_its_own() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let vhost = TestVhost::new().await;
    let app = TestApp::start_with(&here, relaying(&vhost)).await;
    let mut rhythm = Rhythm::default();
    rhythm.lane.retry.first = Duration::from_millis(20);
    let mut consumers = Vec::new();
    for (database, over_the_broker) in [(&here, false), (&there, true), (&there, true)] {
        sqlx::query(
            "create table if not exists doubled (n bigint generated always as identity, key text, number bigint)",
        )
        .execute(database.pool())
        .await
        .unwrap();
        let (stop, replica) = (CancellationToken::new(), Replica::new("test", Duration::from_secs(2)));
        let runtime =
            Runtime::start(database.pool().clone(), Clock::system(), replica, Health::default(), stop.clone());
        match over_the_broker {
            false => runtime.subscribe(&doubling(), rhythm),
            true => {
                let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
                relay::bus::subscribe(&runtime, &app.settings.relay, &broker, doubling(), rhythm);
            }
        }
        consumers.push((runtime, stop));
    }
    let outside = Outside::of(&vhost).await;
    outside.until_listening("doubling").await;
    for number in 0..100 {
        post(here.pool(), "test.posted", Some(&format!("key{}", number % 5)), number).await;
    }
    sqlx::query("select pillarbox.post('test.posted', '-1', key => 'bad')").execute(here.pool()).await.unwrap();
    let found = async |database: &TestDatabase| -> Vec<(String, i64)> {
        let query = "select key, number from doubled order by key, n";
        sqlx::query_as(query).fetch_all(database.pool()).await.unwrap()
    };
    for database in [&here, &there] {
        drain("all effects", PATIENCE, async || match found(database).await.len() {
            100 => Ok(()),
            other => Err(other),
        })
        .await;
        drain("the dead letter", PATIENCE, async || {
            let query = "select count(*) from pillarbox.dead_letter where consumer = 'doubling'";
            sqlx::query_scalar::<_, i64>(query).fetch_one(database.pool()).await.unwrap() == 1
        })
        .await;
    }
    assert_eq!(found(&here).await, found(&there).await, "the same, in the same order for each key");
    // What died here is mirrored to the broker; there, nothing relays.
    let dead = outside.take("pillarbox.doubling.dlq", 1).await;
    assert_eq!(
        (&dead[0].body["payload"]["payload"], &dead[0].body["payload"]["error"]),
        (&json!(-1), &json!("negative"))
    );

    // The broker delivers it all again, as it may: nothing happens.
    let again: Vec<(uuid::Uuid, String, String)> = sqlx::query_as(
        "select message_id, key, payload::text from pillarbox.log where source = 'sql' and topic = 'test.posted'",
    )
    .fetch_all(here.pool())
    .await
    .unwrap();
    for (id, key, payload) in &again {
        let body = json!({"event_id": format!("evt_{id}"), "event_type": "test.posted", "timestamp": "2026-01-01T00:00:00Z",
            "schema_version": 1, "payload": payload.parse::<i64>().unwrap()});
        // Under another message id, so that only the event's own can tell.
        outside
            .publish("pillarbox.doubling", Some(&format!("other {id}")), None, Some(key), body.to_string().as_bytes())
            .await;
    }
    post(here.pool(), "test.posted", Some("last"), 1_000).await;
    drain("the last", PATIENCE, async || found(&there).await.iter().any(|(key, _)| key == "last")).await;
    assert_eq!(found(&there).await.len(), 101, "each once");
    for (runtime, stop) in consumers {
        stop.cancel();
        runtime.ended().await;
    }
    app.stop().await;
}

/// Notes whose each message is.
struct Owners;

impl Handler for Owners {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> Handling<'t> {
        Box::pin(async move {
            let insert = "insert into owned (tenant, number) values ($1, $2::text::bigint)";
            sqlx::query(insert).bind(&message.tenant).bind(message.payload.get()).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_message_stays_its_tenants_over_the_broker_and_a_strangers_word_counts_for_nothing() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let vhost = TestVhost::new().await;
    let outside = Outside::of(&vhost).await;
    outside.exchange("pillarbox.events", ExchangeKind::Topic).await;
    outside.queue("copy", "pillarbox.events", "test.#").await;
    outside.queue("orders", "", "").await;
    let mut orders = IntakeQueue::new("orders");
    orders.tenant = "shop".parse().unwrap();
    let app = TestApp::start_with(&here, |settings| {
        relaying(&vhost)(settings);
        settings.relay.intake = vec![orders];
    })
    .await;
    sqlx::query("create table owned (tenant text, number bigint)").execute(there.pool()).await.unwrap();
    let (stop, replica) = (CancellationToken::new(), Replica::new("test", Duration::from_secs(2)));
    let runtime = Runtime::start(there.pool().clone(), Clock::system(), replica, Health::default(), stop.clone());
    let matching = Matching { sources: vec!["sql".to_owned()], ..Matching::topic("test.#") };
    let owners = Subscription { consumer: "owners", matching, start: Start::Beginning, handler: Arc::new(Owners) };
    let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
    relay::bus::subscribe(&runtime, &app.settings.relay, &broker, owners, Rhythm::default());
    outside.until_listening("owners").await;
    outside.bind("pillarbox.owners", "pillarbox.events", "test.#").await; // as it will be in a moment

    let post = "select pillarbox.post('test.posted', to_json($1::bigint), key => 'k', tenant => $2)";
    let tenants = ["acme", "main", "globex"];
    for (number, tenant) in tenants.iter().enumerate() {
        sqlx::query(post).bind(number as i64).bind(tenant).execute(here.pool()).await.unwrap();
    }
    let mut copies = outside.take("copy", 3).await;
    copies.sort_by_key(|copy| copy.body["payload"].as_u64());
    let carried: Vec<&str> = copies.iter().map(|copy| copy.headers["pillarbox-tenant"].as_str()).collect();
    assert_eq!(carried, tenants, "for whoever reads the broker");
    drain("and for who reads it into a database of its own", PATIENCE, async || {
        let query = "select tenant from owned order by number";
        let found: Vec<String> = sqlx::query_scalar(query).fetch_all(there.pool()).await.unwrap();
        if found == tenants { Ok(()) } else { Err(found) }
    })
    .await;

    // In a queue of the user's the header is anybody's: whose the messages are is what the settings say.
    outside
        .publish_with_headers("orders", Some("1"), Some("order.placed"), &[("pillarbox-tenant", "acme")], b"1")
        .await;
    let tenant: String = drain("it is in the log", PATIENCE, async || {
        let query = "select tenant from pillarbox.log where source = 'amqp:orders'";
        sqlx::query_scalar(query).fetch_optional(here.pool()).await.unwrap()
    })
    .await;
    assert_eq!(tenant, "shop");
    stop.cancel();
    runtime.ended().await;
    app.stop().await;
}
