//! Events that are posted in SQL and refused by the catalogue or a limit of their tenant: the post succeeds, and no
//! subscriber gets the event until it is retried and accepted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use sqlx::PgPool;
use testkit::{Client, Receiver, Response, TestDatabase, eventually};

use crate::hub::fixture::{
    Fixture, post, post_in_sql, received_numbers, subscribe, wait_for_fan_out, wait_for_outcome, wait_for_webhooks,
};
use crate::hub::process::Replica;
use crate::hub::replays::hour_ago;
use crate::hub::stream_fixture::{create_stream, numbers, pull_count};
use crate::support::{DEADLINE, caller, collect_pages, text};

const ORDER: &str = "order.paid";

async fn add_type(manager: &Client, name: &str, schema: Value) {
    let made = decided(manager, "/hub/v1/event-types", &json!({"name": name, "schema": schema})).await;
    assert_eq!(made.status, 201, "{made:?}");
}

async fn force_version(manager: &Client, schema: Value) {
    let path = format!("/hub/v1/event-types/{ORDER}/versions");
    let made = manager.post(&path, json!({"schema": schema, "force": true})).await;
    assert_eq!(made.status, 201, "{made:?}");
}

async fn retry(manager: &Client, event: impl std::fmt::Display) -> Response {
    manager.send(Method::POST, &format!("/hub/v1/events/{event}/retry"), None).await
}

#[tokio::test]
async fn a_rejected_event_reaches_no_subscriber_until_it_is_retried() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, receiver) = (database.pool(), Receiver::start().await);
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    create_stream(&manager, json!({})).await;
    add_type(&manager, ORDER, json!({"properties": {"n": {"maximum": 5}}})).await;
    let bad = post_in_sql(db, "acme", ORDER, &json!({"n": 9})).await;
    let good = post_in_sql(db, "acme", ORDER, &json!({"n": 1})).await;
    wait_for_outcome(&manager, &good.to_string(), &subscriber, "delivered").await;

    let shown = wait_for_fan_out(&manager, &bad).await;
    assert_eq!((&shown["status"], &shown["outcome"]), (&json!("rejected"), &json!("rejected")), "{shown}");
    assert_eq!(shown["rejection"]["version"], 1, "{shown}");
    let expected = json!([{"in": "body", "pointer": "/payload/n", "detail": "must be at most 5"}]);
    assert_eq!(shown["rejection"]["errors"], expected);
    let listed = collect_pages(&manager, "/hub/v1/events?status=rejected").await;
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!((&listed[0]["event_id"], &listed[0]["rejection"]), (&json!(format!("evt_{bad}")), &shown["rejection"]));
    assert_eq!(collect_pages(&manager, "/hub/v1/events?status=rejected&event_type=other").await.len(), 0);
    let rival = caller(&app, "manage", "rival").await;
    assert_eq!(collect_pages(&rival, "/hub/v1/events?status=rejected").await.len(), 0);
    retry(&rival, bad).await.assert_problem(404, "event-not-found");

    // Neither a replay nor a backfill sends it, and no stream contains it.
    let replay = json!({"mode": "resend", "subscriber_id": subscriber["id"], "from": hour_ago()});
    assert_eq!(manager.post("/hub/v1/replays", replay).await.status, 202);
    wait_for_webhooks(&receiver, 2).await;
    let later = Receiver::start().await;
    let backfilled = json!({"event_types": [ORDER], "backfill": {"from": hour_ago()}});
    let second = subscribe(&manager, &later.url(), backfilled).await;
    wait_for_webhooks(&later, 1).await;
    assert_eq!((received_numbers(&receiver), received_numbers(&later)), (vec![1, 1], vec![1]));

    // It is still refused.
    let refused = retry(&manager, bad).await;
    refused.assert_problem(409, "event-refused");
    assert_eq!(refused.json()["errors"][0]["pointer"], "/payload/n", "{refused:?}");
    retry(&manager, good).await.assert_problem(409, "event-not-rejected");
    force_version(&manager, json!({"properties": {"n": {"maximum": 10}}})).await;
    assert_eq!(retry(&manager, bad).await.status, 202);
    for subscriber in [&subscriber, &second] {
        wait_for_outcome(&manager, &bad.to_string(), subscriber, "delivered").await;
    }
    retry(&manager, bad).await.assert_problem(409, "event-not-rejected");
    assert_eq!((received_numbers(&receiver), received_numbers(&later)), (vec![1, 1, 9], vec![1, 9]));
    assert_eq!(numbers(&pull_count(&manager, "one", 2).await), [1, 9]);
    // Now it is an event like any other.
    let third = Receiver::start().await;
    let backfilled = json!({"event_types": [ORDER], "backfill": {"from": hour_ago()}});
    subscribe(&manager, &third.url(), backfilled).await;
    wait_for_webhooks(&third, 2).await;
    assert_eq!(received_numbers(&third), [9, 1], "a backfill has the order of the log");
    app.stop().await;
}

/// In a separate process: the servers of other tests count in the same metric.
#[tokio::test]
async fn rejected_events_are_counted() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, replica) = (database.pool(), Replica::start(&database.url()));
    let manager = replica.admin().await;
    add_type(&manager, ORDER, json!({"properties": {"n": {"maximum": 5}}})).await;
    for n in [9, 1, 8] {
        let event = post_in_sql(db, "main", ORDER, &json!({"n": n})).await;
        wait_for_fan_out(&manager, &event).await;
    }
    let count = async || replica.metric("pillarbox_hub_rejected_events_total").await == Some(2.0);
    eventually("two of three events are counted", DEADLINE, count).await;
    // An event that is retried and refused again was counted before.
    let listed = collect_pages(&manager, "/hub/v1/events?status=rejected").await;
    assert_eq!(listed.len(), 2, "{listed:?}");
    retry(&manager, text(&listed[0]["event_id"]).trim_start_matches("evt_")).await.assert_problem(409, "event-refused");
    assert_eq!(replica.metric("pillarbox_hub_rejected_events_total").await, Some(2.0));
}

#[tokio::test]
async fn rejected_events_of_a_type_are_retried_together_in_their_order() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, receiver) = (database.pool(), Receiver::start().await);
    subscribe(&manager, &receiver.url(), json!({})).await;
    add_type(&manager, ORDER, json!({"properties": {"n": {"maximum": 5}}})).await;
    let mut last = None;
    for n in 6..257 {
        // The last one is accepted at once, and so comes first.
        let query = "select pillarbox.post($1, json_build_object('n', $2), tenant => 'acme', key => 'order')";
        let posted = sqlx::query_scalar(query).bind(ORDER).bind(if n == 256 { 0 } else { n }).fetch_one(db).await;
        last = Some(posted.unwrap());
    }
    wait_for_fan_out(&manager, &last.unwrap()).await;
    wait_for_webhooks(&receiver, 1).await;
    force_version(&manager, json!({"properties": {"n": {"maximum": 250}}})).await;
    let (mut retried, mut refused, mut after) = (0, 0, Value::Null);
    loop {
        let body = json!({"event_type": "order", "after": after});
        let step = manager.post("/hub/v1/events/retry", body).await.json();
        retried += step["retried"].as_u64().unwrap();
        refused += step["refused"].as_u64().unwrap();
        if step["more"] == false {
            break;
        }
        after = step["next_after"].clone();
    }
    assert_eq!((retried, refused), (245, 5));
    wait_for_webhooks(&receiver, 246).await;
    assert!(received_numbers(&receiver).into_iter().eq(std::iter::once(0).chain(6..251)));
    let seqs =
        receiver.received().iter().map(|one| one.header("webhook-seq").parse::<u64>().unwrap()).collect::<Vec<_>>();
    assert!(seqs.iter().copied().eq(1..=246), "{seqs:?}");
    assert_eq!(collect_pages(&manager, "/hub/v1/events?status=rejected").await.len(), 5);
    app.stop().await;
}

#[tokio::test]
async fn an_event_is_checked_against_the_version_that_was_in_force_when_it_was_posted() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    add_type(&manager, ORDER, json!({"properties": {"n": {"maximum": 5}}})).await;
    let mut earlier = db.begin().await.unwrap();
    let query = "select pillarbox.post($1, '{\"n\": 7}', tenant => 'acme')";
    let id = sqlx::query_scalar(query).bind(ORDER).fetch_one(&mut *earlier).await.unwrap();
    force_version(&manager, json!({"properties": {"n": {"maximum": 10}}})).await;
    earlier.commit().await.unwrap();
    assert_eq!(wait_for_fan_out(&manager, &id).await["rejection"]["version"], 1);
    let later = post_in_sql(db, "acme", ORDER, &json!({"n": 7})).await;
    assert_eq!(wait_for_fan_out(&manager, &later).await["outcome"], "unmatched");
    app.stop().await;
}

/// Checking a list of objects against it takes as many steps as it has items, times the alternatives.
fn expensive() -> Value {
    let alternatives: Vec<Value> = (0..900).map(|n| json!({"const": n})).collect();
    json!({"items": {"anyOf": alternatives}})
}

/// The transactions of the server that are open and have executed nothing for a second, as one would that waits for a check.
async fn waiting_transactions(db: &PgPool) -> i64 {
    let query = "select count(*) from pg_stat_activity where datname = current_database()
                 and state = 'idle in transaction' and state_change < clock_timestamp() - interval '1 second'";
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expensive_check_delays_the_events_of_its_tenant_only() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, receiver) = (database.pool(), Receiver::start().await);
    let other = caller(&app, "manage", "other").await;
    let subscriber = subscribe(&other, &receiver.url(), json!({})).await;
    add_type(&manager, ORDER, expensive()).await;
    let large = json!(vec![json!(899); 60_000]);
    let started = Instant::now();
    let refused = decided(&manager, "/hub/v1/events", &json!({"event_type": ORDER, "payload": &large})).await;
    assert_eq!(refused.status, 422, "{refused:?}");
    assert!(refused.text.contains("too expensive to check"), "{refused:?}");

    let mut hostile = Vec::new();
    for _ in 0..10 {
        let before = Instant::now();
        hostile.push(post_in_sql(db, "acme", ORDER, &large).await);
        assert!(before.elapsed() < Duration::from_secs(5), "no schema delays a business transaction");
    }
    let last = post_in_sql(db, "acme", "order.sent", &json!({})).await;
    // While the events of the tenant are being checked, those of another one arrive, and no transaction is open.
    for n in 0..20 {
        let event = post(&other, "order.paid", json!({"n": n}), None).await;
        wait_for_outcome(&other, &event, &subscriber, "delivered").await;
        assert_eq!(waiting_transactions(db).await, 0);
    }
    for event in &hostile {
        let rejected = wait_for_fan_out(&manager, event).await;
        let detail = text(&rejected["rejection"]["errors"][0]["detail"]);
        assert!(detail.contains("too expensive to check"), "{rejected}");
    }
    assert_eq!(wait_for_fan_out(&manager, &last).await["outcome"], "unmatched", "its turn comes after theirs");
    assert!(started.elapsed() < 4 * DEADLINE);
    app.stop().await;
}

/// The test has one thread. A check in it would stop everything until it ends, so each post of the other tenant would wait for
/// those before it.
#[tokio::test]
async fn the_posts_of_others_do_not_wait_for_expensive_checks_and_a_check_without_a_verdict_is_a_503() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let other = caller(&app, "manage", "other").await;
    add_type(&manager, ORDER, expensive()).await;
    let large = json!({"event_type": ORDER, "payload": vec![json!(899); 60_000]});
    let send = async || {
        let answer = manager.post("/hub/v1/events", large.clone()).await;
        if answer.status != 422 {
            answer.assert_problem(503, "overloaded");
            assert_eq!(answer.header("retry-after"), "1");
        }
        answer.status
    };
    let is_over = AtomicBool::new(false);
    let attacker = async || {
        let mut refused = 0;
        while !is_over.load(Ordering::Relaxed) {
            refused += usize::from(send().await == 422);
        }
        refused
    };
    let bystander = async {
        for n in 0..20 {
            post(&other, "order.paid", json!({"n": n}), None).await;
        }
        is_over.store(true, Ordering::Relaxed);
    };
    let (refused, ()) = tokio::join!(join_all((0..8).map(|_| attacker())), bystander);
    let refused: usize = refused.into_iter().sum();
    assert!(refused < 8 * 20 / 2, "{refused} checks ended during 20 posts of the other tenant");

    let statuses = join_all((0..40).map(|_| send())).await;
    assert!(statuses.contains(&503), "{statuses:?}");
    eventually("a check has its verdict", DEADLINE, async || send().await == 422).await;
    app.stop().await;
}

/// The same for the registration of types, whose schemas are compiled, compared with previous ones, and applied to examples.
#[tokio::test]
async fn the_posts_of_others_do_not_wait_for_the_registration_of_expensive_types() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let other = caller(&app, "manage", "other").await;
    let enums: Vec<Value> = (0..150).map(|n| json!({"enum": [format!("x{n}")]})).collect();
    add_type(&manager, ORDER, json!({"anyOf": enums})).await;
    let patterns = |count: usize, pattern: fn(usize) -> String| -> Vec<Value> {
        (0..count).map(|n| json!({"pattern": pattern(n)})).collect()
    };
    // A version that is compared with 150 lists, and a type whose example is searched by slow patterns. Both are refused.
    let version = json!({"schema": {"anyOf": patterns(123, |n| format!("^y{{{n}}}z*$"))}});
    let example: String = (0..60_000_usize).map(|n| if n * n % 7 < 3 { 'a' } else { 'b' }).collect();
    let searched = json!({"anyOf": patterns(20, |n| format!("^(?:[ab]*a[ab]{{20}}|{n})*x$"))});
    let new_type = json!({"name": "order.sent", "schema": searched, "examples": [example]});
    let requests =
        [(format!("/hub/v1/event-types/{ORDER}/versions"), version), ("/hub/v1/event-types".to_owned(), new_type)];
    let is_over = AtomicBool::new(false);
    let attacker = async |number: usize| {
        let (path, body) = &requests[number % 2];
        let mut checked = 0;
        while !is_over.load(Ordering::Relaxed) {
            let status = manager.post(path, body.clone()).await.status;
            assert!([409, 422, 503].contains(&status), "{path}: {status}");
            checked += usize::from(status != 503);
        }
        checked
    };
    let bystander = async {
        for n in 0..20 {
            post(&other, "order.paid", json!({"n": n}), None).await;
        }
        is_over.store(true, Ordering::Relaxed);
    };
    let (checked, ()) = tokio::join!(join_all((0..8).map(attacker)), bystander);
    let checked: usize = checked.into_iter().sum();
    assert!(checked < 8 * 20 / 2, "{checked} registrations ended during 20 posts of the other tenant");
    app.stop().await;
}

/// Posts until there is a verdict: on a busy machine, a check may take more than the second for which a request waits.
async fn decided(manager: &Client, path: &str, body: &Value) -> Response {
    eventually("the schema gets its verdict", DEADLINE, async || match manager.post(path, body.clone()).await {
        answer if answer.status == 503 => Err(answer),
        answer => Ok(answer),
    })
    .await
}

#[tokio::test]
async fn a_schema_that_costs_too_much_is_refused_when_it_is_registered() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let names: Vec<String> = (0..5_100).map(|n| format!("{n:x}")).collect();
    let dependent: serde_json::Map<String, Value> = names.into_iter().map(|name| (name, json!(["a"]))).collect();
    let schema = json!({"items": {"dependentRequired": dependent}});
    let refused = manager.post("/hub/v1/event-types", json!({"name": ORDER, "schema": schema})).await;
    assert_eq!(refused.json()["errors"][0]["pointer"], "/schema/items/dependentRequired", "{refused:?}");

    let enums: Vec<Value> = (0..150).map(|n| json!({"enum": [format!("x{n}")]})).collect();
    let patterns: Vec<Value> = (0..123).map(|n| json!({"pattern": format!("^y{{{n}}}z*$")})).collect();
    add_type(&manager, ORDER, json!({"anyOf": enums})).await;
    let path = format!("/hub/v1/event-types/{ORDER}/versions");
    let compared = decided(&manager, &path, &json!({"schema": {"anyOf": patterns}})).await;
    compared.assert_problem(409, "breaking-change");

    // The compiled schemas of a tenant are limited together.
    let large: Vec<Value> = (0..30).map(|n| json!({"pattern": format!(r"^{n}\W{{40}}")})).collect();
    let mut last = None;
    for n in 0..40 {
        let new = json!({"name": format!("large.n{n}"), "schema": {"anyOf": &large}});
        let made = decided(&manager, "/hub/v1/event-types", &new).await;
        if made.status != 201 {
            last = Some(made);
            break;
        }
    }
    last.expect("the limit is reached").assert_problem(409, "catalogue-too-large");
    app.stop().await;
}
