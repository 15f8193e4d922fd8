//! Failovers of Redis: a replica never loses counts, and a primary that was a replica for a time has lost them.

use redis::AsyncCommands;
use runtime::secret::Secret;
use server::migrations;
use testkit::{PrivateRedis, TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::progress::fixture::{counts, create_with, mark, mark_numbers, restart, show};
use crate::support::DEADLINE;

const OPTIONS: [&str; 2] = ["--repl-diskless-sync-delay", "0"];

/// How many items are done there; None if it does not know the project.
async fn done(redis: &PrivateRedis, id: &str) -> Option<i64> {
    let client = redis::Client::open(format!("{}/1", redis.url())).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.ok()?;
    connection.hget(format!("smap:proj:{id}"), "done").await.ok().flatten()
}

async fn replicate(replica: &PrivateRedis, primary: &PrivateRedis) {
    let url = primary.url();
    let port = url.rsplit(':').next().unwrap();
    replica.command(&format!("REPLICAOF 127.0.0.1 {port}")).await;
}

#[tokio::test]
async fn a_replica_has_lost_nothing_and_a_primary_that_was_a_replica_has_lost_the_counts() {
    let database = TestDatabase::new(&migrations()).await;
    let (server, other) = (PrivateRedis::start(&OPTIONS).await, PrivateRedis::start(&OPTIONS).await);
    server.command("HSET smap:proj:known done 1").await;
    replicate(&other, &server).await;
    eventually("the replica follows", DEADLINE, async || done(&other, "known").await.is_some()).await;
    let app =
        TestApp::start_with(&database, |settings| settings.progress.redis_url = Some(Secret::new(server.url()))).await;
    let client = app.user(Uuid::now_v7(), None);
    let id = create_with(&client, 5).await;
    mark(&client, &id, &["item-0"]).await;
    eventually("the replica follows", DEADLINE, async || done(&other, &id).await == Some(1)).await;
    // The network is divided: the replica is promoted, and lacks the marks that are confirmed after that.
    other.command("REPLICAOF NO ONE").await;
    assert_eq!(counts(&mark_numbers(&client, &id, 4).await), ("PROCESSING".to_owned(), 5, 4, 0));
    let unknown = create_with(&client, 5).await;

    replicate(&server, &other).await;
    eventually("the replica is refused", DEADLINE, async || {
        let answers = [show(&client, &id).await, show(&client, &unknown).await];
        assert!(answers.iter().all(|answer| answer.status != 409), "{answers:?}");
        if answers.iter().all(|answer| answer.status == 503) { Ok(()) } else { Err(answers) }
    })
    .await;
    // It stays so after the next attempt to connect.
    eventually("readiness names the replica", DEADLINE, async || {
        let report = client.get("/readyz").await.text;
        if report.contains("the server is a replica") { Ok(()) } else { Err(report) }
    })
    .await;
    show(&client, &unknown).await.assert_problem(503, "unavailable");
    restart(&client, &id).await.assert_problem(503, "unavailable");
    eventually("it has the data of the other", DEADLINE, async || done(&server, &id).await == Some(1)).await;

    // The same process as before, with plausible counts that are too low.
    server.command("REPLICAOF NO ONE").await;
    let answer = eventually("the primary is accepted", DEADLINE, async || {
        let answer = show(&client, &id).await;
        if answer.status == 503 { Err(answer) } else { Ok(answer) }
    })
    .await;
    answer.assert_problem(409, "progress-lost");
    assert_eq!(restart(&client, &id).await.status, 200);
    app.stop().await;
}
