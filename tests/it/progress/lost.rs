//! A Redis that loses its memory: what may be incomplete is reported as lost, never as a wrong number, and the project
//! completes once after it was started again.

use redis::AsyncCommands;
use runtime::secret::Secret;
use serde_json::{Value, json};
use server::migrations;
use testkit::{CapturedLog, Client, FaultProxy, PrivateRedis, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::progress::fixture::{
    Backend, Fixture, change, completed, counts, create_with, mark, mark_numbers, restart, show,
};
use crate::support::DEADLINE;

/// A server with a Redis of its own.
struct Private {
    database: TestDatabase,
    redis: PrivateRedis,
    app: TestApp,
    client: Client,
}

impl Private {
    async fn start(options: &[&str], is_durable: bool) -> Private {
        let (database, redis) = (TestDatabase::new(&migrations()).await, PrivateRedis::start(options).await);
        let app = TestApp::start_with(&database, |settings| {
            settings.progress.redis_url = Some(Secret::new(redis.url()));
            settings.progress.redis_is_durable = is_durable;
        })
        .await;
        let client = app.user(Uuid::now_v7(), None);
        Private { database, redis, app, client }
    }

    /// Kills Redis, runs `between`, starts it again, and waits until the server is connected to it.
    async fn restart_redis(&mut self, options: &[&str], between: impl FnOnce(&PrivateRedis)) {
        self.redis.kill9();
        between(&self.redis);
        self.redis.start_again(options).await;
        self.wait_until_connected().await;
    }

    async fn wait_until_connected(&self) {
        eventually("the server is connected again", DEADLINE, async || {
            let answer = self.client.get("/progress/v1/projects").await;
            if answer.status == 503 { Err(answer) } else { Ok(()) }
        })
        .await;
    }
}

/// Every route reports that the counts are lost and what to do; after that, the project completes once.
async fn recover(client: &Client, db: &sqlx::PgPool, id: &str, what: &str) {
    let assert_lost = |answer: testkit::Response| {
        answer.assert_problem(409, "progress-lost");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(&format!("/progress/v1/projects/{id}/restart")), "{what}: {detail}");
    };
    assert_lost(show(client, id).await);
    assert_lost(mark(client, id, &["item-0"]).await);
    assert_lost(change(client, id, json!({"total": 7})).await);
    assert_lost(client.get(&format!("/progress/v1/projects/{id}/events")).await);
    let before = completed(db).await.len();
    // Of two clients that start it again, one succeeds, so that neither discards what the other one has marked.
    let (one, other) = tokio::join!(restart(client, id), restart(client, id));
    let (fresh, refused) = if one.status == 200 { (one, other) } else { (other, one) };
    refused.assert_problem(409, "progress-not-lost");
    assert_eq!(counts(&fresh), ("INITIALIZING".to_owned(), 0, 0, 0), "{what}");
    change(client, id, json!({"total": 5, "status": "PROCESSING"})).await;
    assert_eq!(counts(&mark_numbers(client, id, 5).await), ("DONE".to_owned(), 5, 5, 0), "{what}");
    restart(client, id).await.assert_problem(409, "progress-not-lost");
    assert_eq!(completed(db).await.len(), before + 1, "{what}");
    let metrics = client.get("/metrics").await.text;
    let value = |name: &str| metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    for counter in ["pillarbox_progress_items_total", "pillarbox_progress_lost_total"] {
        assert!(value(counter).is_some_and(|value| value > 0.0), "{counter}");
    }
    for gauge in ["pillarbox_progress_redis_up", "pillarbox_progress_redis_memory_ratio"] {
        assert!(value(gauge).is_some(), "{gauge}");
    }
}

#[tokio::test]
async fn counts_that_were_flushed_or_evicted_in_part_are_lost() {
    let fixture = Fixture::start(Backend::Redis).await;
    let (client, mut redis) = (&fixture.client, fixture.redis().await);
    for (what, suffixes) in [("all", &["", ":items", ":rate"][..]), ("the hash", &[""]), ("the items", &[":items"])] {
        let id = create_with(client, 5).await;
        mark_numbers(client, &id, 3).await;
        let keys: Vec<String> = suffixes.iter().map(|suffix| fixture.key(&id) + suffix).collect();
        let _: i64 = redis.del(keys).await.unwrap();
        // Another program that increments what is no longer there does not make it complete.
        if what == "the hash" {
            let _: i64 = redis.hincr(fixture.key(&id), "done", 5).await.unwrap();
        }
        recover(client, fixture.db(), &id, what).await;
    }
    fixture.app.stop().await;
}

/// What other programs may do to the hash: reset it, or write what is not a number that can be incremented.
#[tokio::test]
async fn counts_that_another_program_has_reset_or_damaged_are_lost_and_nothing_is_counted_there() {
    let fixture = Fixture::start(Backend::Redis).await;
    let (client, mut redis) = (&fixture.client, fixture.redis().await);
    let reset = [("status", "INITIALIZING"), ("total", "0"), ("done", "0"), ("errors", "0")];
    let damages: [&[(&str, &str)]; 7] = [
        &reset,
        &[("done", "many")],
        &[("done", "007")],
        &[("total", "1e3")],
        &[("done", "9223372036854775807")],
        &[("errors", "-1")],
        &[("status", "PAUSED")],
    ];
    for fields in damages {
        let id = create_with(client, 5).await;
        mark_numbers(client, &id, 3).await;
        let () = redis.hset_multiple(fixture.key(&id), fields).await.unwrap();
        mark(client, &id, &["another"]).await.assert_problem(409, "progress-lost");
        let items: i64 = redis.scard(fixture.key(&id) + ":items").await.unwrap();
        assert_eq!(items, 4, "{fields:?}: three items and the token");
        recover(client, fixture.db(), &id, &format!("{fields:?}")).await;
    }
    fixture.app.stop().await;
}

/// A process that has cached a project from before its counts were initialised does not initialise them again.
#[tokio::test]
async fn lost_counts_are_not_initialised_again_by_a_process_that_has_cached_the_project() {
    let fixture = Fixture::start(Backend::Redis).await;
    let (client, mut redis) = (&fixture.client, fixture.redis().await);
    let proxy = FaultProxy::in_front_of(&fixture.redis.url()).await;
    let (url, prefix) = (proxy.url(&fixture.redis.url()), fixture.redis.prefix().to_owned());
    proxy.refuse();
    let other = TestApp::start_with(&fixture.database, |settings| {
        settings.redis_prefix = prefix;
        settings.progress.redis_url = Some(Secret::new(url));
    })
    .await;
    let elsewhere = other.anonymous().bearer(client.credential());
    let id = create_with(client, 5).await;
    mark_numbers(client, &id, 3).await;
    // As it is before the first initialisation.
    let set_run = "update pillarbox_progress.project as p set run = $2 from pillarbox_progress.project as old
                   where p.id = $1 and old.id = p.id returning old.run";
    let run: String = sqlx::query_scalar(set_run).bind(&id).bind(None::<String>).fetch_one(fixture.db()).await.unwrap();
    show(&elsewhere, &id).await.assert_problem(503, "unavailable");
    let restore = sqlx::query_scalar::<_, Option<String>>(set_run).bind(&id).bind(run);
    restore.fetch_one(fixture.db()).await.unwrap();
    let keys: Vec<String> = ["", ":items", ":rate"].map(|suffix| fixture.key(&id) + suffix).to_vec();
    let _: i64 = redis.del(keys).await.unwrap();
    proxy.pass();
    let answer = eventually("the other process is connected", DEADLINE, async || {
        let answer = show(&elsewhere, &id).await;
        if answer.status == 503 { Err(answer) } else { Ok(answer) }
    })
    .await;
    answer.assert_problem(409, "progress-lost");
    other.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_redis_that_refuses_writes_is_reported_and_marks_are_repeated_later() {
    let private = Private::start(&[], false).await;
    let client = &private.client;
    let id = create_with(client, 5).await;
    mark_numbers(client, &id, 3).await;
    private.redis.command("CONFIG SET min-replicas-to-write 1").await;
    let refused = mark_numbers(client, &id, 5).await;
    refused.assert_problem(503, "unavailable");
    assert_eq!(refused.header("retry-after"), "5");
    assert_eq!(reported(client, "refuses writes").await["status"], "degraded");
    assert_eq!(counts(&show(client, &id).await), ("PROCESSING".to_owned(), 5, 3, 0));
    private.redis.command("CONFIG SET min-replicas-to-write 0").await;
    assert_eq!(counts(&mark_numbers(client, &id, 5).await), ("DONE".to_owned(), 5, 5, 0));
    assert_eq!(reported(client, "up").await["status"], "ready");
    private.app.stop().await;
}

#[tokio::test]
async fn a_redis_that_restarts_empty_or_from_an_old_snapshot_has_lost_the_unfinished_projects() {
    let mut private = Private::start(&[], false).await;
    let (client, db) = (private.client.clone(), private.database.pool().clone());
    let finished = create_with(&client, 1).await;
    mark(&client, &finished, &["a"]).await;
    let (emptied, older) = (create_with(&client, 5).await, create_with(&client, 5).await);
    mark_numbers(&client, &emptied, 3).await;
    private.restart_redis(&[], PrivateRedis::delete_files).await;
    recover(&client, &db, &emptied, "restarted empty").await;
    recover(&client, &db, &older, "restarted empty").await;

    // Redis saves its memory, confirms three more items, and crashes. After that it knows one item of four.
    let id = create_with(&client, 5).await;
    mark(&client, &id, &["item-0"]).await;
    private.redis.command("SAVE").await;
    assert_eq!(counts(&mark_numbers(&client, &id, 4).await), ("PROCESSING".to_owned(), 5, 4, 0));
    private.restart_redis(&[], |_| {}).await;
    let remembered = private.redis.command(&format!("HGET smap:proj:{id} done")).await;
    assert_eq!(remembered, "$1", "the snapshot was loaded");
    recover(&client, &db, &id, "restarted from an old snapshot").await;
    assert_eq!(counts(&show(&client, &finished).await), ("DONE".to_owned(), 1, 1, 0), "the archive has it");
    private.app.stop().await;
}

#[tokio::test]
async fn a_durable_redis_continues_after_a_restart() {
    const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut private = Private::start(&DURABLE, true).await;
    let (client, db) = (private.client.clone(), private.database.pool().clone());
    let id = create_with(&client, 5).await;
    mark_numbers(&client, &id, 3).await;
    private.restart_redis(&DURABLE, |_| {}).await;
    assert_eq!(counts(&show(&client, &id).await), ("PROCESSING".to_owned(), 5, 3, 0));
    assert_eq!(counts(&mark_numbers(&client, &id, 5).await), ("DONE".to_owned(), 5, 5, 0));
    assert_eq!(completed(&db).await.len(), 1);
    private.app.stop().await;
}

/// The check of the Redis in the report of readiness.
async fn reported(client: &Client, wanted: &str) -> Value {
    eventually(wanted, DEADLINE, async || {
        let report = client.get("/readyz").await.json();
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["name"] == "progress-redis").unwrap().clone();
        let is_wanted = check["error"].as_str().unwrap_or("up").contains(wanted);
        if is_wanted { Ok(report) } else { Err(check) }
    })
    .await
}

#[tokio::test]
async fn a_redis_that_evicts_is_reported_and_what_it_evicts_is_lost() {
    let log = CapturedLog::start();
    // With so many samples, the keys with the shortest TTL are evicted first.
    let options = ["--maxmemory", "40mb", "--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64"];
    let private = Private::start(&options, false).await;
    let client = &private.client;
    let report = reported(client, "maxmemory-policy is volatile-ttl").await;
    assert_eq!((&report["status"], report.to_string().contains("noeviction")), (&json!("degraded"), true));
    assert!(log.has("WARN", "the Redis of progress may lose state"), "{}", log.text());
    let id = create_with(client, 5).await;
    mark_numbers(client, &id, 3).await;
    // Something else fills the memory: keys that live longer than ours, so ours are evicted first.
    let fill = "EVAL \"for n=1,60 do redis.call('SET', 'x'..n, string.rep('x', 1000000), 'PX', 86400000 * 30) end\" 0";
    private.redis.command(fill).await;
    recover_after_eviction(client, private.database.pool(), &private.redis, &id).await;

    private.redis.command("FLUSHALL").await;
    private.redis.command("CONFIG SET maxmemory-policy noeviction").await;
    assert_eq!(reported(client, "up").await["status"], "ready");
    // Nearly full: reported before it is full.
    let fill = "EVAL \"for n=1,35 do redis.call('SET', 'x'..n, string.rep('x', 1000000)) end\" 0";
    private.redis.command(fill).await;
    assert_eq!(reported(client, "% of maxmemory are used").await["status"], "degraded");
    // Full: nothing is counted, and nothing is lost.
    let id = create_with(client, 5).await;
    mark_numbers(client, &id, 3).await;
    private.redis.command("CONFIG SET maxmemory 1mb").await;
    let refused = mark_numbers(client, &id, 5).await;
    refused.assert_problem(503, "overloaded");
    assert_eq!(refused.header("retry-after"), "5");
    assert_eq!(counts(&show(client, &id).await), ("PROCESSING".to_owned(), 5, 3, 0));
    private.redis.command("CONFIG SET maxmemory 100mb").await;
    assert_eq!(counts(&mark_numbers(client, &id, 5).await), ("DONE".to_owned(), 5, 5, 0));
    private.app.stop().await;
}

async fn recover_after_eviction(client: &Client, db: &sqlx::PgPool, redis: &PrivateRedis, id: &str) {
    // The script may have blocked Redis for longer than a request waits for it; then the connection is opened again.
    eventually("Redis answers", DEADLINE, async || show(client, id).await.status != 503).await;
    show(client, id).await.assert_problem(409, "progress-lost");
    redis.command("FLUSHALL").await;
    recover(client, db, id, "evicted").await;
}
