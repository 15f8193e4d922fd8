//! The API of streams: settings, leases, cursors, seeking, retention, and who may call it.

use chrono::{DateTime, Utc};
use hyper::Method;
use serde_json::{Value, json};
use server::settings::Role;
use testkit::{TestApp, eventually};

use crate::hub::fixture::{Fixture, error_pointers, numbered_events, post, post_batch};
use crate::hub::process::Replica;
use crate::hub::stream_fixture::{acknowledge, create_stream, end_lease, items, numbers, pull, pull_count, seek, send};
use crate::support::{DEADLINE, caller, collect_pages, text};

#[tokio::test]
async fn a_stream_is_created_shown_changed_and_deleted() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    let made = create_stream(&manager, json!({"event_types": ["order.*"], "ordering_key": "/id"})).await;
    assert_eq!((&made["name"], &made["ordering_key"], &made["version"]), (&json!("orders"), &json!("/id"), &json!(1)));
    let again = json!({"name": "orders", "event_types": ["*"]});
    manager.post("/hub/v1/streams", again).await.assert_problem(409, "stream-exists");
    let invalid = manager.post("/hub/v1/streams", json!({"name": "x", "event_types": [], "ordering_key": "id"})).await;
    assert_eq!(error_pointers(&invalid), ["/event_types", "/ordering_key"]);
    for name in ["a", "b"] {
        create_stream(&manager, json!({"name": name})).await;
    }
    let names = collect_pages(&manager, "/hub/v1/streams?limit=2").await;
    assert_eq!(names.iter().map(|stream| text(&stream["name"])).collect::<Vec<_>>(), ["a", "b", "orders"]);
    let path = "/hub/v1/streams/orders";
    let change = |change: Value| Some(change);
    let changed = manager.send(Method::PATCH, path, change(json!({"ordering_key": null}))).await;
    assert!(changed.status == 200 && changed.json().get("ordering_key").is_none(), "{changed:?}");
    let stale =
        manager.with_header("if-match", "\"1-0\"").send(Method::PATCH, path, change(json!({"filter": null}))).await;
    assert_eq!(stale.status, 412, "{stale:?}");
    let shown = manager.get(path).await.json();
    assert_eq!((shown["parts"].as_array().unwrap().len(), &shown["lag"]["messages"]), (16, &json!(0)));
    assert_eq!(manager.delete(path).await.status, 204);
    manager.get(path).await.assert_problem(404, "stream-not-found");
    for number in 0..98 {
        create_stream(&manager, json!({"name": format!("stream-{number}")})).await;
    }
    let one_more = manager.post("/hub/v1/streams", json!({"name": "one-more", "event_types": ["*"]})).await;
    one_more.assert_problem(409, "too-many-streams");
    app.stop().await;
}

#[tokio::test]
async fn no_route_serves_another_tenant_or_a_producer() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    post(&manager, "order.paid", json!({"n": 1}), None).await;
    let pulled = pull_count(&manager, "a", 1).await;
    let (stranger, producer) = (caller(&app, "manage", "other").await, caller(&app, "ingest", "acme").await);
    let cursor = &pulled["cursor"];
    let requests = [
        (Method::GET, "/hub/v1/streams/orders", None),
        (Method::PATCH, "/hub/v1/streams/orders", Some(json!({"event_types": ["x"]}))),
        (Method::DELETE, "/hub/v1/streams/orders", None),
        (Method::POST, "/hub/v1/streams/orders/pull", Some(json!({"reader": "a"}))),
        (Method::POST, "/hub/v1/streams/orders/acknowledge", Some(json!({"reader": "a", "cursor": cursor}))),
        (Method::POST, "/hub/v1/streams/orders/seek", Some(json!({"position": "newest", "force": true}))),
        (Method::POST, "/hub/v1/streams/orders/release", Some(json!({"reader": "a"}))),
    ];
    for (method, path, body) in requests {
        stranger.send(method.clone(), path, body.clone()).await.assert_problem(404, "stream-not-found");
        producer.send(method, path, body).await.assert_problem(403, "forbidden");
    }
    assert_eq!(stranger.get("/hub/v1/streams").await.json()["items"], json!([]));
    producer.get("/hub/v1/streams").await.assert_problem(403, "forbidden");
    // A stream of the same name has other cursors.
    create_stream(&stranger, json!({})).await;
    let foreign = send(&stranger, "acknowledge", json!({"reader": "a", "cursor": cursor})).await;
    assert_eq!(error_pointers(&foreign), ["/cursor"]);
    let event = &items(&pulled)[0]["event_id"];
    send(&stranger, "seek", json!({"event_id": event})).await.assert_problem(404, "event-not-found");
    assert_eq!(items(&pull(&manager, json!({"reader": "a"})).await).len(), 1, "nothing has changed");
    app.stop().await;
}

#[tokio::test]
async fn a_cursor_is_refused_after_the_lease_was_lost_and_changes_nothing() {
    let Fixture { database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({})).await;
    post_batch(&manager, numbered_events(20, 1..=2)).await;
    let first = pull_count(&manager, "a", 40).await;
    assert_eq!(items(&pull(&manager, json!({"reader": "b"})).await).len(), 0, "a has all parts");
    end_lease(database.pool(), "a").await;
    let second = pull(&manager, json!({"reader": "b", "max": 1000})).await;
    assert_eq!((items(&second).len(), second["parts"].as_array().unwrap().len()), (40, 16));
    let late = send(&manager, "acknowledge", json!({"reader": "a", "cursor": first["cursor"]})).await;
    late.assert_problem(409, "lease-lost");
    let late = send(&manager, "pull", json!({"reader": "a", "acknowledge": first["cursor"]})).await;
    late.assert_problem(409, "lease-lost");
    let stolen = send(&manager, "acknowledge", json!({"reader": "a", "cursor": second["cursor"]})).await;
    stolen.assert_problem(409, "lease-lost");
    assert_eq!(manager.get("/hub/v1/streams/orders").await.json()["lag"]["messages"], 40);
    let tampered = text(&second["cursor"]).replace('A', "B");
    let refused = send(&manager, "acknowledge", json!({"reader": "b", "cursor": tampered})).await;
    assert_eq!(error_pointers(&refused), ["/cursor"]);
    // An acknowledgement with the next pull.
    let next = pull(&manager, json!({"reader": "b", "acknowledge": second["cursor"]})).await;
    assert_eq!(items(&next).len(), 0);
    assert_eq!(manager.get("/hub/v1/streams/orders").await.json()["lag"]["messages"], 0);
    // A released part is free at once, although the lease has not ended.
    post_batch(&manager, numbered_events(20, [3])).await;
    let third = pull_count(&manager, "b", 20).await;
    assert_eq!(send(&manager, "release", json!({"reader": "b"})).await.status, 204);
    send(&manager, "acknowledge", json!({"reader": "b", "cursor": third["cursor"]}))
        .await
        .assert_problem(409, "lease-lost");
    pull_count(&manager, "c", 20).await;
    // After a failover, numbers may be those of other messages.
    let fourth = pull(&manager, json!({"reader": "c"})).await;
    sqlx::query("update pillarbox.incarnation set id = gen_random_uuid()").execute(database.pool()).await.unwrap();
    send(&manager, "acknowledge", json!({"reader": "c", "cursor": fourth["cursor"]}))
        .await
        .assert_problem(409, "lease-lost");
    app.stop().await;
}

#[tokio::test]
async fn a_stream_continues_where_a_seek_says() {
    let Fixture { database: _database, app, manager } = Fixture::start().await;
    create_stream(&manager, json!({"filter": [{"pointer": "/n", "op": "ne", "value": 0}]})).await;
    let filtered = post(&manager, "order.paid", json!({"n": 0}), None).await;
    let mut events = Vec::new();
    for n in 1..=6 {
        events.push(post(&manager, "order.paid", json!({ "n": n }), Some(&format!("key-{n}"))).await);
    }
    let all = pull_count(&manager, "a", 6).await;
    assert_eq!(numbers(&all), [1, 2, 3, 4, 5, 6]);
    send(&manager, "seek", json!({"position": "newest"})).await.assert_problem(409, "stream-in-use");
    let rest = async |to: Value| {
        seek(&manager, to).await;
        numbers(&pull(&manager, json!({"reader": "a", "lease_seconds": 5})).await)
    };
    assert_eq!(rest(json!({"position": "newest", "force": true})).await, [0; 0]);
    let stale = send(&manager, "acknowledge", json!({"reader": "a", "cursor": all["cursor"]})).await;
    stale.assert_problem(409, "lease-lost");
    assert_eq!(rest(json!({"position": "oldest", "force": true})).await, [1, 2, 3, 4, 5, 6]);
    // The gap in `webhook-seq` is after the last event that arrived.
    assert_eq!(rest(json!({"event_id": events[3], "force": true})).await, [5, 6]);
    let time: DateTime<Utc> = text(&items(&all)[2]["received_at"]).parse().unwrap();
    assert_eq!(rest(json!({"time": time, "force": true})).await, [3, 4, 5, 6]);
    let later = time + chrono::TimeDelta::hours(1);
    assert_eq!(rest(json!({"time": later, "force": true})).await, [0; 0]);
    for time in ["-4713-11-23T00:00:00Z", "+262142-01-01T00:00:00Z"] {
        assert_eq!(send(&manager, "seek", json!({"time": time, "force": true})).await.status, 422);
    }
    let absent = send(&manager, "seek", json!({"event_id": filtered, "force": true})).await;
    absent.assert_problem(404, "event-not-in-stream");
    let unknown = format!("evt_{}", uuid::Uuid::now_v7());
    send(&manager, "seek", json!({"event_id": unknown, "force": true})).await.assert_problem(404, "event-not-found");
    let two = send(&manager, "seek", json!({"position": "oldest", "event_id": events[0]})).await;
    assert_eq!(error_pointers(&two), ["/event_id"]);
    assert_eq!(error_pointers(&send(&manager, "seek", json!({})).await), ["/position"]);
    app.stop().await;
}

#[tokio::test]
async fn a_position_that_retention_has_passed_is_answered_with_how_to_continue() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    create_stream(&manager, json!({})).await;
    for n in 1..=4 {
        post(&manager, "order.paid", json!({ "n": n }), Some("key")).await;
    }
    let pulled = pull(&manager, json!({"reader": "a", "max": 1, "wait_ms": 5000})).await;
    assert_eq!(numbers(&pulled), [1]);
    acknowledge(&manager, "a", &pulled).await;
    pull_count(&manager, "a", 3).await;
    app.stop().await;
    // 1 and 2 are old, one in the partition of its day and one in the overflow partition; the first is acknowledged.
    sqlx::raw_sql(
        "do $$
         declare day date := current_date - 20;
         begin
             execute format('create table pillarbox_hub.stream_message_%s partition of pillarbox_hub.stream_message
                             for values from (%L) to (%L)', to_char(day, 'YYYYMMDD'), day, day + 1);
         end $$;
         update pillarbox_hub.stream_message set at = current_date - interval '20 days' + interval '6 hours' where n = 2;
         update pillarbox_hub.stream_message set at = at - interval '30 days' where n = 1",
    )
    .execute(db)
    .await
    .unwrap();
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Api, Role::Maintain]).await;
    let manager = caller(&app, "manage", "acme").await;
    let left = "select n from pillarbox_hub.stream_message order by n";
    eventually("old messages are dropped", DEADLINE, async || {
        let left: Vec<i64> = sqlx::query_scalar(left).fetch_all(db).await.unwrap();
        if left == [3, 4] { Ok(()) } else { Err(left) }
    })
    .await;
    let lapsed = send(&manager, "pull", json!({"reader": "a"})).await;
    lapsed.assert_problem(410, "position-lapsed");
    assert!(text(&lapsed.json()["detail"]).contains("/seek"), "{lapsed:?}");
    let state = manager.get("/hub/v1/streams/orders").await.json();
    assert_eq!(state["parts"].as_array().unwrap().iter().filter(|part| part["lapsed"] == true).count(), 1);
    let old = Utc::now() - chrono::TimeDelta::days(25);
    send(&manager, "seek", json!({"time": old, "force": true})).await.assert_problem(410, "position-lapsed");
    seek(&manager, json!({"position": "oldest", "force": true})).await;
    let pulled = pull(&manager, json!({"reader": "a"})).await;
    assert_eq!(numbers(&pulled), [3, 4]);
    acknowledge(&manager, "a", &pulled).await;
    // The content of a message that is still in the stream.
    seek(&manager, json!({"position": "oldest", "force": true})).await;
    sqlx::raw_sql("delete from pillarbox.log where source = 'hub' and payload->>'n' = '3'").execute(db).await.unwrap();
    send(&manager, "pull", json!({"reader": "a"})).await.assert_problem(410, "position-lapsed");
    app.stop().await;
}

#[tokio::test]
async fn unread_messages_are_retained_for_behind_days() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let db = database.pool();
    create_stream(&manager, json!({})).await;
    post(&manager, "order.paid", json!({"n": 1}), Some("key")).await;
    pull_count(&manager, "a", 1).await;
    let settings = app.settings.clone();
    app.stop().await;
    sqlx::raw_sql("update pillarbox_hub.stream_message set at = at - interval '13 days'").execute(db).await.unwrap();
    let mut maintaining = Replica::start_beside(&settings, "maintain");
    let held = "select now() - from_at between interval '12 days' and interval '14 days' from pillarbox.retention_hold where holder = 'hub'";
    eventually("the log is held", DEADLINE, async || {
        sqlx::query_scalar::<_, bool>(held).fetch_optional(db).await.unwrap() == Some(true)
    })
    .await;
    let left: i64 =
        sqlx::query_scalar("select count(*) from pillarbox_hub.stream_message").fetch_one(db).await.unwrap();
    assert_eq!(left, 1, "it is older than `log_days`, and younger than `behind_days`");
    let lapsed = async || maintaining.metric("pillarbox_hub_streams_lapsed").await;
    eventually("the streams are measured", DEADLINE, async || lapsed().await == Some(0.0)).await;
    assert_eq!(maintaining.metric("pillarbox_hub_stream_lag_messages").await, Some(1.0));
    assert!(maintaining.metric("pillarbox_hub_stream_lag_seconds").await.unwrap() > 1_100_000.0);
    assert!(maintaining.process.terminate().await.success());

    // Three days later, no reader has pulled it. Whole days are deleted, so it may be there for a day longer.
    sqlx::raw_sql("update pillarbox_hub.stream_message set at = at - interval '3 days'").execute(db).await.unwrap();
    let mut maintaining = Replica::start_beside(&settings, "maintain");
    eventually("it is deleted", DEADLINE, async || {
        let left = sqlx::query_scalar::<_, i64>("select count(*) from pillarbox_hub.stream_message");
        left.fetch_one(db).await.unwrap() == 0
    })
    .await;
    assert!(maintaining.process.terminate().await.success());
}
