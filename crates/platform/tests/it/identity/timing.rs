//! The time of an answer does not reveal whether an address has an account.

use std::time::{Duration, Instant};

use serde_json::json;

use super::fixture::{Fixture, PASSWORD};

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
async fn measure(mut one: impl AsyncFnMut(usize), mut other: impl AsyncFnMut(usize)) -> f64 {
    let (mut of_one, mut of_other) = (Vec::new(), Vec::new());
    for number in 0..TRIES {
        let began = Instant::now();
        one(number).await;
        let half = Instant::now();
        other(number).await;
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
        async |_| drop(fixture.login(&person.email, "a wrong password").await),
        async |_| drop(fixture.login("nobody@example.org", "a wrong password").await),
    );
    assert_alike("wrong password against unknown address", result.await);
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_time_of_a_request_for_an_email_is_the_same_for_every_address() {
    let fixture = Fixture::start_with(|settings| settings.emails_per_account_max = 1_000_000).await;
    let person = fixture.person("ada").await;
    let result = measure(
        async |_| drop(fixture.post("password/forgot", json!({"email": person.email})).await),
        async |_| drop(fixture.post("password/forgot", json!({"email": "bob@example.org"})).await),
    );
    assert_alike("forgot", result.await);
    let result = measure(
        async |_| drop(fixture.register(&person.email, PASSWORD).await),
        async |number| drop(fixture.register(&format!("user{number}@example.org"), PASSWORD).await),
    );
    assert_alike("register", result.await);
    fixture.wait_until_processed().await;
    fixture.app.stop().await;
}
