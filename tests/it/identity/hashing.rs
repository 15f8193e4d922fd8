//! Hashes of passwords: overload, and new parameters.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use serde_json::json;
use server::migrations;
use testkit::{TestApp, TestDatabase, eventually};

use super::fixture::{Fixture, PASSWORD, person, unlimited};
use crate::support::{DEADLINE, lock_waits};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_overload_of_sign_ins_is_refused_and_stalls_no_other_route() {
    let fixture = Fixture::start_with(|settings| {
        // About 40 ms for each hash.
        (settings.hash_memory_kib, settings.hash_iterations) = (19_456, 2);
        (settings.hash_queue_max, settings.hash_threads) = (64, 1);
    })
    .await;
    let user = fixture.app.user(uuid::Uuid::now_v7(), None);
    let logins = join_all((0..200).map(|number| {
        let fixture = &fixture;
        async move { fixture.login(&format!("user{number}@example.org"), "a wrong password").await }
    }));
    let others = async {
        let mut slowest = Duration::ZERO;
        for _ in 0..20 {
            let began = Instant::now();
            assert_eq!(user.get("/event/v1/me/events").await.status, 200);
            slowest = slowest.max(began.elapsed());
        }
        slowest
    };
    let (logins, slowest) = tokio::join!(logins, others);
    let of = |status: u16| logins.iter().filter(|answer| answer.status == status).count();
    assert_eq!(of(401) + of(503), 200);
    assert!(of(503) > 100, "{} were refused", of(503));
    assert!(of(401) >= 9, "{} were answered", of(401));
    let refused = logins.iter().find(|answer| answer.status == 503).unwrap();
    refused.assert_problem(503, "overloaded");
    assert_eq!(refused.header("retry-after"), "1");
    assert!(slowest < Duration::from_secs(2), "another route took {slowest:?}");
    fixture.app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_can_sign_in_during_a_flood_of_sign_ins_of_one_account_from_one_network() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| {
        unlimited(settings);
        (settings.identity.hash_memory_kib, settings.identity.hash_iterations) = (19_456, 2);
        settings.identity.hash_threads = 1;
        settings.trusted_proxies = vec!["127.0.0.0/8".parse().unwrap()];
    })
    .await;
    let (ada, bob) = (person(&app, database.pool(), "ada").await, person(&app, database.pool(), "bob").await);
    let sign_in = async |email: &str, network: &str| {
        let body = json!({"email": email, "password": PASSWORD});
        app.anonymous().with_header("x-forwarded-for", network).post("/identity/v1/login", body).await.status
    };
    let flood = join_all((0..400).map(|_| sign_in(&ada.email, "203.0.113.9")));
    let others = async {
        let mut statuses = Vec::new();
        for number in 0..10 {
            statuses.push(sign_in(&bob.email, &format!("198.51.100.{number}")).await);
        }
        statuses
    };
    let (flood, others) = tokio::join!(flood, others);
    assert_eq!(others, [200; 10]);
    assert!(flood.iter().all(|status| [200, 503].contains(status)) && flood.contains(&503), "{flood:?}");
    app.stop().await;
}

#[tokio::test]
async fn a_sign_in_that_is_refused_because_of_others_from_its_network_reads_nothing_from_the_database() {
    let fixture = Fixture::start_with(|settings| settings.hash_queue_max = 1).await;
    let login = || fixture.login("ada@example.org", "a wrong password");
    let mut blocks = fixture.db().begin().await.unwrap();
    sqlx::query("lock table pillarbox_identity.account in access exclusive mode").execute(&mut *blocks).await.unwrap();
    let others = async {
        let waiting =
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%known.network = $2%'
                       and datname = current_database()";
        eventually("the first one waits for the table", DEADLINE, async || fixture.count(waiting).await == 1).await;
        for _ in 0..3 {
            let refused = tokio::time::timeout(Duration::from_secs(3), login()).await.expect("without the table");
            refused.assert_problem(503, "overloaded");
        }
        blocks.rollback().await.unwrap();
    };
    let (first, ()) = tokio::join!(login(), others);
    assert_eq!(first.status, 401, "{first:?}");
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_password_is_hashed_again_when_its_user_signs_in_after_the_parameters_changed() {
    let fixture = Fixture::start().await;
    let person = fixture.person("ada").await;
    let hash = async || -> String {
        sqlx::query_scalar("select password_hash from pillarbox_identity.account")
            .fetch_one(fixture.db())
            .await
            .unwrap()
    };
    let old = hash().await;
    assert!(old.starts_with("$argon2id$v=19$m=8,t=1,p=1$"), "{old}");
    fixture.login(&person.email, super::fixture::PASSWORD).await;
    assert_eq!(hash().await, old, "nothing has changed");
    let stronger = TestApp::start_with(&fixture.database, |settings| {
        unlimited(settings);
        (settings.identity.hash_memory_kib, settings.identity.hash_iterations) = (64, 2);
    })
    .await;
    let wrong = json!({"email": person.email, "password": "a wrong password"});
    stronger.anonymous().post("/identity/v1/login", wrong).await.assert_problem(401, "wrong-credentials");
    assert_eq!(hash().await, old);
    super::fixture::sign_in(&stronger, person.id, &person.email, super::fixture::PASSWORD).await;
    let new = hash().await;
    assert!(new.starts_with("$argon2id$v=19$m=64,t=2,p=1$"), "{new}");
    assert_eq!(fixture.login(&person.email, super::fixture::PASSWORD).await.status, 200);
    assert_eq!(person.get("me").await.status, 200, "the sessions continue");
    stronger.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn sign_ins_at_the_same_time_after_the_parameters_changed_all_succeed() {
    let fixture = Fixture::start().await;
    let (person, db) = (fixture.person("ada").await, fixture.db());
    let stronger = TestApp::start_with(&fixture.database, |settings| {
        unlimited(settings);
        (settings.identity.hash_memory_kib, settings.identity.hash_iterations) = (64, 2);
        // One address may use half of them.
        settings.pool_max = 10;
    })
    .await;
    // All of them have verified the old hash before the first one saves the new one.
    let mut blocks = db.begin().await.unwrap();
    let lock = "select from pillarbox_identity.account for update";
    sqlx::query(lock).execute(&mut *blocks).await.unwrap();
    let logins = (0..5).map(|number| {
        let client = stronger.anonymous().with_header("idempotency-key", &format!("sign-in-{number}"));
        let body = json!({"email": person.email, "password": super::fixture::PASSWORD});
        tokio::spawn(async move { client.post("/identity/v1/login", body).await })
    });
    let logins: Vec<_> = logins.collect();
    eventually("all wait for the account", DEADLINE, async || match lock_waits(db).await {
        5 => Ok(()),
        other => Err(other),
    })
    .await;
    blocks.rollback().await.unwrap();
    for login in join_all(logins).await {
        let login = login.unwrap();
        assert_eq!(login.status, 200, "{login:?}");
    }
    let hash = "select password_hash from pillarbox_identity.account";
    let hash: String = sqlx::query_scalar(hash).fetch_one(db).await.unwrap();
    assert!(hash.starts_with("$argon2id$v=19$m=64,t=2,p=1$"), "{hash}");
    stronger.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_request_that_is_refused_anyway_computes_no_hash() {
    let fixture = Fixture::start_with(|settings| {
        // Each hash takes about a second: one is computed, one waits, and further ones are refused.
        (settings.hash_memory_kib, settings.hash_iterations) = (19_456, 40);
        (settings.hash_threads, settings.hash_queue_max) = (1, 1);
        settings.emails_per_account_max = 1;
    })
    .await;
    assert_eq!(fixture.post("password/forgot", json!({"email": "ada@example.org"})).await.status, 202);
    let login = |number: usize| {
        let (client, email) = (fixture.app.anonymous(), format!("user{number}@example.org"));
        let body = json!({"email": email, "password": "a wrong password"});
        async move { client.post("/identity/v1/login", body).await.status }
    };
    let mut logins: FuturesUnordered<_> = (0..6).map(login).collect();
    for _ in 0..3 {
        assert_eq!(logins.next().await, Some(503), "the queue is full");
    }
    let reset = json!({"token": "A".repeat(43), "new_password": "four other random words"});
    let reset = fixture.post("password/reset", reset).await;
    let registered = fixture.register("ada@example.org", "four other random words").await;
    assert_eq!((reset.status, registered.status), (404, 429), "{reset:?} {registered:?}");
    let rest: Vec<u16> = logins.collect().await;
    assert!(rest.contains(&401), "{rest:?}");
    fixture.app.stop().await;
}
