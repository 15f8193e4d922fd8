//! The operator's HTTP API: the log, consumers, parked messages, dead letters and replays.

use chrono::Utc;
use http_kit::auth::Role;
use hyper::Method;
use serde_json::{Value, json};
use testkit::{Client, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::consumers::support::{
    FailingConsumer, TIMEOUT, count, database, numbers, post_numbers, wait_for_count, wait_for_effects,
    wait_for_replays,
};

async fn start() -> (TestDatabase, TestApp) {
    let database = database().await;
    let app = TestApp::start(&database).await;
    (database, app)
}

async fn items(client: &Client, path: &str) -> Vec<Value> {
    let answer = client.get(path).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["items"].as_array().unwrap().clone()
}

/// All items of a list, page by page.
async fn all_items(client: &Client, path: &str) -> Vec<Value> {
    let (mut all, mut next) = (Vec::new(), path.to_owned());
    loop {
        let answer = client.get(&next).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        all.extend(answer.json()["items"].as_array().unwrap().clone());
        if answer.json()["next_cursor"].is_null() {
            return all;
        }
        next = answer.header("link").trim_start_matches('<').split_once('>').unwrap().0.to_owned();
    }
}

fn i64s(items: &[Value], field: &str) -> Vec<i64> {
    items.iter().map(|item| item[field].as_i64().unwrap()).collect()
}

#[tokio::test]
async fn every_route_is_restricted_to_operators() {
    let (_database, app) = start().await;
    let made = app.admin().post("/admin/v1/keys", json!({"name": "x", "role": "admin", "tenant": "acme"})).await.json();
    let other_tenant = app.anonymous().bearer(made["key"].as_str().unwrap());
    let user = app.user(Uuid::now_v7(), None);
    let description = app.anonymous().get("/openapi.json").await.json();
    let mut routes = 0;
    for (path, item) in description["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if operation["tags"] != json!(["operator"]) {
                continue;
            }
            let method: Method = method.to_uppercase().parse().unwrap();
            let address = path.replace("{event_id}", &Uuid::now_v7().to_string()).replace("{name}", "effects");
            for part in ["{id}", "{place}"] {
                assert!(!path.contains(part) || address.contains(part));
            }
            let address = address.replace("{id}", "1").replace("{place}", "1");
            let send = async |client: &Client| client.send(method.clone(), &address, None).await;
            send(&app.anonymous()).await.assert_problem(401, "unauthorized");
            send(&user).await.assert_problem(403, "forbidden");
            send(&other_tenant).await.assert_problem(403, "forbidden");
            let answer = send(&app.user(Uuid::now_v7(), Some(Role::Admin))).await;
            assert!(![401, 403, 500].contains(&answer.status), "{method} {path}: {answer:?}");
            routes += 1;
        }
    }
    assert_eq!(routes, 20);
    app.stop().await;
}

#[tokio::test]
async fn the_log_is_listed_newest_first_and_filtered() {
    let (database, app) = start().await;
    let (db, admin) = (database.pool(), app.admin());
    post_numbers(db, Some("k"), 0..25).await;
    sqlx::query("select pillarbox.post('order.created', '{\"total\": 1.50}', key => 'o1', tenant => 'acme')")
        .execute(db)
        .await
        .unwrap();
    sqlx::query("select pillarbox.post('orders', '{}')").execute(db).await.unwrap();

    let all = all_items(&admin, "/admin/v1/log?limit=4").await;
    let ids = i64s(&all, "log_id");
    assert_eq!(ids.len(), 27);
    assert!(ids.is_sorted_by(|a, b| a > b), "{ids:?}");
    assert!(all[0]["payload"].is_null(), "lists contain no payload");
    for (filter, expected) in [
        ("topic=order", 1),
        ("topic=test", 25),
        ("tenant=acme", 1),
        ("source=sql", 2),
        ("source=sql&tenant=main", 1),
        ("source=test&topic=order", 0),
        ("from=2020-01-01T00:00:00Z", 27),
        ("to=2020-01-01T00:00:00Z", 0),
    ] {
        assert_eq!(all_items(&admin, &format!("/admin/v1/log?{filter}")).await.len(), expected, "{filter}");
    }
    let event_id = all[1]["event_id"].as_str().unwrap();
    for name in [event_id, event_id.trim_start_matches("evt_")] {
        let one = items(&admin, &format!("/admin/v1/log?message_id={name}")).await;
        assert_eq!(one[0]["topic"], "order.created");
        assert!(items(&admin, &format!("/admin/v1/log?message_id={name}&tenant=main")).await.is_empty());
        let shown = admin.get(&format!("/admin/v1/log/{name}")).await;
        assert!(shown.text.contains(r#""payload":{"total": 1.50}"#), "the payload is unchanged: {shown:?}");
        assert_eq!(shown.json()["key"], "o1");
    }
    admin.get(&format!("/admin/v1/log/{}", Uuid::now_v7())).await.assert_problem(404, "message-not-found");
    admin.get("/admin/v1/log/evt_17").await.assert_problem(400, "malformed-path");
    let refused = admin.get("/admin/v1/log?from=yesterday").await;
    refused.assert_problem(400, "malformed-query");
    assert_eq!(refused.json()["errors"][0]["pointer"], "/from");
    admin.get("/admin/v1/log?colour=red").await.assert_problem(400, "malformed-query");
    app.stop().await;
}

#[tokio::test]
async fn a_long_log_is_searched_by_id_and_by_time() {
    let (database, app) = start().await;
    let (db, admin) = (database.pool(), app.admin());
    // Most of a day with one message per second, and gaps in the ids as rollbacks cause them.
    sqlx::raw_sql(
        "set timezone = 'UTC';
         do $$ begin execute format('create table pillarbox.log_old partition of pillarbox.log for values from (%L) to (%L)',
             current_date - 3, current_date - 1); end $$; -- yesterday has a partition if the template was created then
         insert into pillarbox.log (id, shard, message_id, source, tenant, topic, payload, at)
         select nextval('pillarbox.log_id') * 3, n % 16,
             overlay(pillarbox.uuid_at(at)::text placing '7' from 15 for 1)::uuid, 'test', 'main', 'test.old', to_json(n), at
         from generate_series(1, 60000) as n
         cross join lateral (select date_trunc('day', now()) - interval '2 days' + n * interval '1 second' as at) as time;
         select setval('pillarbox.log_id', 3 * 60000)",
    )
    .execute(db)
    .await
    .unwrap();
    let midnight = Utc::now().date_naive().and_hms_opt(0, 0, 0).unwrap().and_utc() - chrono::Duration::days(2);
    let time = |second: i64| (midnight + chrono::Duration::seconds(second)).format("%Y-%m-%dT%H:%M:%SZ").to_string();
    let path = format!("/admin/v1/log?limit=100&from={}&to={}", time(20_000), time(20_250));
    let found = all_items(&admin, &path).await;
    assert_eq!(found.len(), 250);
    let event_id: String =
        sqlx::query_scalar("select 'evt_' || message_id from pillarbox.log where payload::text = '31234'")
            .fetch_one(db)
            .await
            .unwrap();
    assert_eq!(admin.get(&format!("/admin/v1/log/{event_id}")).await.json()["payload"], 31_234);
    assert!(all_items(&admin, "/admin/v1/log?topic=test.none").await.is_empty());
    app.stop().await;
}

#[tokio::test]
async fn a_message_shows_its_consumers_and_a_parked_one_is_retried() {
    let (database, app) = start().await;
    let (db, admin) = (database.pool(), app.admin());
    let consumer = FailingConsumer::with_slow_retries(db);
    post_numbers(db, Some("a"), [1]).await;
    post_numbers(db, Some("b"), [-1, 2, 3]).await;
    wait_for_count(db, "parked", 3).await;

    let consumers = items(&admin, "/admin/v1/consumers").await;
    let effects = consumers.iter().find(|one| one["consumer"] == "effects").unwrap();
    assert_eq!((&effects["parked"], &effects["dead"], &effects["kind"]), (&json!(3), &json!(0), &json!("handler")));
    assert_eq!(effects["workers"], json!([{"name": "test", "shards": 16}]));

    let parked = all_items(&admin, "/admin/v1/parked?consumer=effects&limit=2").await;
    let places = i64s(&parked, "place");
    assert_eq!(places.len(), 3);
    assert_eq!((&parked[0]["last_error"], &parked[0]["attempts"]), (&json!("negative"), &json!(1)));
    assert!(parked[1]["next_at"].is_null() && parked[0]["next_at"].is_string());
    assert!(items(&admin, "/admin/v1/parked?consumer=missing").await.is_empty());
    let event_id = parked[0]["message"]["event_id"].as_str().unwrap();
    let shown = admin.get(&format!("/admin/v1/log/{event_id}")).await.json();
    assert_eq!(
        shown["consumers"],
        json!([{"consumer": "effects", "status": "parked", "attempts": 1, "last_error": "negative",
                "next_retry_at": parked[0]["next_at"]}])
    );

    let at = |place: i64, what: &str| format!("/admin/v1/parked/{place}/{what}");
    let behind = admin.post(&at(places[1], "retry"), json!({})).await;
    behind.assert_problem(409, "parked-behind");
    assert!(behind.text.contains(&format!("place {}", places[0])), "{behind:?}");
    admin.post(&at(0, "retry"), json!({})).await.assert_problem(404, "parked-not-found");
    admin.post(&at(0, "discard"), json!({})).await.assert_problem(404, "parked-not-found");
    admin.post("/admin/v1/parked/first/retry", json!({})).await.assert_problem(400, "malformed-path");

    // A discard in the middle of a key lets no later message overtake an earlier one.
    assert_eq!(admin.post(&at(places[1], "discard"), json!({})).await.status, 202);
    consumer.stop_failing();
    let once = admin.with_header("idempotency-key", "retry-1");
    assert_eq!(once.post(&at(places[0], "retry"), json!({})).await.status, 202);
    wait_for_count(db, "parked", 0).await;
    assert_eq!(once.post(&at(places[0], "retry"), json!({})).await.header("idempotent-replayed"), "true");
    consumer.process.stop().await;
    assert_eq!(numbers(db).await, [1, -1, 3], "in order, without the discarded message");
    let shown = admin.get(&format!("/admin/v1/log/{event_id}")).await.json();
    assert_eq!(shown["consumers"][0]["status"], "sent");
    app.stop().await;
}

#[tokio::test]
async fn discarding_the_first_parked_message_unblocks_its_key() {
    let (database, app) = start().await;
    let db = database.pool();
    let consumer = FailingConsumer::with_slow_retries(db);
    post_numbers(db, Some("k"), [-1, 2]).await;
    wait_for_count(db, "parked", 2).await;
    let place = i64s(&items(&app.admin(), "/admin/v1/parked").await, "place")[0];
    assert_eq!(app.admin().post(&format!("/admin/v1/parked/{place}/discard"), json!({})).await.status, 202);
    wait_for_effects(db, 1).await;
    wait_for_count(db, "parked", 0).await;
    consumer.process.stop().await;
    assert_eq!(numbers(db).await, [2]);
    assert_eq!(count(db, "dead_letter").await, 0);
    app.stop().await;
}

#[tokio::test]
async fn dead_letters_are_listed_retried_and_discarded() {
    let (database, app) = start().await;
    let (db, admin) = (database.pool(), app.admin());
    let consumer = FailingConsumer::without_retries(db);
    // Mixed with messages that succeed: if nearly all failed, the consumer would stall.
    for number in 1..=5 {
        post_numbers(db, None, [number * 10, -number, number * 100]).await;
    }
    wait_for_count(db, "dead_letter", 5).await;
    let dead = all_items(&admin, "/admin/v1/dead-letters?consumer=effects&limit=2").await;
    let ids = i64s(&dead, "id");
    assert_eq!(ids.len(), 5);
    assert!(ids.is_sorted());
    for (filter, expected) in [
        ("consumer=missing", 0),
        ("topic=test", 5),
        ("topic=tes", 0),
        ("tenant=acme", 0),
        ("from=2020-01-01T00:00:00Z", 5),
    ] {
        assert_eq!(items(&admin, &format!("/admin/v1/dead-letters?{filter}")).await.len(), expected, "{filter}");
    }
    let of = |id: i64, what: &str| format!("/admin/v1/dead-letters/{id}{what}");
    let shown = admin.get(&of(ids[0], "")).await.json();
    assert_eq!((&shown["last_error"], &shown["message"]["topic"]), (&json!("negative"), &json!("test.posted")));
    assert!(shown["message"]["payload"].as_i64().unwrap() < 0);
    admin.get(&of(0, "")).await.assert_problem(404, "dead-letter-not-found");
    admin.post(&of(0, "/retry"), json!({})).await.assert_problem(404, "dead-letter-not-found");
    admin.post(&of(0, "/discard"), json!({})).await.assert_problem(404, "dead-letter-not-found");

    assert_eq!(admin.post(&of(ids[0], "/discard"), json!({})).await.status, 204);
    consumer.stop_failing();
    let once = admin.with_header("idempotency-key", "retry-1");
    for _ in 0..2 {
        assert_eq!(once.post(&of(ids[1], "/retry"), json!({})).await.status, 202);
    }
    wait_for_effects(db, 11).await;

    let bulk = async |what: &str, body: Value| admin.post(&format!("/admin/v1/dead-letters/{what}"), body).await;
    bulk("retry", json!({})).await.assert_problem(422, "validation-failed");
    bulk("discard", json!({"all": true, "topic": "test"})).await.assert_problem(422, "validation-failed");
    let refused = bulk("discard", json!({"from": "yesterday"})).await;
    refused.assert_problem(422, "validation-failed");
    assert_eq!(refused.json()["errors"][0]["pointer"], "/from");
    bulk("discard", json!({"colour": "red"})).await.assert_problem(422, "validation-failed");
    assert_eq!(bulk("retry", json!({"consumer": "missing"})).await.json(), json!({"count": 0, "more": false}));
    assert_eq!(bulk("retry", json!({"consumer": "effects"})).await.json(), json!({"count": 3, "more": false}));
    wait_for_effects(db, 14).await;
    consumer.process.stop().await;
    assert_eq!(count(db, "dead_letter").await, 0);

    // Dead letters of a consumer that does not exist.
    sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
             topic, headers, payload, at)
         select 'amqp:q', 0, 0, 1, 'not JSON', 0, pillarbox.uuid_v7(), 'amqp:q', 'main', 'x', '{}', 'null', now()
         from generate_series(1, 2500)",
    )
    .execute(db)
    .await
    .unwrap();
    let id = i64s(&items(&admin, "/admin/v1/dead-letters?limit=1").await, "id")[0];
    admin.post(&of(id, "/retry"), json!({})).await.assert_problem(409, "consumer-gone");
    assert_eq!(bulk("retry", json!({"all": true})).await.json()["count"], 0);
    assert_eq!(bulk("discard", json!({"all": true})).await.json(), json!({"count": 2500, "more": false}));
    app.stop().await;
}

#[tokio::test]
async fn a_retried_dead_letter_overtakes_no_parked_message() {
    let (database, app) = start().await;
    let (db, admin) = (database.pool(), app.admin());
    let consumer = FailingConsumer::with_slow_retries(db);
    post_numbers(db, Some("k"), [-1, 2]).await;
    wait_for_count(db, "parked", 2).await;
    sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
             topic, key, headers, payload, at)
         select consumer, shard, 0, 4, 'x', 0, pillarbox.uuid_v7(), source, tenant, topic, key, '{}', '7', at
         from pillarbox.parked limit 1",
    )
    .execute(db)
    .await
    .unwrap();
    // No process runs during the retry, so that the next message is parked behind it.
    consumer.process.stop().await;
    assert_eq!(admin.post("/admin/v1/dead-letters/retry", json!({"all": true})).await.json()["count"], 1);
    sqlx::query(
        "insert into pillarbox.parked (consumer, shard, run, attempts, log_id, message_id, source, tenant, topic, key, headers,
             payload, at)
         select consumer, shard, 0, 0, 0, pillarbox.uuid_v7(), source, tenant, topic, key, '{}', '3', at
         from pillarbox.parked limit 1",
    )
    .execute(db)
    .await
    .unwrap();
    let consumer = FailingConsumer::with_slow_retries(db);
    wait_for_effects(db, 1).await;
    wait_for_count(db, "parked", 3).await;
    assert_eq!(numbers(db).await, [7], "the dead letter alone");
    consumer.stop_failing();
    let place = i64s(&items(&admin, "/admin/v1/parked").await, "place")[0];
    assert_eq!(admin.post(&format!("/admin/v1/parked/{place}/retry"), json!({})).await.status, 202);
    wait_for_count(db, "parked", 0).await;
    consumer.process.stop().await;
    assert_eq!(numbers(db).await, [7, -1, 2, 3]);
    app.stop().await;
}

#[tokio::test]
async fn a_consumer_is_reset_replayed_and_dropped() {
    let (database, app) = start().await;
    let (db, admin) = (database.pool(), app.admin());
    let consumer = FailingConsumer::without_retries(db);
    post_numbers(db, Some("k"), 1..=3).await;
    wait_for_effects(db, 3).await;
    let hour_ago = Utc::now() - chrono::Duration::hours(1);

    let replays = "/admin/v1/replays";
    let once = admin.with_header("idempotency-key", "replay-1");
    let request = json!({"consumer": "effects", "from": hour_ago, "again": true});
    let made = once.post(replays, request.clone()).await;
    assert_eq!(made.status, 202, "{made:?}");
    assert_eq!(once.post(replays, request).await.json(), made.json(), "the repeated request creates no second replay");
    wait_for_effects(db, 6).await;
    wait_for_replays(db).await;
    let listed = items(&admin, "/admin/v1/replays?consumer=effects").await;
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0]["shards_done"], &listed[0]["shards"]), (&json!(16), &json!(16)));
    assert_eq!((&listed[0]["id"], &listed[0]["again"]), (&made.json()["id"], &json!(true)));
    assert!(items(&admin, "/admin/v1/replays?consumer=missing").await.is_empty());
    let unknown = json!({"consumer": "missing", "from": hour_ago});
    admin.post(replays, unknown).await.assert_problem(404, "consumer-not-found");
    let backwards = admin.post(replays, json!({"consumer": "effects", "from": Utc::now(), "to": hour_ago})).await;
    backwards.assert_problem(422, "validation-failed");
    assert_eq!(backwards.json()["errors"][0]["pointer"], "/to");
    let bad = admin.post(replays, json!({"consumer": "effects", "from": "30m"})).await;
    bad.assert_problem(422, "validation-failed");
    assert_eq!(bad.json()["errors"][0]["pointer"], "/from");
    assert!(bad.json()["errors"][0]["detail"].as_str().unwrap().contains("2026-01-31T08:00:00Z"), "{bad:?}");

    let reset = "/admin/v1/consumers/effects/reset";
    assert_eq!(admin.post(reset, json!({"from": hour_ago})).await.status, 200);
    wait_for_replays(db).await;
    let future = admin.post(reset, json!({"from": Utc::now() + chrono::Duration::hours(1)})).await;
    future.assert_problem(422, "validation-failed");
    assert_eq!(future.json()["errors"][0]["pointer"], "/from");
    admin.post(reset, json!({"until": hour_ago})).await.assert_problem(422, "validation-failed");
    admin.post("/admin/v1/consumers/missing/reset", json!({})).await.assert_problem(404, "consumer-not-found");
    eventually("the consumer works again", TIMEOUT, async || {
        items(&admin, "/admin/v1/consumers").await[0]["workers"] == json!([{"name": "test", "shards": 16}])
    })
    .await;

    admin.delete("/admin/v1/consumers/effects").await.assert_problem(409, "consumer-in-use");
    consumer.process.stop().await;
    assert_eq!(numbers(db).await.len(), 6, "a message has no second effect");
    // No process runs, so that the reset skips this message.
    post_numbers(db, Some("k"), [4]).await;
    assert_eq!(admin.post(reset, json!({})).await.status, 200);
    let consumer = FailingConsumer::without_retries(db);
    post_numbers(db, Some("k"), [5]).await;
    wait_for_effects(db, 7).await;
    consumer.process.stop().await;
    assert_eq!(numbers(db).await[6..], [5]);
    assert_eq!(admin.delete("/admin/v1/consumers/effects").await.json(), json!({"dead_letters": 0}));
    admin.delete("/admin/v1/consumers/effects").await.assert_problem(404, "consumer-not-found");
    app.stop().await;
}
