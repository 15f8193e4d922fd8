//! A change to a subscriber that was answered with 2xx holds from then on, for everyone.

use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::{Value, json};
use server::migrations;
use testkit::{Client, Received, Receiver, Response, TestDatabase, eventually};
use webhook_client::signature::Verifier;

use crate::hub::fixture::{
    Fixture, numbered_events, percentiles, post, post_batch, subscribe, subscriber_path, test_size, wait_for_webhooks,
};
use crate::hub::process::Replica;
use crate::support::{DEADLINE, text};

/// A subscriber that is changed, at one of two URLs, and another one that shows that an event was dispatched.
struct Scenario<'a> {
    manager: &'a Client,
    path: String,
    receivers: [Receiver; 2],
    sentinel: Receiver,
    /// How long each change took.
    times: Vec<Duration>,
}

impl Scenario<'_> {
    async fn new(manager: &Client) -> Scenario<'_> {
        let receivers = [Receiver::start().await, Receiver::start().await];
        let sentinel = Receiver::start().await;
        let subscriber = subscribe(manager, &receivers[0].url(), json!({})).await;
        subscribe(manager, &sentinel.url(), json!({})).await;
        Scenario { manager, path: subscriber_path(&subscriber), receivers, sentinel, times: Vec::new() }
    }

    /// Sends a change that must be effective when it is answered. Returns the response.
    async fn change(&mut self, method: Method, action: &str, body: Option<Value>) -> Response {
        let sent_at = Instant::now();
        let answer = self.manager.send(method, &format!("{}{action}", self.path), body).await;
        assert!([200, 204].contains(&answer.status), "{answer:?}");
        assert!(answer.status == 204 || answer.json().get("effective").is_none(), "{answer:?}");
        self.times.push(sent_at.elapsed());
        answer
    }

    /// Posts an event at once and waits until the other subscriber has received it.
    async fn post_and_dispatch(&self) -> String {
        let before = self.sentinel.count();
        let event_id = post(self.manager, "test.changed", json!({}), None).await;
        wait_for_webhooks(&self.sentinel, before + 1).await;
        event_id
    }

    fn counts(&self) -> [usize; 2] {
        [self.receivers[0].count(), self.receivers[1].count()]
    }

    async fn pause_and_resume(&mut self) {
        let before = self.counts();
        self.change(Method::POST, "/pause", None).await;
        self.post_and_dispatch().await;
        assert_eq!(self.counts(), before, "an event was delivered to the paused subscriber");
        self.change(Method::POST, "/resume", None).await;
        let all = before.iter().sum::<usize>() + 1;
        eventually("the event is delivered", DEADLINE, async || self.counts().iter().sum::<usize>() == all).await;
    }

    async fn move_to(&mut self, new: usize) {
        let before = self.counts();
        let url = self.receivers[new].url();
        self.change(Method::PATCH, "", Some(json!({ "url": url }))).await;
        self.post_and_dispatch().await;
        wait_for_webhooks(&self.receivers[new], before[new] + 1).await;
        assert_eq!(self.counts()[1 - new], before[1 - new], "an event was delivered to the old URL");
    }

    async fn rotate_secret(&mut self, at: usize) {
        let before = self.receivers[at].count();
        let rotated = self.change(Method::POST, "/rotate-secret", Some(json!({"overlap_hours": 0}))).await;
        self.post_and_dispatch().await;
        wait_for_webhooks(&self.receivers[at], before + 1).await;
        let Received { headers, body, .. } = self.receivers[at].received().pop().unwrap();
        let verifier = Verifier::parse(text(&rotated.json()["secret"])).unwrap();
        verifier.verify(&headers, &body, chrono::Utc::now().timestamp()).expect("signed with the new secret");
    }

    /// Ends with the deletion of the subscriber.
    async fn run(mut self, pauses: usize, moves: usize) {
        self.post_and_dispatch().await;
        wait_for_webhooks(&self.receivers[0], 1).await;
        for _ in 0..pauses {
            self.pause_and_resume().await;
        }
        for number in 1..=moves {
            self.move_to(number % 2).await;
        }
        self.rotate_secret(moves % 2).await;
        let before = self.counts();
        self.change(Method::DELETE, "", None).await;
        self.post_and_dispatch().await;
        assert_eq!(self.counts(), before, "an event was delivered to the deleted subscriber");
        let (median, p99) = percentiles(self.times);
        println!("a change of a subscriber was answered after {median:?} (median), {p99:?} (p99)");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_posted_after_a_change_finds_the_changed_subscriber() {
    let fixture = Fixture::start().await;
    Scenario::new(&fixture.manager).await.run(30, 15).await;
    fixture.app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_backlog_is_sent_after_its_subscriber_was_paused() {
    const IN_FLIGHT: usize = 3;
    const EVENTS: usize = 1_500;
    let fixture = Fixture::start().await;
    let manager = &fixture.manager;
    let (receiver, sentinel) = (Receiver::start().await, Receiver::start().await);
    let fields = json!({"event_types": ["test.*"], "max_in_flight": IN_FLIGHT});
    let path = subscriber_path(&subscribe(manager, &receiver.url(), fields).await);
    subscribe(manager, &sentinel.url(), json!({"event_types": ["sentinel"]})).await;
    let change = async |action: &str| {
        let answer = manager.send(Method::POST, &format!("{path}/{action}"), None).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    post_batch(manager, numbered_events(100, 1..=10)).await;
    post_batch(manager, numbered_events(100, 11..=EVENTS / 100)).await;
    for round in 1..=8 {
        let before = receiver.count();
        wait_for_webhooks(&receiver, before + 20).await;
        change("pause").await;
        let paused_at = Instant::now();
        // The dispatcher needs rounds for it, in which it would send more of the backlog.
        post(manager, "sentinel", json!({}), None).await;
        wait_for_webhooks(&sentinel, round).await;
        let late = receiver.received().iter().filter(|received| received.at > paused_at).count();
        assert!(late <= IN_FLIGHT, "{late} requests arrived after the answer in round {round}");
        assert!(receiver.count() < EVENTS, "the backlog was sent before the pause of round {round}");
        change("resume").await;
    }
    fixture.app.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_waits_for_the_dispatchers_of_other_processes_but_not_for_a_suspended_one() {
    const WAIT_MS: u64 = 300;
    let database = TestDatabase::new(&migrations()).await;
    let wait_ms = WAIT_MS.to_string();
    let front = Replica::start_as(&database.url(), "api,fanout");
    let impatient = Replica::start_with(&database.url(), "api", &[("PILLARBOX_HUB__CHANGE_WAIT_MS", &wait_ms)]);
    let start = || Replica::start_with(&database.url(), "dispatch", &[("PILLARBOX_LEASE_MS", "2500")]);
    let (suspended, other) = (start(), start());
    let admin = front.admin().await;
    let registered = "select count(*) from pillarbox_hub.dispatcher join pillarbox.shard_worker using (owner)
                      where consumer = 'hub.dispatch' and version > 0";
    let registered = async || sqlx::query_scalar::<_, i64>(registered).fetch_one(database.pool()).await.unwrap();
    eventually("both dispatchers have loaded the subscribers", DEADLINE, async || registered().await == 2).await;
    Scenario::new(&admin).await.run(test_size(4, 30), test_size(2, 15)).await;

    let subscriber = subscribe(&admin, "http://127.0.0.1:9/", json!({})).await;
    let path = subscriber_path(&subscriber);
    let impatient_admin = impatient.admin().await;
    suspended.process.suspend();
    let sent_at = Instant::now();
    let answer = impatient_admin.send(Method::POST, &format!("{path}/pause"), None).await;
    assert_eq!((answer.status, &answer.json()["effective"]), (202, &json!(false)), "{answer:?}");
    assert!(answer.json()["paused_at"].is_string() && answer.headers.contains_key("etag"), "{answer:?}");
    assert!(sent_at.elapsed() >= Duration::from_millis(WAIT_MS), "{:?}", sent_at.elapsed());
    // The suspended process sends nothing once its lease has ended: a repeat, which waits for longer, is answered with 200.
    let repeated = admin.send(Method::POST, &format!("{path}/pause"), None).await;
    assert_eq!(repeated.status, 200, "{repeated:?}");
    let is_warning = |line: &str| line.contains("its shards are taken over") && line.contains("hub.dispatch");
    other.process.wait_for_line(is_warning, DEADLINE).await;
    suspended.process.resume();
    suspended.process.wait_for_line(|line| line.contains("lost the lease"), DEADLINE).await;
    eventually("both dispatchers are registered again", DEADLINE, async || registered().await == 2).await;
    assert_eq!(admin.delete(&path).await.status, 204);
    for mut replica in [front, impatient, suspended, other] {
        assert!(replica.process.terminate().await.success(), "{}", replica.process.logs());
    }
    assert_eq!(registered().await, 0, "a dispatcher that stops is not waited for");
}

/// Inserts what a failover leaves of a process that is still connected to the old server: its last heartbeat, and no fence row.
async fn insert_process_before_a_failover(db: &sqlx::PgPool) -> uuid::Uuid {
    let replica = uuid::Uuid::now_v7();
    sqlx::query("update pillarbox.incarnation set since = now()").execute(db).await.unwrap();
    let insert = "insert into pillarbox.replica (id, name, until) select $1, 'other', now() + interval '10 s'";
    sqlx::query(insert).bind(replica).execute(db).await.unwrap();
    replica
}

/// The lease of that process ends.
async fn end_lease(db: &sqlx::PgPool, replica: uuid::Uuid) {
    sqlx::query("update pillarbox.replica set until = now() where id = $1").bind(replica).execute(db).await.unwrap();
}

#[tokio::test]
async fn a_change_waits_for_a_process_that_may_not_have_noticed_a_failover() {
    let fixture = Fixture::start_with(|settings| settings.hub.change_wait_ms = 2_000).await;
    let (db, receiver) = (fixture.database.pool(), Receiver::start().await);
    let subscriber = subscribe(&fixture.manager, &receiver.url(), json!({})).await;
    let pause = format!("{}/pause", subscriber_path(&subscriber));
    assert_eq!(fixture.manager.send(Method::POST, &pause, None).await.status, 200);
    let replica = insert_process_before_a_failover(db).await;
    let answer = fixture.manager.send(Method::POST, &pause, None).await;
    assert_eq!((answer.status, &answer.json()["effective"]), (202, &json!(false)), "{answer:?}");
    end_lease(db, replica).await;
    assert_eq!(fixture.manager.send(Method::POST, &pause, None).await.status, 200);
    fixture.app.stop().await;
}

#[tokio::test]
async fn a_repeat_with_the_same_key_waits_again_and_the_description_says_so() {
    let fixture = Fixture::start_with(|settings| settings.hub.change_wait_ms = 200).await;
    let (db, receiver) = (fixture.database.pool(), Receiver::start().await);
    let subscriber = subscribe(&fixture.manager, &receiver.url(), json!({})).await;
    let pause = format!("{}/pause", subscriber_path(&subscriber));
    let replica = insert_process_before_a_failover(db).await;
    let with_key = fixture.manager.with_header("idempotency-key", "k");
    assert_eq!(with_key.send(Method::POST, &pause, None).await.status, 202);
    assert_eq!(with_key.send(Method::POST, &pause, None).await.status, 202);
    end_lease(db, replica).await;
    let repeated = with_key.send(Method::POST, &pause, None).await;
    assert_eq!((repeated.status, repeated.header("idempotent-replayed")), (200, "true"), "{repeated:?}");
    let document = fixture.app.anonymous().get("/openapi.json").await.json();
    for (path, method) in [("", "patch"), ("", "delete"), ("/pause", "post"), ("/resume", "post")] {
        let parameters = &document["paths"][format!("/hub/v1/subscribers/{{id}}{path}")][method]["parameters"];
        let key = parameters.as_array().unwrap().iter().find(|one| one["name"] == "idempotency-key").unwrap();
        assert!(text(&key["description"]).contains("202"), "{method} {path}: {key}");
    }
    fixture.app.stop().await;
}
