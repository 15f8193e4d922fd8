//! The Redis of progress is away: progress answers 503 at once, everything else works, and it recovers by itself.

use std::time::{Duration, Instant};

use runtime::secret::Secret;
use serde_json::json;
use server::migrations;
use testkit::{Client, FaultProxy, Response, TestApp, TestDatabase, TestRedis, eventually};

use crate::identity::fixture::{PASSWORD, person, unlimited};
use crate::progress::fixture::{PROJECTS, counts, create_with, mark, mark_numbers, show, wait_until_completed};
use crate::support::DEADLINE;

/// Far below the time limit of a request, and tolerant of a busy machine.
const AT_ONCE: Duration = Duration::from_millis(1_500);

/// Sends a request that must be refused at once.
async fn refused_at_once(request: impl Future<Output = Response>) {
    let began = Instant::now();
    let answer = request.await;
    let took = began.elapsed();
    answer.assert_problem(503, "unavailable");
    let seconds: u64 = answer.header("retry-after").parse().unwrap();
    assert!((1..=4).contains(&seconds), "{answer:?}");
    assert!(took < AT_ONCE, "{took:?}");
}

async fn wait_until_refused(client: &Client, id: &str) {
    eventually("the outage is noticed", DEADLINE, async || match show(client, id).await {
        answer if answer.status == 503 => Ok(()),
        answer => Err(answer),
    })
    .await;
}

#[tokio::test]
async fn without_redis_progress_is_unavailable_and_logins_work() {
    let (database, redis) = (TestDatabase::new(&migrations()).await, TestRedis::new());
    let proxy = FaultProxy::in_front_of(&redis.url()).await;
    let url = proxy.url(&redis.url());
    let app = TestApp::start_with(&database, |settings| {
        unlimited(settings);
        settings.redis_prefix = redis.prefix().to_owned();
        settings.progress.redis_url = Some(Secret::new(url));
    })
    .await;
    let ada = person(&app, database.pool(), "ada").await;
    let finished = create_with(&ada.client, 1).await;
    mark(&ada.client, &finished, &["a"]).await;
    let id = create_with(&ada.client, 4).await;
    mark_numbers(&ada.client, &id, 2).await;

    // Refused, and then silent: the server accepts connections and does not answer.
    for outage in [FaultProxy::refuse, FaultProxy::stall] {
        outage(&proxy);
        wait_until_refused(&ada.client, &id).await;
        refused_at_once(show(&ada.client, &id)).await;
        refused_at_once(mark_numbers(&ada.client, &id, 3)).await;
        refused_at_once(ada.client.post(PROJECTS, json!({}))).await;
        refused_at_once(ada.client.get(PROJECTS)).await;
        refused_at_once(ada.client.get(&format!("{PROJECTS}/{id}/events"))).await;
        assert_eq!(counts(&show(&ada.client, &finished).await), ("DONE".to_owned(), 1, 1, 0), "the archive has it");
        let login = json!({"email": ada.email, "password": PASSWORD});
        assert_eq!(app.anonymous().post("/identity/v1/login", login).await.status, 200);
        let report = app.anonymous().get("/readyz").await;
        let is_named = |check: &serde_json::Value| check["name"] == "progress-redis" && check["up"] == false;
        assert!(report.json()["checks"].as_array().unwrap().iter().any(is_named), "{report:?}");
        assert_eq!((report.status, &report.json()["status"]), (200, &json!("degraded")), "{report:?}");

        proxy.pass();
        // The next attempt is at most 4 s away. Redis was not restarted, so nothing is lost.
        eventually("it recovers by itself", DEADLINE, async || match show(&ada.client, &id).await {
            answer if answer.status == 200 => Ok(()),
            answer => Err(answer),
        })
        .await;
    }
    assert_eq!(counts(&show(&ada.client, &id).await), ("PROCESSING".to_owned(), 4, 2, 0));
    mark_numbers(&ada.client, &id, 4).await;
    wait_until_completed(database.pool(), &id).await;
    app.stop().await;
}
