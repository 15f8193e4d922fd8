//! Limits on sign-ins and e-mails, shared by all processes.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hyper::Method;
use serde_json::json;
use server::migrations;
use testkit::{Response, TestApp, TestDatabase, eventually};

use super::fixture::{Fixture, PASSWORD, unlimited};
use crate::support::{DEADLINE, lock_waits};

fn assert_limited(answer: &Response) {
    answer.assert_problem(429, "too-many-attempts");
    let seconds: u64 = answer.header("retry-after").parse().unwrap();
    assert!((1..=2 * 60 * 60).contains(&seconds), "{seconds}");
}

/// Forgets that the user has signed in from this network, as if the guesses came from elsewhere.
async fn from_elsewhere(fixture: &Fixture) {
    fixture.execute("delete from pillarbox_identity.known_network").await;
}

#[tokio::test]
async fn guesses_for_an_address_are_limited_in_all_processes_whether_it_has_an_account_or_not() {
    let fixture = Fixture::start_with(|settings| settings.login_failures_max = 5).await;
    let replica = fixture.replica().await;
    let person = fixture.person("ada").await;
    from_elsewhere(&fixture).await;
    for email in [person.email.as_str(), "unknown@example.org"] {
        let mut statuses = Vec::new();
        for guess in 0..8 {
            let app = if guess % 2 == 0 { &fixture.app } else { &replica };
            let body = json!({"email": email, "password": format!("guess {guess}")});
            let answer = app.anonymous().post("/identity/v1/login", body).await;
            if answer.status == 429 {
                assert_limited(&answer);
            }
            statuses.push(answer.status);
        }
        assert_eq!(statuses, [401, 401, 401, 401, 401, 429, 429, 429], "{email}");
    }
    assert_limited(&fixture.login(&person.email, PASSWORD).await);
    // Refused attempts are not counted, so the window passes.
    let counted = "select sum(attempts)::bigint from pillarbox_identity.throttle where kind = 'login.account'";
    assert_eq!(fixture.count(counted).await, 10);
    fixture.execute("update pillarbox_identity.throttle set window_no = window_no - 2").await;
    assert_eq!(fixture.login(&person.email, PASSWORD).await.status, 200);
    replica.stop().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn an_attempt_above_a_limit_is_answered_late_so_that_repeating_it_at_once_is_slow() {
    let fixture = Fixture::start_with(|settings| settings.login_failures_max = 1).await;
    let login = || fixture.login("ada@example.org", "a wrong password");
    assert_eq!(login().await.status, 401);
    let sent_at = Instant::now();
    assert_limited(&login().await);
    assert!(sent_at.elapsed() >= Duration::from_millis(250), "{:?}", sent_at.elapsed());
    fixture.app.stop().await;
}

#[tokio::test]
async fn concurrent_guesses_do_not_exceed_the_limit() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, limit) = (database.pool(), 5);
    let app = TestApp::start_with(&database, |settings| {
        unlimited(settings);
        settings.identity.login_failures_max = limit;
        // A caller uses half of the connections: more guesses than the limit are processed at the same time.
        settings.pool_max = 20;
    })
    .await;
    // No guess is counted while this transaction is open, so more of them than the limit pass the first check.
    let mut blocking = db.begin().await.unwrap();
    sqlx::query("lock table pillarbox_identity.throttle in share mode").execute(&mut *blocking).await.unwrap();
    let release = async {
        let waits = async || match lock_waits(db).await {
            waiting if waiting > i64::from(limit) => Ok(()),
            waiting => Err(waiting),
        };
        eventually("more guesses than the limit wait to be counted", DEADLINE, waits).await;
        blocking.rollback().await.unwrap();
    };
    let guess = async |number: usize| {
        let body = json!({"email": "unknown@example.org", "password": format!("guess {number}")});
        app.anonymous().post("/identity/v1/login", body).await.status
    };
    let (statuses, ()) = tokio::join!(futures_util::future::join_all((0..60).map(guess)), release);
    let answered = statuses.iter().filter(|status| **status == 401).count();
    assert_eq!(answered, limit as usize, "of 60 guesses: {statuses:?}");
    app.stop().await;
}

#[tokio::test]
async fn a_stranger_does_not_lock_a_user_out_of_a_network_that_the_user_has_used() {
    let fixture = Fixture::start_with(|settings| settings.login_failures_max = 5).await;
    let person = fixture.person("ada").await;
    // The limit of the account as strangers elsewhere reach it.
    let known = "with known as (delete from pillarbox_identity.known_network returning user_id, network)
                 insert into pillarbox_identity.known_network select user_id, '\\x00'::bytea, now() from known";
    let mine: Vec<u8> = sqlx::query_scalar("select network from pillarbox_identity.known_network")
        .fetch_one(fixture.db())
        .await
        .unwrap();
    fixture.execute(known).await;
    for guess in 0..6 {
        fixture.login(&person.email, &format!("guess {guess}")).await;
    }
    assert_limited(&fixture.login(&person.email, PASSWORD).await);
    let restore = "update pillarbox_identity.known_network set network = $1";
    sqlx::query(restore).bind(mine).execute(fixture.db()).await.unwrap();
    assert_eq!(fixture.login(&person.email, PASSWORD).await.status, 200);
    // Guesses from there are limited as well.
    for guess in 0..5 {
        fixture.login(&person.email, &format!("guess {guess}")).await.assert_problem(401, "wrong-credentials");
    }
    assert_limited(&fixture.login(&person.email, PASSWORD).await);
    fixture.app.stop().await;
}

#[tokio::test]
async fn guesses_of_a_network_are_limited_over_all_addresses() {
    let fixture = Fixture::start_with(|settings| settings.login_failures_per_network_max = 6).await;
    for guess in 0..6 {
        let email = format!("user{guess}@example.org");
        fixture.login(&email, "a wrong password").await.assert_problem(401, "wrong-credentials");
    }
    assert_limited(&fixture.login("another@example.org", "a wrong password").await);
    fixture.app.stop().await;
}

/// Tries a wrong password for an unknown address, with this header, and returns the status.
async fn guess(app: &TestApp, email: &str, header: &str, value: &str) -> u16 {
    let body = json!({"email": email, "password": "a wrong password"});
    app.anonymous().with_header(header, value).post("/identity/v1/login", body).await.status
}

#[tokio::test]
async fn behind_trusted_proxies_the_guesses_of_the_real_client_are_counted() {
    let database = TestDatabase::new(&migrations()).await;
    let app = TestApp::start_with(&database, |settings| {
        unlimited(settings);
        settings.identity.login_failures_per_network_max = 3;
        settings.trusted_proxies = vec!["127.0.0.0/8".parse().unwrap(), "10.0.0.0/8".parse().unwrap()];
    })
    .await;
    let mut statuses = Vec::new();
    for number in 0..5 {
        // Two proxies have appended addresses; the client itself has sent the first one, another one each time.
        let chain = format!("198.51.100.{number}, 203.0.113.9, 10.0.0.2");
        statuses.push(guess(&app, &format!("user{number}@example.org"), "x-forwarded-for", &chain).await);
    }
    assert_eq!(statuses, [401, 401, 401, 429, 429]);
    assert_eq!(guess(&app, "another@example.org", "x-forwarded-for", "203.0.113.10").await, 401, "another client");
    let counted = "select count(*) from pillarbox_identity.throttle where kind = 'login.network'";
    let counted: i64 = sqlx::query_scalar(counted).fetch_one(database.pool()).await.unwrap();
    assert_eq!(counted, 2, "the networks of two clients");
    app.stop().await;
}

#[tokio::test]
async fn forwarded_addresses_of_an_untrusted_peer_are_ignored() {
    let fixture = Fixture::start_with(|settings| settings.login_failures_per_network_max = 3).await;
    let mut statuses = Vec::new();
    for (number, header) in ["x-forwarded-for", "forwarded", "x-forwarded-for", "forwarded"].into_iter().enumerate() {
        let address = format!("203.0.113.{number}");
        let value = if header == "forwarded" { format!("for={address}") } else { address };
        statuses.push(guess(&fixture.app, &format!("user{number}@example.org"), header, &value).await);
    }
    assert_eq!(statuses, [401, 401, 401, 429], "all of them are guesses of this machine");
    fixture.app.stop().await;
}

#[tokio::test]
async fn the_password_of_a_signed_in_user_cannot_be_guessed_without_limit() {
    let fixture = Fixture::start_with(|settings| settings.login_failures_max = 3).await;
    let person = fixture.person("ada").await;
    for guess in 0..3 {
        let body = json!({"password": format!("guess {guess}")});
        person.send(Method::DELETE, "me", Some(body)).await.assert_problem(403, "wrong-password");
    }
    assert_limited(&person.send(Method::DELETE, "me", Some(json!({"password": PASSWORD}))).await);
    let change = json!({"current_password": PASSWORD, "new_password": "four other random words"});
    assert_limited(&person.post("password/change", change).await);
    assert_eq!(person.get("me").await.status, 200);
    fixture.app.stop().await;
}

#[tokio::test]
async fn wrong_passwords_of_a_signed_in_user_count_against_this_user_only() {
    let fixture = Fixture::start_with(|settings| {
        (settings.login_failures_max, settings.login_failures_per_network_max) = (3, 3);
    })
    .await;
    let (ada, bob) = (fixture.person("ada").await, fixture.person("bob").await);
    let wrong = || json!({"current_password": "a wrong password", "new_password": "four other random words"});
    for person in [&ada, &bob] {
        for _ in 0..3 {
            person.post("password/change", wrong()).await.assert_problem(403, "wrong-password");
        }
        assert_limited(&person.post("password/change", wrong()).await);
    }
    assert_eq!(fixture.login(&ada.email, PASSWORD).await.status, 200, "the user and the network may sign in");
    // The count does not depend on the network of the request.
    let counted = "select count(*) from pillarbox_identity.throttle where kind <> 'confirm.user'";
    assert_eq!(fixture.count(counted).await, 0);
    fixture.app.stop().await;
}

#[tokio::test]
async fn emails_to_an_address_and_requests_of_a_network_are_limited() {
    let fixture = Fixture::start_with(|settings| {
        (settings.emails_per_account_max, settings.email_requests_per_network_max) = (3, 10);
    })
    .await;
    // Its network is known since the sign-in, after the e-mail of the registration.
    let person = fixture.person("ada").await;
    for email in [person.email.as_str(), "unknown@example.org"] {
        let mut statuses = Vec::new();
        for path in ["password/forgot", "verify/resend", "password/forgot", "verify/resend"] {
            statuses.push(fixture.post(path, json!({"email": email})).await.status);
        }
        let allowed = statuses.iter().filter(|status| **status == 202).count();
        assert_eq!(allowed, 3, "{email}: {statuses:?}");
        assert_limited(&fixture.register(email, PASSWORD).await);
    }
    // Seven requests of this network were counted.
    for number in 0..3 {
        assert_eq!(fixture.register(&format!("user{number}@example.org"), PASSWORD).await.status, 202);
    }
    assert_limited(&fixture.register("another@example.org", PASSWORD).await);
    fixture.wait_until_processed().await;
    fixture.app.stop().await;
}

/// Makes the known networks of all users other ones than that of the tests. Returns the network of the tests.
async fn use_other_networks(fixture: &Fixture) -> Vec<u8> {
    let mine = sqlx::query_scalar("select network from pillarbox_identity.known_network").fetch_one(fixture.db()).await;
    fixture.execute("update pillarbox_identity.known_network set network = '\\x00'").await;
    mine.unwrap()
}

#[tokio::test]
async fn a_user_can_reset_the_password_in_a_known_network_whatever_a_stranger_elsewhere_requests() {
    let fixture = Fixture::start_with(|settings| settings.emails_per_account_max = 3).await;
    let person = fixture.person("ada").await;
    let forgot = async || fixture.post("password/forgot", json!({"email": person.email})).await;
    // The registration was one request; the others are those of a stranger elsewhere.
    let mine = use_other_networks(&fixture).await;
    while forgot().await.status == 202 {}
    assert_limited(&forgot().await);
    let restore = "update pillarbox_identity.known_network set network = $1";
    sqlx::query(restore).bind(mine).execute(fixture.db()).await.unwrap();
    for _ in 0..3 {
        assert_eq!(forgot().await.status, 202);
    }
    // Requests from there are limited as well.
    assert_limited(&forgot().await);
    fixture.wait_until_processed().await;
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_correct_password_among_many_concurrent_guesses_of_a_signed_in_user_is_refused() {
    let fixture = Fixture::start_with(|settings| {
        // One hash after the other, each about as long as all requests need to pass the first check.
        (settings.hash_memory_kib, settings.hash_iterations, settings.hash_threads) = (19_456, 8, 1);
        settings.login_failures_max = 3;
    })
    .await;
    let person = fixture.person("ada").await;
    let change = |current: &str| json!({"current_password": current, "new_password": "four other random words"});
    let guesses = ["a", "b", "c", "d", "e"].map(|guess| person.post("password/change", change(guess)));
    let mut guesses: FuturesUnordered<_> = guesses.into_iter().collect();
    // With one answer, the others are in the queue for their hashes, and the limit is not reached.
    let first = guesses.next().await.unwrap();
    let (mut answers, correct) =
        tokio::join!(guesses.collect::<Vec<_>>(), person.post("password/change", change(PASSWORD)));
    answers.push(first);
    let wrong = answers.iter().filter(|answer| answer.status == 403).count();
    assert_eq!(wrong, 3, "{answers:?}");
    assert_limited(&correct);
    let counted = "select sum(attempts)::bigint from pillarbox_identity.throttle where kind = 'confirm.user'";
    assert_eq!(fixture.count(counted).await, 3, "a correct password is not counted");
    fixture.app.stop().await;
}
