//! From a queue of RabbitMQ into the log.

use std::time::Duration;

use kit::secret::Secret;
use lapin::ExchangeKind;
use mailbox::database::migrations;
use relay::IntakeQueue;
use serde_json::json;
use sqlx::PgPool;
use testkit::{FaultProxy, Pillarbox, TestApp, TestDatabase, TestVhost, drain};

use crate::broker::Outside;
use crate::instance::{BINARY, DataFolder};
use crate::relaying::{PATIENCE, post, relaying};

#[tokio::test]
async fn a_queue_of_the_users_is_read_into_the_log_once_and_not_sent_back() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    outside.exchange("pillarbox.events", ExchangeKind::Topic).await;
    outside.queue("back", "pillarbox.events", "#").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    let db = database.pool();
    for number in 0..30 {
        let (id, body) = (format!("any id {number}"), number.to_string());
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
    }
    let in_log = async || -> Vec<i64> {
        sqlx::query_scalar("select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id")
            .fetch_all(db)
            .await
            .unwrap()
    };
    drain("all are in the log", PATIENCE, async || in_log().await.len() >= 30).await;
    // A repeat after midnight: as if the first had come yesterday.
    sqlx::query("update pillarbox.inbox_foreign set at = at - interval '1 day'").execute(db).await.unwrap();
    outside.publish("orders", Some("any id 7"), Some("order.placed"), Some("k"), b"7").await;
    // What cannot be posted is kept, and holds up nothing: no JSON, no topic, NUL, and nested beyond measure.
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    outside.publish("orders", Some("bad 1"), Some("order.placed"), None, b"not json").await;
    outside.publish("orders", Some("bad 2"), Some("no topic"), None, b"1").await;
    outside.publish("orders", Some("bad 3\0"), Some("order.placed"), None, b"1").await;
    outside.publish("orders", Some("bad 4"), Some("order.placed"), None, deep.as_bytes()).await;
    outside.publish("orders", None, Some("order.placed"), Some("k"), b"30").await;
    drain("the last is in the log", PATIENCE, async || in_log().await.len() >= 31).await;
    assert_eq!(in_log().await, (0..31).collect::<Vec<_>>(), "each once, in order");
    let dead: Vec<(String, String)> = sqlx::query_as(
        "select payload::text, last_error from pillarbox.dead_letter where consumer = 'amqp:orders' order by id",
    )
    .fetch_all(db)
    .await
    .unwrap();
    assert_eq!(dead.len(), 4, "{dead:?}");
    assert_eq!(dead[0].0, "\"not json\"");
    let announced = "select count(*) from pillarbox.log where topic = 'dead_letter.amqp_orders' and source = 'mailbox'";
    assert_eq!(sqlx::query_scalar::<_, i64>(announced).fetch_one(db).await.unwrap(), 4, "each is told of");
    let metric = "pillarbox_consumer_dead_letters{consumer=\"amqp:orders\"} 4";
    drain("it is measured", PATIENCE, async || app.anyone().get("/metrics").await.text.contains(metric)).await;
    drain("all is acknowledged", PATIENCE, async || outside.depth("orders").await == 0).await;
    post(db, "order.placed", None, 99).await;
    let back = outside.take("back", 1).await;
    assert_eq!(
        (back[0].body["payload"].clone(), outside.depth("back").await),
        (json!(99), 0),
        "only what was posted here"
    );
    app.stop().await;
}

#[tokio::test]
async fn a_database_that_goes_away_costs_a_queue_nothing() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let postgres = FaultProxy::in_front_of(&database.url()).await;
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
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
        outside.publish("orders", Some(&id), Some("order.placed"), Some("k"), body.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(20)).await; // so that some are delivered while it is away
    }
    postgres.pass();
    let query = "select payload::text::bigint from pillarbox.log where source = 'amqp:orders' order by id";
    drain("all are in the log", PATIENCE, async || {
        let found: Vec<i64> = sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap();
        if found == (0..60).collect::<Vec<_>>() { Ok(()) } else { Err(found) }
    })
    .await;
    app.stop().await;
}

/// A message says which error posting it meets, as long as there is trouble; `attempt` counts, also what is rolled back.
async fn make_trouble(db: &PgPool) {
    sqlx::raw_sql(
        "create table trouble ();
         create sequence attempt;
         create function be_trouble() returns trigger language plpgsql as $$ begin
             perform nextval('public.attempt');
             if exists (select from public.trouble) then
                 raise exception 'trouble %', new.payload #>> '{}' using errcode = new.payload #>> '{}';
             end if;
             return new;
         end $$;
         create trigger be_trouble before insert on pillarbox.log for each row
             when (new.source = 'amqp:orders') execute function be_trouble();
         insert into trouble default values",
    )
    .execute(db)
    .await
    .unwrap();
}

/// Why messages of the queue `orders` are dead letters.
async fn dead(db: &PgPool) -> Vec<String> {
    let query = "select last_error from pillarbox.dead_letter where consumer = 'amqp:orders' order by id";
    sqlx::query_scalar(query).fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn only_an_error_that_lies_in_the_message_makes_a_dead_letter_of_it() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let db = database.pool();
    make_trouble(db).await;
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    let publish = async |code: &str| {
        let body = json!(code).to_string();
        outside.publish("orders", Some(code), Some("order.placed"), Some("k"), body.as_bytes()).await;
    };
    let in_log = async || -> Vec<String> {
        let query = "select payload #>> '{}' from pillarbox.log where source = 'amqp:orders' order by id";
        sqlx::query_scalar(query).fetch_all(db).await.unwrap()
    };
    // Bad data, a broken constraint, a limit of the program: the same again would fail again.
    let in_the_message = ["22P02", "22021", "23514", "23505", "54001"];
    for code in in_the_message {
        publish(code).await;
    }
    drain("they are dead letters", PATIENCE, async || match dead(db).await.len() {
        5 => Ok(()),
        other => Err(other),
    })
    .await;
    let errors = dead(db).await;
    assert!(errors.iter().zip(in_the_message).all(|(error, code)| error.contains(code)), "{errors:?}");

    // Cancelled, the connection, no memory, a deadlock, no rights: it may be over the next time.
    let elsewhere = ["57014", "08006", "53200", "40P01", "42501"];
    for code in elsewhere {
        publish(code).await;
        drain("it meets the error", PATIENCE, async || {
            app.anyone().get("/readyz").await.text.contains(&format!("trouble {code}"))
        })
        .await;
        assert!(!in_log().await.contains(&code.to_owned()));
        sqlx::query("delete from trouble").execute(db).await.unwrap();
        drain("it is in the log", PATIENCE, async || in_log().await.contains(&code.to_owned())).await;
        sqlx::query("insert into trouble default values").execute(db).await.unwrap();
    }
    assert_eq!(in_log().await, elsewhere, "each once");
    assert_eq!(dead(db).await.len(), 5, "none of them died");
    drain("all is acknowledged", PATIENCE, async || outside.depth("orders").await == 0).await;
    app.stop().await;
}

#[tokio::test]
async fn a_dead_letter_is_made_once_however_long_the_message_behind_it_waits() {
    let (database, vhost) = (TestDatabase::new(&migrations()).await, TestVhost::new().await);
    let db = database.pool();
    make_trouble(db).await;
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    // All are there when it begins, and so come in one batch.
    for code in ["22P02", "23514", "57014"] {
        outside.publish("orders", Some(code), Some("order.placed"), None, json!(code).to_string().as_bytes()).await;
    }
    let app = TestApp::start_with(&database, |settings| {
        relaying(&vhost)(settings);
        settings.relay.intake = vec![IntakeQueue::new("orders")];
    })
    .await;
    drain("it is tried again and again", PATIENCE, async || {
        sqlx::query_scalar::<_, i64>("select last_value from attempt").fetch_one(db).await.unwrap() > 6
    })
    .await;
    sqlx::query("delete from trouble").execute(db).await.unwrap();
    drain("the last is in the log", PATIENCE, async || {
        let query = "select count(*) from pillarbox.log where source = 'amqp:orders'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap() == 1
    })
    .await;
    let errors = dead(db).await;
    assert_eq!(errors.len(), 2, "{errors:?}");
    app.stop().await;
}

#[tokio::test]
async fn headers_that_nest_without_end_end_nobody() {
    let (database, vhost, folder) = (TestDatabase::new(&migrations()).await, TestVhost::new().await, DataFolder::new());
    let outside = Outside::of(&vhost).await;
    outside.queue("orders", "", "").await;
    let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
    let properties = format!(r#"{{"headers":{{"x":{deep}}},"type":"order.placed","message_id":"deep"}}"#);
    vhost.publish("orders", &properties, "1").await;
    outside.publish("orders", Some("next"), Some("order.placed"), None, b"2").await;
    let (database_url, amqp_url) = (database.url(), vhost.amqp_url());
    let env = [
        ("PILLARBOX_ROLES", r#"["relay"]"#),
        ("PILLARBOX_DATABASE_URL", database_url.as_str()),
        ("PILLARBOX_AMQP_URL", amqp_url.as_str()),
        ("PILLARBOX_RELAY__INTAKE", r#"[{queue="orders"}]"#),
        ("PILLARBOX_POOL_MIN", "0"),
    ];
    let _process = Pillarbox::start(BINARY, &["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text()], &env);
    let taken = "select count(*) from pillarbox.log where source = 'amqp:orders'";
    drain("both are in the log", PATIENCE, async || {
        sqlx::query_scalar::<_, i64>(taken).fetch_one(database.pool()).await.unwrap() == 2
    })
    .await;
}
