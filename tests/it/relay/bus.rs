//! Consumers that receive their messages from RabbitMQ (bus `rabbitmq`).

use std::sync::Arc;
use std::time::Duration;

use lapin::ExchangeKind;
use pillarbox::consumers::{ConsumerOptions, Handler, HandlerFuture, Replica, Runtime, StartAt, Subscription};
use pillarbox::database::Database;
use pillarbox::log::{Message, MessagePattern};
use relay::{Broker, IntakeQueue};
use runtime::clock::Clock;
use runtime::health::Health;
use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use sqlx::{Postgres, Transaction};
use testkit::{TestApp, TestDatabase, TestVhost, eventually};
use tokio_util::sync::CancellationToken;

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, post, relay_to, signer_of};

/// A handler that runs on both buses.
struct Doubled;

impl Handler for Doubled {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
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
    let matching = MessagePattern { sources: vec!["sql".to_owned()], ..MessagePattern::topic("test.#") };
    let mut options = ConsumerOptions::default();
    options.worker.retry.backoff.first = Duration::from_millis(20);
    Subscription {
        consumer: "doubling".into(),
        matching,
        start: StartAt::Beginning,
        handler: Arc::new(Doubled),
        options,
    }
}

#[tokio::test]
async fn one_handler_has_the_same_effects_on_both_buses() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let vhost = TestVhost::new().await;
    let app = TestApp::start_with(&here, relay_to(&vhost)).await;
    let signer = signer_of(&app);
    let mut consumers = Vec::new();
    for (database, over_the_broker) in [(&here, false), (&there, true), (&there, true)] {
        sqlx::query(
            "create table if not exists doubled (n bigint generated always as identity, key text, number bigint)",
        )
        .execute(database.pool())
        .await
        .unwrap();
        let (stop, replica) = (CancellationToken::new(), Replica::new("test", Duration::from_secs(2)));
        let runtime = Runtime::start(
            Database::new(database.pool().clone()),
            Clock::system(),
            replica,
            Health::default(),
            stop.clone(),
        );
        match over_the_broker {
            false => runtime.subscribe(&doubling()),
            true => {
                let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
                relay::bus::subscribe(&runtime, &app.settings.relay, &broker, &signer, doubling());
            }
        }
        consumers.push((runtime, stop));
    }
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.wait_for_consumer_queue("doubling").await;
    amqp.queue("copy", "pillarbox.events", "test.#").await;
    for number in 0..100 {
        post(here.pool(), "test.posted", Some(&format!("key{}", number % 5)), number).await;
    }
    sqlx::query("select pillarbox.post('test.posted', '-1', key => 'bad')").execute(here.pool()).await.unwrap();
    let found = async |database: &TestDatabase| -> Vec<(String, i64)> {
        let query = "select key, number from doubled order by key, n";
        sqlx::query_as(query).fetch_all(database.pool()).await.unwrap()
    };
    for database in [&here, &there] {
        eventually("all effects exist", TIMEOUT, async || match found(database).await.len() {
            100 => Ok(()),
            other => Err(other),
        })
        .await;
        eventually("the dead letter exists", TIMEOUT, async || {
            let query = "select count(*) from pillarbox.dead_letter where consumer = 'doubling'";
            sqlx::query_scalar::<_, i64>(query).fetch_one(database.pool()).await.unwrap() == 1
        })
        .await;
    }
    assert_eq!(
        found(&here).await,
        found(&there).await,
        "both databases have the same effects in the same order per key"
    );
    // A dead letter of the postgres bus is published to the broker; the other database has no relay.
    let dead = amqp.consume("pillarbox.doubling.dlq", 1).await;
    assert_eq!(
        (&dead[0].body["payload"]["payload"], &dead[0].body["payload"]["error"]),
        (&json!(-1), &json!("negative"))
    );

    // A repetition of all messages has no effect.
    for copy in &amqp.consume("copy", 101).await {
        amqp.publish_copy("pillarbox.doubling", copy).await;
    }
    post(here.pool(), "test.posted", Some("last"), 1_000).await;
    eventually("the last message is processed", TIMEOUT, async || {
        found(&there).await.iter().any(|(key, _)| key == "last")
    })
    .await;
    assert_eq!(found(&there).await.len(), 101, "each message is processed once");
    for (runtime, stop) in consumers {
        stop.cancel();
        runtime.join().await;
    }
    app.stop().await;
}

/// Records the tenant of each message.
struct Owners;

impl Handler for Owners {
    fn handle<'t>(&'t self, tx: &'t mut Transaction<'static, Postgres>, message: &'t Message) -> HandlerFuture<'t> {
        Box::pin(async move {
            let insert = "insert into owned (tenant, number) values ($1, $2::text::bigint)";
            sqlx::query(insert).bind(&message.tenant).bind(message.payload.get()).execute(&mut **tx).await?;
            Ok(())
        })
    }
}

#[tokio::test]
async fn the_tenant_survives_the_broker_and_cannot_be_forged() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let vhost = TestVhost::new().await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
    amqp.queue("copy", "pillarbox.events", "test.#").await;
    amqp.queue("orders", "", "").await;
    let mut orders = IntakeQueue::new("orders");
    orders.tenant = "zeta".parse().unwrap();
    let app = TestApp::start_with(&here, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.intake = vec![orders];
    })
    .await;
    sqlx::query("create table owned (tenant text, number bigint)").execute(there.pool()).await.unwrap();
    let (stop, replica) = (CancellationToken::new(), Replica::new("test", Duration::from_secs(2)));
    let runtime =
        Runtime::start(Database::new(there.pool().clone()), Clock::system(), replica, Health::default(), stop.clone());
    let matching = MessagePattern { sources: vec!["sql".to_owned()], ..MessagePattern::topic("test.#") };
    let (start, handler, options) = (StartAt::Beginning, Arc::new(Owners), ConsumerOptions::default());
    let owners = Subscription { consumer: "owners".into(), matching, start, handler, options };
    let broker = Arc::new(Broker::new(Secret::new(vhost.amqp_url())).unwrap());
    relay::bus::subscribe(&runtime, &app.settings.relay, &broker, &signer_of(&app), owners);
    amqp.wait_for_consumer_queue("owners").await;
    amqp.bind("pillarbox.owners", "pillarbox.events", "test.#").await; // the process creates the same binding

    let post = "select pillarbox.post('test.posted', to_json($1::bigint), key => 'k', tenant => $2)";
    let tenants = ["acme", "main", "rival"];
    for (number, tenant) in tenants.iter().enumerate() {
        sqlx::query(post).bind(number as i64).bind(tenant).execute(here.pool()).await.unwrap();
    }
    let mut copies = amqp.consume("copy", 3).await;
    copies.sort_by_key(|copy| copy.body["payload"].as_u64());
    let carried: Vec<&str> = copies.iter().map(|copy| copy.headers["pillarbox-tenant"].as_str()).collect();
    assert_eq!(carried, tenants, "every copy carries the tenant");
    eventually("the handler in the other database sees the tenants", TIMEOUT, async || {
        let query = "select tenant from owned order by number";
        let found: Vec<String> = sqlx::query_scalar(query).fetch_all(there.pool()).await.unwrap();
        if found == tenants { Ok(()) } else { Err(found) }
    })
    .await;

    // Any program can set the header in a user's queue, so the settings decide about the tenant.
    amqp.publish_with_headers("orders", Some("1"), Some("order.placed"), &[("pillarbox-tenant", "acme")], b"1").await;
    let tenant: String = eventually("the message is in the log", TIMEOUT, async || {
        let query = "select tenant from pillarbox.log where source = 'amqp:orders'";
        sqlx::query_scalar(query).fetch_optional(here.pool()).await.unwrap()
    })
    .await;
    assert_eq!(tenant, "zeta");
    stop.cancel();
    runtime.join().await;
    app.stop().await;
}
