//! Copies: never older than what was changed, and not in anyone's way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use kit::secret::Secret;
use pillarbox::settings::Settings;
use serde_json::json;
use sqlx::PgPool;
use testkit::{Client, FaultProxy, TestApp, TestRedis, drain};

use crate::events_world::{
    PATIENCE, World, act, id, joined, meetup, meetup_with, patch, path, published, replica, say,
};

fn with_redis(redis: &TestRedis, url: String) -> impl Fn(&mut Settings) + use<> {
    let prefix = redis.prefix().to_owned();
    move |settings| {
        settings.redis_url = Some(Secret::new(url.clone()));
        settings.redis_prefix = prefix.clone();
    }
}

/// Changes a status again and again, and looks after each change, everywhere at once.
async fn nobody_sees_what_was_before(owner: &Client, readers: &[Client]) {
    let event = published(owner, meetup()).await;
    let stop = Arc::new(AtomicBool::new(false));
    // They fill copies all the time, also late ones.
    let busy: Vec<_> = readers
        .iter()
        .cycle()
        .take(8)
        .map(|reader| {
            let (reader, stop, path) = (reader.clone(), stop.clone(), path(&event));
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
        assert_eq!(act(owner, &event, action).await.status, 200);
        for reader in readers {
            assert_eq!(reader.get(&path(&event)).await.status, status, "after {action} no {round}");
            let feed = reader.get("/event/v1/events").await.json();
            assert_eq!(feed["items"].as_array().unwrap().len(), listed, "after {action} no {round}");
        }
    }
    act(owner, &event, "publish").await;
    assert_eq!(act(owner, &event, "cancel").await.status, 200);
    for reader in readers {
        assert_eq!(reader.get(&path(&event)).await.json()["status"], "canceled");
    }
    stop.store(true, Ordering::SeqCst);
    for reader in busy {
        reader.await.unwrap();
    }
}

#[tokio::test]
async fn no_process_shows_a_status_of_before_from_its_memory() {
    let world = World::start().await;
    let other = replica(&world.database).await;
    nobody_sees_what_was_before(&world.owner, &[world.app.anyone(), other.anyone()]).await;
    other.stop().await;
    world.app.stop().await;
}

#[tokio::test]
async fn no_process_shows_a_status_of_before_from_redis() {
    let redis = TestRedis::new();
    let world = World::start_with(with_redis(&redis, redis.url())).await;
    let other = TestApp::start_with(&world.database, with_redis(&redis, redis.url())).await;
    nobody_sees_what_was_before(&world.owner, &[world.app.anyone(), other.anyone()]).await;
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("{}*", redis.prefix())).query_async(&mut connection).await.unwrap();
    assert!(keys.iter().any(|key| key.contains(":event:")), "{keys:?}");
    assert!(keys.iter().any(|key| key.contains(":feed:public:")), "{keys:?}");
    other.stop().await;
    world.app.stop().await;
}

/// How often rows of a table were read by an index, as PostgreSQL counted so far.
async fn reads(db: &PgPool, index: &str) -> i64 {
    sqlx::query_scalar("select idx_scan from pg_stat_user_indexes where indexrelname = $1")
        .bind(index)
        .fetch_one(db)
        .await
        .unwrap()
}

#[tokio::test]
async fn a_crowd_at_one_event_costs_a_few_queries() {
    let world = World::start().await;
    let event = published(&world.owner, meetup()).await;
    let reader = world.app.anyone();
    let crowd = async || {
        let path = path(&event);
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
    world.app.stop().await;
    // A backend tells its counts when it ends.
    drain("the counts are told", Duration::from_secs(10), async || {
        let (details, feeds) =
            (reads(world.database.pool(), "event_pkey").await, reads(world.database.pool(), "event_latest").await);
        match details > 0 && feeds > 0 {
            true => Ok(()),
            false => Err((details, feeds)),
        }
    })
    .await;
    let (details, feeds) =
        (reads(world.database.pool(), "event_pkey").await, reads(world.database.pool(), "event_latest").await);
    assert!(details < 150, "500 readers made {details} queries");
    assert!(feeds <= 2, "one page was read {feeds} times");
}

#[tokio::test]
async fn a_page_says_of_counts_what_was_so_at_most_fifteen_seconds_ago() {
    let world = World::start().await;
    let event = published(&world.owner, meetup()).await;
    let reader = world.app.anyone();
    let shown =
        async || reader.get("/event/v1/events").await.json()["items"][0]["active_participants"].as_i64().unwrap();
    assert_eq!(shown().await, 0);
    say(world.db(), "joins", &[joined(id(&event), 2, 1)]).await;
    drain("the event's own count", PATIENCE, async || {
        reader.get(&path(&event)).await.json()["active_participants"] == 2
    })
    .await;
    drain("the page's", Duration::from_secs(16), async || shown().await == 2).await;
    world.app.stop().await;
}

#[tokio::test]
async fn without_redis_it_is_slower_and_not_wrong() {
    let redis = TestRedis::new();
    let proxy = FaultProxy::in_front_of(&redis.url()).await;
    let world = World::start_with(with_redis(&redis, proxy.url(&redis.url()))).await;
    let event = published(&world.owner, meetup()).await;
    let reader = world.app.anyone();
    let works = async |title: &str| {
        assert_eq!(patch(&world.owner, &event, json!({"title": title})).await.status, 200);
        for _ in 0..3 {
            let started = Instant::now();
            assert_eq!(reader.get(&path(&event)).await.json()["title"], title);
            assert_eq!(reader.get("/event/v1/events").await.json()["items"][0]["title"], title);
            assert_eq!(reader.get("/event/v1/meta/cities?q=z").await.json()["items"][0]["city"], "Zürich");
            assert!(started.elapsed() < Duration::from_secs(1), "{title}: {:?}", started.elapsed());
        }
        // None of these is a copy; they do not all wait for Redis.
        let started = Instant::now();
        for limit in 21..=80 {
            let page = reader.get(&format!("/event/v1/events?limit={limit}")).await.json();
            assert_eq!(page["items"][0]["title"], title);
        }
        assert!(started.elapsed() < Duration::from_secs(4), "{title}: {:?}", started.elapsed());
    };
    works("with Redis").await;
    proxy.stall();
    works("Redis hangs").await;
    proxy.refuse();
    works("Redis is down").await;
    let ready = reader.get("/readyz").await;
    assert_eq!(ready.status, 200, "{ready:?}");
    proxy.pass();
    works("with Redis again").await;
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let kept = drain("a copy comes to Redis again", Duration::from_secs(10), async || {
        reader.get(&path(&published(&world.owner, meetup_with(json!({"city": "Bern"}))).await)).await;
        let key = redis.key(&format!("event:{}", id(&event)));
        patch(&world.owner, &event, json!({"title": format!("again {}", rand::random::<u32>())})).await;
        reader.get(&path(&event)).await;
        redis::cmd("GET")
            .arg(key)
            .query_async::<Option<Vec<u8>>>(&mut connection)
            .await
            .unwrap()
            .filter(|copy| String::from_utf8_lossy(copy).contains("again"))
    })
    .await;
    assert!(!kept.is_empty());
    world.app.stop().await;
}

#[tokio::test]
async fn connections_that_the_database_ended_are_nobodys_problem() {
    let world = World::start().await;
    let event = published(&world.owner, meetup()).await;
    let reader = world.app.anyone();
    for _ in 0..3 {
        for path in [path(&event), "/event/v1/events".to_owned(), "/event/v1/meta/cities".to_owned()] {
            let answer = reader.get(&path).await;
            assert_eq!(answer.status, 200, "{path}: {answer:?}");
        }
        sqlx::query(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()",
        )
        .execute(world.db())
        .await
        .unwrap();
    }
    world.app.stop().await;
}

#[tokio::test]
async fn what_stands_in_redis_from_elsewhere_is_not_believed() {
    let redis = TestRedis::new();
    let world = World::start_with(with_redis(&redis, redis.url())).await;
    let event = published(&world.owner, meetup()).await;
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    for lie in ["", "nonsense", "1.0\n1\n\n{\"status\":\"draft\"}", "2.0\n1\n\n{\"status\":\"long ago\"}"] {
        let key = redis.key(&format!("event:{}", id(&event)));
        let () = redis::cmd("SET").arg(key).arg(lie).query_async(&mut connection).await.unwrap();
        let app = TestApp::start_with(&world.database, with_redis(&redis, redis.url())).await;
        assert_eq!(app.anyone().get(&path(&event)).await.json(), event, "{lie}");
        app.stop().await;
    }
    world.app.stop().await;
}
