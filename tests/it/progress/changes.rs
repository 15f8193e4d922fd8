//! The status and the total change before, at and after the finish line, by requests and by other programs.

use redis::AsyncCommands;
use serde_json::{Value, json};
use testkit::eventually;

use crate::progress::fixture::{
    BOTH, Backend, Fixture, change, completed, counts, create, create_with, mark, mark_numbers, show,
    wait_until_completed,
};
use crate::support::DEADLINE;

#[tokio::test]
async fn a_project_that_is_crawling_at_its_last_item_completes_when_crawling_ends() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let client = &fixture.client;
        let id = create(client).await;
        change(client, &id, json!({"total": 3, "status": "CRAWLING"})).await;
        assert_eq!(counts(&mark_numbers(client, &id, 3).await), ("CRAWLING".to_owned(), 3, 3, 0));
        // The crawler finds two more.
        assert_eq!(counts(&change(client, &id, json!({"total": 5})).await), ("CRAWLING".to_owned(), 5, 3, 0));
        assert_eq!(counts(&mark_numbers(client, &id, 5).await), ("CRAWLING".to_owned(), 5, 5, 0));
        assert_eq!(completed(fixture.db()).await, [Value::Null; 0], "{backend:?}");
        let waits = change(client, &id, json!({"status": "PROCESSING_WAIT"})).await;
        assert_eq!(counts(&waits), ("DONE".to_owned(), 5, 5, 0), "{backend:?}");
        assert!(waits.json()["finished_at"].is_string(), "{waits:?}");
        assert_eq!(wait_until_completed(fixture.db(), &id).await["done"], 5);
        fixture.app.stop().await;
    }
}

#[tokio::test]
async fn a_total_may_be_raised_and_lowered_until_the_project_completes() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let client = &fixture.client;
        let id = create_with(client, 3).await;
        mark_numbers(client, &id, 2).await;
        assert_eq!(counts(&change(client, &id, json!({"total": 10})).await), ("PROCESSING".to_owned(), 10, 2, 0));
        assert_eq!(counts(&mark_numbers(client, &id, 4).await), ("PROCESSING".to_owned(), 10, 4, 0), "{backend:?}");
        // Fewer than are done already.
        assert_eq!(counts(&change(client, &id, json!({"total": 3})).await), ("DONE".to_owned(), 3, 4, 0));
        let message = wait_until_completed(fixture.db(), &id).await;
        assert_eq!((&message["total"], &message["done"]), (&json!(3), &json!(4)), "{backend:?}");
        change(client, &id, json!({"total": 11})).await.assert_problem(409, "project-finished");
        change(client, &id, json!({"status": "CRAWLING"})).await.assert_problem(409, "project-finished");
        // A repeat of the request that has completed it.
        for repeat in
            [json!({"total": 3}), json!({"status": "PROCESSING", "total": 3}), json!({"status": "PROCESSING_WAIT"})]
        {
            let repeated = change(client, &id, repeat).await;
            assert_eq!(counts(&repeated), ("DONE".to_owned(), 3, 4, 0), "{backend:?}: nothing changes");
        }
        assert_eq!(counts(&show(client, &id).await), ("DONE".to_owned(), 3, 4, 0));
        fixture.app.stop().await;
    }
}

/// The total is raised while the last items are marked: either the project completes and the change is refused, or it is
/// accepted and the project goes on. Never both.
#[tokio::test(flavor = "multi_thread")]
async fn a_total_that_is_raised_at_the_last_item_is_accepted_or_refused_but_never_both() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let client = &fixture.client;
        // The first two rounds check both outcomes; the others race.
        for round in 0..12 {
            let id = create_with(client, 2).await;
            mark_numbers(client, &id, 1).await;
            let (marking, changing) = (mark_numbers(client, &id, 2), change(client, &id, json!({"total": 3})));
            let (marked, changed) = match round {
                0 => {
                    let marked = marking.await;
                    (marked, changing.await)
                }
                1 => {
                    let changed = changing.await;
                    (marking.await, changed)
                }
                _ => tokio::join!(marking, changing),
            };
            assert_eq!(marked.status, 200, "{marked:?}");
            let messages = completed(fixture.db()).await;
            let has_completed = messages.iter().any(|message| message["project_id"] == id.as_str());
            assert!(round > 1 || has_completed == (round == 0), "{backend:?}: {changed:?}");
            assert_eq!(changed.status, if has_completed { 409 } else { 200 }, "{backend:?}: {changed:?} {messages:?}");
            let expected =
                if has_completed { ("DONE".to_owned(), 2, 2, 0) } else { ("PROCESSING".to_owned(), 3, 2, 0) };
            assert_eq!(counts(&show(client, &id).await), expected, "{backend:?}");
        }
        fixture.app.stop().await;
    }
}

#[tokio::test]
async fn a_failed_project_never_completes_and_no_caller_sets_done() {
    for backend in BOTH {
        let fixture = Fixture::start(backend).await;
        let client = &fixture.client;
        let id = create_with(client, 2).await;
        change(client, &id, json!({"status": "DONE"})).await.assert_problem(409, "transition-refused");
        change(client, &id, json!({"status": "INITIALIZING"})).await.assert_problem(409, "transition-refused");
        let failed = change(client, &id, json!({"status": "FAILED"})).await;
        assert_eq!(counts(&failed), ("FAILED".to_owned(), 2, 0, 0), "{backend:?}");
        let late = mark_numbers(client, &id, 2).await;
        assert_eq!((counts(&late), &late.json()["counted"]), (("FAILED".to_owned(), 2, 0, 0), &json!(0)));
        change(client, &id, json!({"status": "PROCESSING"})).await.assert_problem(409, "project-finished");
        // A total of 0 means that it is not known: nothing completes.
        let unknown = create(client).await;
        assert_eq!(counts(&mark(client, &unknown, &["a"]).await), ("INITIALIZING".to_owned(), 0, 1, 0));
        let other = create_with(client, 1).await;
        mark(client, &other, &["a"]).await;
        wait_until_completed(fixture.db(), &other).await;
        assert_eq!(completed(fixture.db()).await.len(), 1, "{backend:?}: only the other project has completed");
        fixture.app.stop().await;
    }
}

/// Other programs increment the hash, or end a project, without us.
#[tokio::test]
async fn a_project_that_another_program_finishes_completes_once() {
    let fixture = Fixture::start(Backend::Redis).await;
    let (client, mut redis) = (&fixture.client, fixture.redis().await);
    let incremented = create_with(client, 3).await;
    mark(client, &incremented, &["a"]).await;
    let _: i64 = redis.hincr(fixture.key(&incremented), "done", 2).await.unwrap();
    let message = wait_until_completed(fixture.db(), &incremented).await;
    assert_eq!((&message["total"], &message["done"]), (&json!(3), &json!(3)));
    let status: String = redis.hget(fixture.key(&incremented), "status").await.unwrap();
    assert_eq!(status, "DONE");

    // As after a crash between DONE and the row: the counts are final, and PostgreSQL does not know it.
    let ended = create_with(client, 3).await;
    mark_numbers(client, &ended, 2).await;
    let _: i64 = redis.hset(fixture.key(&ended), "status", "DONE").await.unwrap();
    assert_eq!(wait_until_completed(fixture.db(), &ended).await["done"], 2);

    let failed = create_with(client, 3).await;
    let _: i64 = redis.hset(fixture.key(&failed), "status", "FAILED").await.unwrap();
    eventually("it is archived", DEADLINE, async || show(client, &failed).await.json()["finished_at"].is_string())
        .await;
    assert_eq!(completed(fixture.db()).await.len(), 2);
    fixture.app.stop().await;
}
