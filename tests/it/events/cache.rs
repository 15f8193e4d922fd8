//! The cache of the events service: never stale after a change, cheap under load, and optional.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use runtime::secret::Secret;
use serde_json::json;
use server::settings::Settings;
use sqlx::PgPool;
use testkit::{Client, FaultProxy, TestApp, TestRedis, eventually};

use crate::events::fixture::{
    DEADLINE, Fixture, event_id, event_path, join_message, meetup, meetup_with, patch_event, post_action,
    post_messages, publish_event, start_replica,
};

fn with_redis(redis: &TestRedis, url: String) -> impl Fn(&mut Settings) + use<> {
    let prefix = redis.prefix().to_owned();
    move |settings| {
        settings.redis_url = Some(Secret::new(url.clone()));
        settings.redis_prefix = prefix.clone();
    }
}

/// Changes a status repeatedly, and checks after each change that no reader sees the previous one.
async fn check_no_stale_reads(owner: &Client, readers: &[Client]) {
    let event = publish_event(owner, meetup()).await;
    let stop = Arc::new(AtomicBool::new(false));
    // These readers fill the cache all the time, also with late results.
    let busy: Vec<_> = readers
        .iter()
        .cycle()
        .take(8)
        .map(|reader| {
            let (reader, stop, path) = (reader.clone(), stop.clone(), event_path(&event));
            tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    reader.get(&path).await;
                    reader.get("/event/v1/events").await;
                }
            })
        })
        .collect();
    for round in 0..25 {
        let (action, status, listed) = if round % 2 == 0 { ("unpublish", 404, 0) } else { ("publish", 200, 1) };
        assert_eq!(post_action(owner, &event, action).await.status, 200);
        for reader in readers {
            assert_eq!(reader.get(&event_path(&event)).await.status, status, "after {action} no {round}");
            let feed = reader.get("/event/v1/events").await.json();
            assert_eq!(feed["items"].as_array().unwrap().len(), listed, "after {action} no {round}");
        }
    }
    post_action(owner, &event, "publish").await;
    assert_eq!(post_action(owner, &event, "cancel").await.status, 200);
    for reader in readers {
        assert_eq!(reader.get(&event_path(&event)).await.json()["status"], "canceled");
    }
    stop.store(true, Ordering::SeqCst);
    for reader in busy {
        reader.await.unwrap();
    }
}

#[tokio::test]
async fn no_process_shows_a_stale_status_from_its_memory() {
    let fixture = Fixture::start().await;
    let other = start_replica(&fixture.database).await;
    check_no_stale_reads(&fixture.owner, &[fixture.app.anonymous(), other.anonymous()]).await;
    other.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn no_process_shows_a_stale_status_from_redis() {
    let redis = TestRedis::new();
    let fixture = Fixture::start_with(with_redis(&redis, redis.url())).await;
    let other = TestApp::start_with(&fixture.database, with_redis(&redis, redis.url())).await;
    check_no_stale_reads(&fixture.owner, &[fixture.app.anonymous(), other.anonymous()]).await;
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("{}*", redis.prefix())).query_async(&mut connection).await.unwrap();
    assert!(keys.iter().any(|key| key.contains(":event:")), "{keys:?}");
    assert!(keys.iter().any(|key| key.contains(":feed:public:")), "{keys:?}");
    other.stop().await;
    fixture.app.stop().await;
}

/// The number of scans of an index, as PostgreSQL has counted so far.
async fn reads(db: &PgPool, index: &str) -> i64 {
    sqlx::query_scalar("select idx_scan from pg_stat_user_indexes where indexrelname = $1")
        .bind(index)
        .fetch_one(db)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_thousand_concurrent_reads_of_one_event_cost_few_queries() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let reader = fixture.app.anonymous();
    let crowd = async || {
        let path = event_path(&event);
        let answers = join_all((0..500).map(|_| reader.get(&path))).await;
        assert!(answers.iter().all(|answer| answer.status == 200));
        let feeds = join_all((0..500).map(|_| reader.get("/event/v1/events"))).await;
        assert!(
            feeds.iter().all(|answer| answer.status == 200 && answer.json()["items"].as_array().unwrap().len() == 1)
        );
    };
    crowd().await;
    let metrics = reader.get("/metrics").await.text;
    assert!(metrics.contains("pillarbox_events_cache_total{outcome=\"hit\"}"), "{metrics}");
    fixture.app.stop().await;
    // A backend reports its statistics when it ends.
    eventually("the statistics are reported", Duration::from_secs(10), async || {
        let (details, feeds) =
            (reads(fixture.database.pool(), "event_pkey").await, reads(fixture.database.pool(), "event_latest").await);
        match details > 0 && feeds > 0 {
            true => Ok(()),
            false => Err((details, feeds)),
        }
    })
    .await;
    let (details, feeds) =
        (reads(fixture.database.pool(), "event_pkey").await, reads(fixture.database.pool(), "event_latest").await);
    assert!(details < 150, "500 reads made {details} queries");
    assert!(feeds <= 2, "one page was read {feeds} times");
}

#[tokio::test]
async fn counts_in_a_feed_page_are_at_most_fifteen_seconds_old() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let reader = fixture.app.anonymous();
    let shown =
        async || reader.get("/event/v1/events").await.json()["items"][0]["active_participants"].as_i64().unwrap();
    assert_eq!(shown().await, 0);
    post_messages(fixture.db(), "joins", &[join_message(event_id(&event), 2, 1)]).await;
    eventually("the event shows the count", DEADLINE, async || {
        reader.get(&event_path(&event)).await.json()["active_participants"] == 2
    })
    .await;
    eventually("the feed page shows the count", Duration::from_secs(16), async || shown().await == 2).await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_unavailable_redis_makes_answers_slower_but_not_wrong() {
    let redis = TestRedis::new();
    let proxy = FaultProxy::in_front_of(&redis.url()).await;
    let fixture = Fixture::start_with(with_redis(&redis, proxy.url(&redis.url()))).await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let reader = fixture.app.anonymous();
    // Returns how long three pages took at most, and how long sixty took.
    let check_answers = async |title: &str| {
        let mut slowest = Duration::ZERO;
        assert_eq!(patch_event(&fixture.owner, &event, json!({"title": title})).await.status, 200);
        for _ in 0..3 {
            let started = Instant::now();
            assert_eq!(reader.get(&event_path(&event)).await.json()["title"], title);
            assert_eq!(reader.get("/event/v1/events").await.json()["items"][0]["title"], title);
            assert_eq!(reader.get("/event/v1/meta/cities?q=z").await.json()["items"][0]["city"], "Zürich");
            slowest = slowest.max(started.elapsed());
        }
        // None of these pages is cached; they must not all wait for a Redis timeout, of 50 ms.
        let started = Instant::now();
        for limit in 21..=80 {
            let page = reader.get(&format!("/event/v1/events?limit={limit}")).await.json();
            assert_eq!(page["items"][0]["title"], title);
        }
        (slowest, started.elapsed())
    };
    // Beside whatever else this machine does.
    let (usual_few, usual_many) = check_answers("with Redis").await;
    let check_slower_answers = async |title: &str| {
        let (few, many) = check_answers(title).await;
        assert!(few < Duration::from_secs(1).max(5 * usual_few), "{title}: {few:?}, usually {usual_few:?}");
        let many_max = (usual_many + Duration::from_millis(1_500)).max(3 * usual_many);
        assert!(many < many_max, "{title}: {many:?}, usually {usual_many:?}");
    };
    proxy.stall();
    check_slower_answers("Redis hangs").await;
    proxy.refuse();
    check_slower_answers("Redis is down").await;
    let ready = reader.get("/readyz").await;
    assert_eq!(ready.status, 200, "{ready:?}");
    proxy.pass();
    check_slower_answers("with Redis again").await;
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let cached = eventually("a copy is stored in Redis again", Duration::from_secs(10), async || {
        reader.get(&event_path(&publish_event(&fixture.owner, meetup_with(json!({"city": "Bern"}))).await)).await;
        let key = redis.key(&format!("event:{}", event_id(&event)));
        patch_event(&fixture.owner, &event, json!({"title": format!("again {}", rand::random::<u32>())})).await;
        reader.get(&event_path(&event)).await;
        redis::cmd("GET")
            .arg(key)
            .query_async::<Option<Vec<u8>>>(&mut connection)
            .await
            .unwrap()
            .filter(|copy| String::from_utf8_lossy(copy).contains("again"))
    })
    .await;
    assert!(!cached.is_empty());
    fixture.app.stop().await;
}

#[tokio::test]
async fn terminated_database_connections_cause_no_error() {
    let fixture = Fixture::start().await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let reader = fixture.app.anonymous();
    for _ in 0..3 {
        for path in [event_path(&event), "/event/v1/events".to_owned(), "/event/v1/meta/cities".to_owned()] {
            let answer = reader.get(&path).await;
            assert_eq!(answer.status, 200, "{path}: {answer:?}");
        }
        sqlx::query(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()",
        )
        .execute(fixture.db())
        .await
        .unwrap();
    }
    fixture.app.stop().await;
}

#[tokio::test]
async fn foreign_values_in_redis_are_ignored() {
    let redis = TestRedis::new();
    let fixture = Fixture::start_with(with_redis(&redis, redis.url())).await;
    let event = publish_event(&fixture.owner, meetup()).await;
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    for value in ["", "nonsense", "1.0\n1\n\n{\"status\":\"draft\"}", "2.0\n1\n\n{\"status\":\"long ago\"}"] {
        let key = redis.key(&format!("event:{}", event_id(&event)));
        let () = redis::cmd("SET").arg(key).arg(value).query_async(&mut connection).await.unwrap();
        let app = TestApp::start_with(&fixture.database, with_redis(&redis, redis.url())).await;
        assert_eq!(app.anonymous().get(&event_path(&event)).await.json(), event, "{value}");
        app.stop().await;
    }
    fixture.app.stop().await;
}
