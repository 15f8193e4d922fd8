//! The limits of a tenant and of a key, which all processes share.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, TestApp, TestDatabase, eventually};

use crate::hub::fixture::{Fixture, error_pointers, subscribe, test_size};
use crate::hub::process::Replica;
use crate::support::{DEADLINE, caller, text};

async fn change_tenant(admin: &Client, change: Value) {
    let changed = admin.send(Method::PATCH, "/admin/v1/tenants/acme", Some(change)).await;
    assert_eq!(changed.status, 200, "{changed:?}");
}

#[tokio::test]
async fn the_limits_of_a_tenant_apply_to_subscribers_payload_and_rate() {
    let Fixture { database: _database, app, manager } =
        Fixture::start_with(|settings| settings.hub.subscribers_max = 3).await;
    let admin = app.admin();
    let subscriber = json!({"name": "x", "url": "https://example.com/hook", "event_types": ["*"]});
    change_tenant(&admin, json!({"subscribers_max": 1, "payload_bytes_max": 20, "events_per_second_max": 5})).await;
    subscribe(&manager, "https://example.com/hook", json!({})).await;
    let refused = manager.post("/hub/v1/subscribers", subscriber.clone()).await;
    refused.assert_problem(409, "too-many-subscribers");
    assert!(refused.text.contains("at most 1 subscriber (the tenant's own"), "{refused:?}");
    let event = |payload: &str| json!({"event_type": "order.paid", "payload": payload});
    let refused = manager.post("/hub/v1/events", event("0123456789012345678")).await;
    assert_eq!(error_pointers(&refused), ["/payload"]);
    assert_eq!(manager.post("/hub/v1/events", event("012345678901234567")).await.status, 202);

    let batch = json!({"events": vec![event("x"); 4]});
    assert_eq!(manager.post("/hub/v1/events/batch", batch.clone()).await.status, 202);
    let refused = manager.post("/hub/v1/events/batch", batch.clone()).await;
    refused.assert_problem(429, "rate-limited");
    assert!(refused.text.contains("the limit of the tenant `acme` is 5 events per second"), "{refused:?}");
    let headers = ["ratelimit-limit", "ratelimit-remaining", "retry-after"].map(|name| refused.header(name).to_owned());
    assert_eq!(headers, ["5", "0", "1"]);
    change_tenant(&admin, json!({"subscribers_max": null, "events_per_second_max": null})).await;
    for _ in 0..5 {
        assert_eq!(manager.post("/hub/v1/events/batch", batch.clone()).await.status, 202);
    }
    assert_eq!(manager.post("/hub/v1/subscribers", subscriber).await.status, 201);
    app.stop().await;
}

/// Sends requests to all clients in turn, as fast as they are answered, for this time. Returns how many were accepted.
async fn accepted_within(clients: &[&Client], time: Duration, accepted: u16, body: &Value) -> usize {
    let until = Instant::now() + time;
    let mut count = 0;
    while Instant::now() < until {
        let answers = clients.iter().map(|client| client.post("/hub/v1/events", body.clone()));
        for answer in futures_util::future::join_all(answers).await {
            assert!([accepted, 429].contains(&answer.status), "{answer:?}");
            count += usize::from(answer.status == accepted);
        }
    }
    count
}

/// Waits until these processes have exchanged their demands, so that each knows how many they are.
async fn wait_until_exchanged(db: &PgPool, processes: i64) {
    let count = "select count(*) from pillarbox_admin.rate_demand where subject = ''";
    let is_complete = async || sqlx::query_scalar::<_, i64>(count).fetch_one(db).await.unwrap() == processes;
    eventually("the processes are known", DEADLINE, is_complete).await;
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await.unwrap();
    let exchanged = "select min(at) > $1 from pillarbox_admin.rate_demand where subject = ''";
    let is_exchanged = async || sqlx::query_scalar::<_, bool>(exchanged).bind(now).fetch_one(db).await.unwrap();
    eventually("the processes know each other", DEADLINE, is_exchanged).await;
}

/// Two processes accept together what one of them would accept alone. The factor covers the time in which one process does not
/// know the demand of the other yet; without an exchange it would be 2.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_gets_no_more_from_two_processes_than_from_one() {
    const LIMIT: u32 = 60;
    let database = TestDatabase::new(&migrations()).await;
    let limited = |settings: &mut Settings| settings.rate_limit_per_second = LIMIT;
    let apps = [TestApp::start_with(&database, limited).await, TestApp::start_with(&database, limited).await];
    let at_both = |client: Client| apps.each_ref().map(|app| app.anonymous().bearer(client.credential()));
    let (busy, quiet) = (caller(&apps[0], "manage", "acme").await, caller(&apps[0], "manage", "acme").await);
    let (busy, quiet) = (at_both(busy), at_both(quiet));
    wait_until_exchanged(database.pool(), 2).await;
    let (began, mut accepted) = (Instant::now(), 0.0);
    for _ in 0..150 {
        for answer in futures_util::future::join_all(busy.iter().map(|client| client.get("/hub/v1/events"))).await {
            assert!([200, 429].contains(&answer.status), "{answer:?}");
            accepted += f64::from(u8::from(answer.status == 200));
        }
    }
    let of_one = f64::from(LIMIT) * (1.0 + began.elapsed().as_secs_f64());
    assert!(accepted <= of_one * 1.6, "{accepted} were accepted; one process would have accepted {of_one}");
    for client in &quiet {
        assert_eq!(client.get("/hub/v1/events").await.status, 200, "the limit is that of a key, not of its tenant");
    }
    for app in apps {
        app.stop().await;
    }
}

/// Needs some seconds for each measurement, so it is a part of the soak run only. The short form is above, and the distribution
/// of shares is tested without processes in `http_kit::admission::limit`.
#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_the_limits_of_a_key_and_of_a_tenant() {
    if test_size(0, 1) == 0 {
        return;
    }
    const TENANT_LIMIT: usize = 40;
    const KEY_LIMIT: usize = 60;
    let database = TestDatabase::new(&migrations()).await;
    let limit = KEY_LIMIT.to_string();
    let start = || Replica::start_with(&database.url(), "api", &[("PILLARBOX_RATE_LIMIT_PER_SECOND", &limit)]);
    let (first, second) = (start(), start());
    let admin = first.admin().await;
    change_tenant(&admin, json!({"events_per_second_max": TENANT_LIMIT})).await;
    let new_key = async |tenant: &str| {
        let made = admin.post("/admin/v1/keys", json!({"name": "x", "role": "ingest", "tenant": tenant})).await.json();
        text(&made["key"]).to_owned()
    };
    let second_base = second.process.base_url().await;
    let both = |key: &str| [Client::new(admin.base()).bearer(key), Client::new(&second_base).bearer(key)];
    wait_until_exchanged(database.pool(), 2).await;
    let event = json!({"event_type": "order.paid", "payload": {}});
    // A caller at one process gets the whole limit, and at both processes not more.
    for (tenant, limit) in [("acme", TENANT_LIMIT), ("other", KEY_LIMIT)] {
        let clients = both(&new_key(tenant).await);
        for clients in [vec![&clients[0], &clients[1]], vec![&clients[0]]] {
            accepted_within(&clients, Duration::from_millis(2_500), 202, &event).await;
            let seconds = 3;
            let accepted = accepted_within(&clients, Duration::from_secs(seconds), 202, &event).await;
            let (low, high) = (limit * seconds as usize * 7 / 10, limit * (seconds as usize + 1) * 12 / 10);
            assert!((low..=high).contains(&accepted), "{tenant}: {accepted} with {} processes", clients.len());
        }
    }
}
