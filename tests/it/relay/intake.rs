//! Intake: a RabbitMQ queue is read into the log.

use std::time::Duration;

use lapin::ExchangeKind;
use relay::IntakeQueue;
use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use sqlx::PgPool;
use testkit::{FaultProxy, Pillarbox, TestApp, TestDatabase, TestVhost, eventually, program};

use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, post, relay_to};
use crate::server::process::DataFolder;

#[tokio::test]
async fn a_queue_is_read_into_the_log_once_and_not_published_back() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("orders", "", "").await;
    amqp.exchange("pillarbox.events", ExchangeKind::Topic).await;
    amqp.queue("back", "pillarbox.events", "#").await;
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    let db = database.pool();
    for number in 0..30 {
        let (id, body) = (format!("any id {number}"), number.to_string());
        amqp.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        amqp.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
    }
    let in_log = async || -> Vec<i64> {
        sqlx::query_scalar("select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id")
            .fetch_all(db)
            .await
            .unwrap()
    };
    eventually("all messages are in the log", TIMEOUT, async || in_log().await.len() >= 30).await;
    // A repeat after midnight: the first delivery is moved to yesterday.
    sqlx::query("update pillarbox.inbox_foreign set at = at - interval '1 day'").execute(db).await.unwrap();
    amqp.publish("orders", Some("any id 7"), Some("order.placed"), Some("k"), b"7").await;
    // Messages that cannot be posted become dead letters and block nothing: invalid JSON, no topic, NUL, and deep nesting.
    let deep = format!("{}{}", "[".repeat(128), "]".repeat(128));
    amqp.publish("orders", Some("bad 1"), Some("order.placed"), None, b"not json").await;
    amqp.publish("orders", Some("bad 2"), Some("no topic"), None, b"1").await;
    amqp.publish("orders", Some("bad 3\0"), Some("order.placed"), None, b"1").await;
    amqp.publish("orders", Some("bad 4"), Some("order.placed"), None, deep.as_bytes()).await;
    amqp.publish("orders", None, Some("order.placed"), Some("k"), b"30").await;
    eventually("the last message is in the log", TIMEOUT, async || in_log().await.len() >= 31).await;
    assert_eq!(in_log().await, (0..31).collect::<Vec<_>>(), "each once, in order");
    let dead: Vec<(String, String)> = sqlx::query_as(
        "select payload::text, last_error from pillarbox.dead_letter where consumer = 'amqp:orders' order by id",
    )
    .fetch_all(db)
    .await
    .unwrap();
    assert_eq!(dead.len(), 4, "{dead:?}");
    assert_eq!(dead[0].0, "\"not json\"");
    assert!(dead[3].0.starts_with("\"[[[") && dead[3].1.contains("nested deeper than 127 levels"), "{dead:?}");
    let announced =
        "select count(*) from pillarbox.log where topic = 'dead_letter.amqp_orders' and source = 'pillarbox'";
    assert_eq!(
        sqlx::query_scalar::<_, i64>(announced).fetch_one(db).await.unwrap(),
        4,
        "each dead letter is announced"
    );
    let metric = "pillarbox_consumer_dead_letters{consumer=\"amqp:orders\"} 4";
    eventually("the metric counts the dead letters", TIMEOUT, async || {
        app.anonymous().get("/metrics").await.text.contains(metric)
    })
    .await;
    eventually("all messages are acknowledged", TIMEOUT, async || amqp.depth("orders").await == 0).await;
    post(db, "order.placed", None, 99).await;
    let back = amqp.consume("back", 1).await;
    assert_eq!(
        (back[0].body["payload"].clone(), amqp.depth("back").await),
        (json!(99), 0),
        "the relay publishes only the message that was posted in SQL"
    );
    app.stop().await;
}

#[tokio::test]
async fn a_database_outage_loses_no_message_of_a_queue() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let postgres = FaultProxy::in_front_of(&database.url()).await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("orders", "", "").await;
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.database_url = Some(Secret::new(postgres.url(&database.url())));
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    for number in 0..60 {
        match number % 20 {
            5 => postgres.refuse(),
            15 => postgres.pass(),
            _ => {}
        }
        let (id, body) = (format!("id {number}"), number.to_string());
        amqp.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(20)).await; // so that some are delivered during the outage
    }
    postgres.pass();
    let query = "select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id";
    eventually("all messages are in the log", TIMEOUT, async || {
        let found: Vec<i64> = sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap();
        if found == (0..60).collect::<Vec<_>>() { Ok(()) } else { Err(found) }
    })
    .await;
    app.stop().await;
}

/// While the table `fault` has a row, posting a message fails with the SQLSTATE in its payload. The sequence `attempt`
/// counts all attempts, including those that are rolled back.
async fn install_fault(db: &PgPool) {
    sqlx::raw_sql(
        "create table fault ();
         create sequence attempt;
         create function raise_fault() returns trigger language plpgsql as $$ begin
             perform nextval('public.attempt');
             if exists (select from public.fault) then
                 raise exception 'fault %', new.payload #>> '{}' using errcode = new.payload #>> '{}';
             end if;
             return new;
         end $$;
         create trigger raise_fault before insert on pillarbox.log for each row
             when (new.source = 'amqp:orders') execute function raise_fault();
         insert into fault default values",
    )
    .execute(db)
    .await
    .unwrap();
}

/// The errors of the dead letters of the queue `orders`.
async fn dead(db: &PgPool) -> Vec<String> {
    let query = "select last_error from pillarbox.dead_letter where consumer = 'amqp:orders' order by id";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn only_a_data_error_makes_a_message_a_dead_letter() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let db = database.pool();
    install_fault(db).await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("orders", "", "").await;
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    let publish = async |code: &str| {
        let body = json!(code).to_string();
        amqp.publish("orders", Some(code), Some("order.placed"), Some("k"), body.as_bytes()).await;
    };
    let in_log = async || -> Vec<String> {
        let query = "select payload #>> '{}' from pillarbox.log where source = 'amqp:orders' order by id";
        sqlx::query_scalar(query).fetch_all(db).await.unwrap()
    };
    // Invalid data, a violated constraint, a program limit: a retry would fail again.
    let data_errors = ["22P02", "22021", "23514", "23505", "54001"];
    for code in data_errors {
        publish(code).await;
    }
    eventually("all of them are dead letters", TIMEOUT, async || match dead(db).await.len() {
        5 => Ok(()),
        other => Err(other),
    })
    .await;
    let errors = dead(db).await;
    assert!(errors.iter().zip(data_errors).all(|(error, code)| error.contains(code)), "{errors:?}");

    // A canceled query, a lost connection, no memory, a deadlock, missing rights: a retry may succeed.
    let temporary_errors = ["57014", "08006", "53200", "40P01", "42501"];
    for code in temporary_errors {
        publish(code).await;
        eventually("posting fails with the error", TIMEOUT, async || {
            app.anonymous().get("/readyz").await.text.contains(&format!("fault {code}"))
        })
        .await;
        assert!(!in_log().await.contains(&code.to_owned()));
        sqlx::query("delete from fault").execute(db).await.unwrap();
        eventually("the message is in the log", TIMEOUT, async || in_log().await.contains(&code.to_owned())).await;
        sqlx::query("insert into fault default values").execute(db).await.unwrap();
    }
    assert_eq!(in_log().await, temporary_errors, "each message once");
    assert_eq!(dead(db).await.len(), 5, "a temporary error makes no dead letter");
    eventually("all messages are acknowledged", TIMEOUT, async || amqp.depth("orders").await == 0).await;
    app.stop().await;
}

#[tokio::test]
async fn a_message_retried_in_the_same_batch_repeats_no_dead_letter() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let db = database.pool();
    install_fault(db).await;
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("orders", "", "").await;
    // All of them are in the queue at the start, so they are read in one batch.
    for code in ["22P02", "23514", "57014"] {
        amqp.publish("orders", Some(code), Some("order.placed"), None, json!(code).to_string().as_bytes()).await;
    }
    let app = TestApp::start_with(&database, |settings| {
        relay_to(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    eventually("the last message is retried several times", TIMEOUT, async || {
        sqlx::query_scalar::<_, i64>("select last_value from attempt").fetch_one(db).await.unwrap() > 6
    })
    .await;
    sqlx::query("delete from fault").execute(db).await.unwrap();
    eventually("the last message is in the log", TIMEOUT, async || {
        let query = "select count(*) from pillarbox.log where source = 'amqp:orders'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() == 1
    })
    .await;
    let errors = dead(db).await;
    assert_eq!(errors.len(), 2, "{errors:?}");
    app.stop().await;
}

#[tokio::test]
async fn deeply_nested_headers_do_not_crash_the_process() {
    let (database, vhost, folder) = (TestDatabase::new(&migrations()).await, TestVhost::new().await, DataFolder::new());
    let amqp = BrokerClient::connect(&vhost).await;
    amqp.queue("orders", "", "").await;
    let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
    let properties = format!(r#"{{"headers":{{"x":{deep}}},"type":"order.placed","message_id":"deep"}}"#);
    vhost.publish("orders", &properties, "1").await;
    amqp.publish("orders", Some("next"), Some("order.placed"), None, b"2").await;
    let (database_url, amqp_url) = (database.url(), vhost.amqp_url());
    let env = [
        ("PILLARBOX_ROLES", r#"["relay"]"#),
        ("PILLARBOX_DATABASE_URL", database_url.as_str()),
        ("PILLARBOX_AMQP_URL", amqp_url.as_str()),
        ("PILLARBOX_RELAY__INTAKE", r#"[{queue="orders"}]"#),
        ("PILLARBOX_POOL_MIN", "0"),
    ];
    let _process =
        Pillarbox::start(program(), &["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()], &env);
    let in_log = "select count(*) from pillarbox.log where source = 'amqp:orders'";
    eventually("both messages are in the log", TIMEOUT, async || {
        sqlx::query_scalar::<_, i64>(in_log).fetch_one(database.pool()).await.unwrap() == 2
    })
    .await;
}
