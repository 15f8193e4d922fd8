//! The time of an answer does not reveal whether an address has an account.

use std::time::{Duration, Instant};

use serde_json::json;
use testkit::TestApp;

use super::fixture::{Fixture, PASSWORD, unlimited};

const TRIES: usize = 200;

/// The probability that a random element of `a` is greater than one of `b`, from 0 to 1. It is near 0.5 if both have the same
/// distribution; the standard deviation of 200 tries each is 0.029.
fn superiority(a: &[Duration], b: &[Duration]) -> f64 {
    let mut score = 0.0;
    for one in a {
        for other in b {
            score += match one.cmp(other) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Equal => 0.5,
                std::cmp::Ordering::Less => 0.0,
            };
        }
    }
    score / (a.len() * b.len()) as f64
}

/// Measures both requests in turns, so that the load of the machine concerns both alike.
async fn measure(mut one: impl AsyncFnMut(), mut other: impl AsyncFnMut()) -> f64 {
    let (mut of_one, mut of_other) = (Vec::new(), Vec::new());
    for _ in 0..TRIES {
        let began = Instant::now();
        one().await;
        let half = Instant::now();
        other().await;
        of_one.push(half - began);
        of_other.push(half.elapsed());
    }
    superiority(&of_one, &of_other)
}

/// Beyond five standard deviations the times differ systematically. A missing hash gives almost 0 or 1.
fn assert_alike(what: &str, superiority: f64) {
    assert!((0.35..=0.65).contains(&superiority), "{what}: {superiority:.3} of the comparisons are greater");
}

#[tokio::test]
async fn the_time_of_an_answer_is_the_same_for_an_unknown_address_and_a_wrong_password() {
    let fixture = Fixture::start_with(|settings| {
        // About as long as the rest of the request: a smaller hash is hidden by the noise of the commits.
        (settings.hash_memory_kib, settings.hash_iterations, settings.hash_threads) = (8_192, 1, 1);
        settings.login_failures_max = 1_000_000;
    })
    .await;
    let person = fixture.person("ada").await;
    let result = measure(
        async || drop(fixture.login(&person.email, "a wrong password").await),
        async || drop(fixture.login("unknown@example.org", "a wrong password").await),
    );
    assert_alike("wrong password against unknown address", result.await);
    fixture.app.stop().await;
}

/// The account has signed in for the last time before the parameters became cheaper.
#[tokio::test]
async fn the_time_of_an_answer_does_not_reveal_an_account_with_former_hash_parameters() {
    let fixture = Fixture::start_with(|settings| {
        (settings.hash_memory_kib, settings.hash_iterations, settings.hash_threads) = (8_192, 1, 1);
    })
    .await;
    let person = fixture.person("ada").await;
    let cheaper = TestApp::start_with(&fixture.database, |settings| {
        unlimited(settings);
        (settings.identity.hash_threads, settings.identity.login_failures_max) = (1, 1_000_000);
    })
    .await;
    let guess = async |email: &str| {
        let body = json!({"email": email, "password": "a wrong password"});
        cheaper.anonymous().post("/identity/v1/login", body).await.assert_problem(401, "wrong-credentials");
    };
    let result = measure(async || guess(&person.email).await, async || guess("unknown@example.org").await);
    assert_alike("former parameters against unknown address", result.await);
    cheaper.stop().await;
    fixture.app.stop().await;
}

/// A request that was processed before its answer would wait for the locks.
#[tokio::test]
async fn a_request_for_an_email_is_answered_before_it_is_processed() {
    let fixture = Fixture::start_with(|settings| settings.emails_per_account_max = 1_000).await;
    let person = fixture.person("ada").await;
    let mut lock = fixture.db().begin().await.unwrap();
    for statement in [
        "lock table pillarbox_identity.one_time_token in access exclusive mode",
        "select from pillarbox_identity.account for update",
    ] {
        sqlx::query(statement).execute(&mut *lock).await.unwrap();
    }
    for path in ["password/forgot", "verify/resend", "register"] {
        let body = match path {
            "register" => json!({"email": person.email, "password": PASSWORD, "name": "Ada Lovelace"}),
            _ => json!({"email": person.email}),
        };
        let answer = tokio::time::timeout(Duration::from_secs(5), fixture.post(path, body)).await;
        assert_eq!(answer.unwrap_or_else(|_| panic!("{path} waits until it is processed")).status, 202, "{path}");
    }
    assert!(fixture.count("select count(*) from pillarbox_identity.accepted_request").await > 0);
    lock.rollback().await.unwrap();
    fixture.wait_until_processed().await;
    fixture.app.stop().await;
}
