//! Joins in a database of their own, through crashes, and beside who locks the same.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::Method;
use kit::auth::TokenSigner;
use kit::clock::Clock;
use kit::secret::{MasterKey, Secret};
use mailbox::database::migrations;
use pillarbox::settings::{Bus, Role};
use serde_json::json;
use sqlx::PgPool;
use testkit::{Client, TestApp, TestDatabase, TestVhost, drain};
use uuid::Uuid;

use crate::broker::Outside;
use crate::events_world;
use crate::instance::{DataFolder, serve};
use crate::joins_world::{PATIENCE, World, act, act_keyed, check, next, published, tell, until_known};
use crate::relaying::relaying;

#[tokio::test]
async fn joins_hear_and_tell_over_the_broker_from_a_database_of_their_own() {
    let (theirs, ours) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let vhost = TestVhost::new().await;
    let relay = TestApp::start_with(&theirs, relaying(&vhost)).await;
    let joins = TestApp::start_with(&ours, |settings| {
        settings.amqp_url = Some(Secret::new(vhost.amqp_url()));
        settings.bus = Bus::Rabbitmq;
        settings.relay.initial_delay_ms = 0;
        settings.services = vec!["joins".to_owned()];
        settings.roles = vec![Role::Api, Role::Consume, Role::Relay, Role::Maintain];
    })
    .await;
    let outside = Outside::of(&vhost).await;
    outside.until_listening("joins.events").await;
    outside.queue("listening", "pillarbox.events", "join.#").await;
    let owner = Uuid::now_v7();
    let event = published(owner, 1);
    tell(theirs.pool(), &event).await;
    until_known(ours.pool(), &event).await;
    let users = [Uuid::now_v7(), Uuid::now_v7()];
    for user in users {
        assert_eq!(act(&joins.user(user, None), event.event_id, "join").await.status, 201);
    }
    assert_eq!(act(&joins.user(users[0], None), event.event_id, "cancel").await.status, 200);
    let heard = outside.take("listening", 4).await;
    let told: Vec<_> =
        heard.iter().map(|message| (message.routing_key.as_str(), message.body["payload"]["counts"].clone())).collect();
    let counts = |active, waitlisted, version| json!({"active": active, "waitlisted": waitlisted, "version": version});
    assert_eq!(
        told,
        [
            ("join.confirmed", counts(1, 0, 1)),
            ("join.waitlisted", counts(1, 1, 2)),
            ("join.canceled", counts(0, 1, 3)),
            ("join.promoted", counts(1, 0, 4))
        ]
    );
    for message in &heard {
        assert_eq!(message.body["trace_id"], message.body["payload"]["trace_id"], "one trace");
        assert_eq!(message.headers["pillarbox-key"], event.event_id.to_string());
    }
    let more = next(&event, |event| event.capacity = 5);
    tell(theirs.pool(), &more).await;
    until_known(ours.pool(), &more).await;
    check(ours.pool(), &[]).await;
    joins.stop().await;
    relay.stop().await;
}

/// What each user was answered, by user.
type Answered = Arc<Mutex<BTreeMap<Uuid, Option<String>>>>;

/// Lets new people join until the server is gone.
async fn join_until_gone(base: Client, signer: Arc<TokenSigner>, event: Uuid, answered: Answered) {
    loop {
        let user = Uuid::now_v7();
        answered.lock().unwrap().insert(user, None);
        let token = signer.sign(user, None, Clock::system().now(), Duration::from_secs(600)).unwrap();
        let client = base.bearer(&token).with_header("idempotency-key", "mine");
        let path = format!("/join/v1/events/{event}/join");
        match client.try_send(Method::POST, &path, None).await {
            Ok(answer) if answer.status == 201 => drop(answered.lock().unwrap().insert(user, Some(answer.text))),
            Ok(answer) => assert_eq!(answer.status, 503, "{answer:?}"),
            Err(_) => return,
        }
    }
}

#[tokio::test]
async fn what_was_joined_is_joined_after_kill_9_and_a_repeat_says_so() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let master = MasterKey::generate();
    let (secret, signer) = (master.to_base64(), Arc::new(TokenSigner::new(&master)));
    let env = [("PILLARBOX_SECRET_KEY", secret.as_str())];
    let event = published(Uuid::now_v7(), 40);
    tell(database.pool(), &event).await;
    let answered = Answered::default();
    for _ in 0..3 {
        let mut process = serve(&folder, &database, &env);
        let base = Client::new(&process.base_url().await);
        until_known(database.pool(), &event).await;
        let joiner = || join_until_gone(base.clone(), signer.clone(), event.event_id, answered.clone());
        let joiners: Vec<_> = (0..8).map(|_| tokio::spawn(joiner())).collect();
        let before = answered.lock().unwrap().len();
        let enough = before + 40 + Uuid::new_v4().as_u128() as usize % 60;
        drain("joins", PATIENCE, async || answered.lock().unwrap().len() >= enough).await;
        process.kill9();
        for joiner in joiners {
            joiner.await.unwrap();
        }
    }
    let mut process = serve(&folder, &database, &env);
    let base = Client::new(&process.base_url().await);
    let all = answered.lock().unwrap().clone();
    assert!(all.values().flatten().count() > 100, "enough were answered");
    for (user, first) in &all {
        let token = signer.sign(*user, None, Clock::system().now(), Duration::from_secs(600)).unwrap();
        let again = act_keyed(&base.bearer(&token), event.event_id, "join", "mine").await;
        assert_eq!(again.status, 201, "{again:?}");
        if let Some(first) = first {
            assert_eq!((&again.text, again.header("idempotent-replayed")), (first, "true"));
        }
    }
    let joined: i64 =
        sqlx::query_scalar("select count(*) from pillarbox_joins.joins").fetch_one(database.pool()).await.unwrap();
    assert_eq!(joined, all.len() as i64);
    check(database.pool(), &[]).await;
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn events_catch_up_with_joins_that_are_killed_before_they_have_told() {
    let (vhost, folder) = (TestVhost::new().await, DataFolder::new());
    let (theirs, ours) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let events = TestApp::start_with(&theirs, |settings| {
        relaying(&vhost)(settings);
        settings.bus = Bus::Rabbitmq;
        settings.services = vec!["events".to_owned()];
        settings.roles = vec![Role::Api, Role::Relay, Role::Consume];
    })
    .await;
    let master = MasterKey::generate();
    let (secret, signer, amqp) = (master.to_base64(), Arc::new(TokenSigner::new(&master)), vhost.amqp_url());
    let start = |delay_ms: &str| {
        let env = [
            ("PILLARBOX_SECRET_KEY", secret.as_str()),
            ("PILLARBOX_AMQP_URL", &amqp),
            ("PILLARBOX_BUS", "rabbitmq"),
            ("PILLARBOX_SERVICES", "[\"joins\"]"),
            ("PILLARBOX_LEASE_MS", "1000"),
            ("PILLARBOX_RELAY__INITIAL_DELAY_MS", delay_ms),
        ];
        serve(&folder, &ours, &env)
    };
    let (outside, mut event, answered) = (Outside::of(&vhost).await, None, Answered::default());
    // At first nothing is published, so all that was joined is still to be told; then some of it, somewhere in the middle.
    for delay_ms in ["600000", "0", "0"] {
        let mut process = start(delay_ms);
        let base = Client::new(&process.base_url().await);
        outside.until_listening("joins.events").await;
        if event.is_none() {
            let owner = events.user(Uuid::now_v7(), None);
            let published = events_world::published(&owner, events_world::meetup_with(json!({"capacity": 0}))).await;
            drain("joins know the event", PATIENCE, async || {
                let known = "select count(*) from pillarbox_joins.event_capacity where status = 'published'";
                sqlx::query_scalar::<_, i64>(known).fetch_one(ours.pool()).await.unwrap() == 1
            })
            .await;
            event = Some(published);
        }
        let id = events_world::id(event.as_ref().unwrap());
        let joiner = || join_until_gone(base.clone(), signer.clone(), id, answered.clone());
        let joiners: Vec<_> = (0..4).map(|_| tokio::spawn(joiner())).collect();
        let enough = answered.lock().unwrap().len() + 40;
        drain("joins", PATIENCE, async || answered.lock().unwrap().len() >= enough).await;
        process.kill9();
        for joiner in joiners {
            joiner.await.unwrap();
        }
    }
    let event = event.unwrap();
    let shown =
        async || events.anyone().get(&events_world::path(&event)).await.json()["active_participants"].as_i64().unwrap();
    let joined: i64 = sqlx::query_scalar("select count(*) from pillarbox_joins.joins where status = 'active'")
        .fetch_one(ours.pool())
        .await
        .unwrap();
    assert!(joined >= answered.lock().unwrap().values().flatten().count() as i64);
    let mut process = start("0");
    process.base_url().await;
    drain("events catch up", PATIENCE, async || match shown().await {
        count if count == joined => Ok(()),
        other => Err((other, joined)),
    })
    .await;
    check(ours.pool(), &[]).await;
    assert!(process.terminate().await.success());
    events.stop().await;
}

#[tokio::test]
async fn news_of_many_events_wait_for_a_lock_without_holding_another() {
    let world = World::start(1).await;
    let mut events = [world.event(1).await, world.event(1).await];
    events.sort_by_key(|event| event.event_id);
    let [low, high] = &events;
    // As a batch of another replica does: in the order of the ids.
    let hold = "select 1 from pillarbox_joins.event_capacity where event_id = $1 for update";
    let mut tx = world.db().begin().await.unwrap();
    sqlx::query(hold).bind(low.event_id).execute(&mut *tx).await.unwrap();
    // Both come in one batch, in the other order.
    let (low_news, high_news) = (next(low, |event| event.capacity = 2), next(high, |event| event.capacity = 2));
    let insert = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
        select pillarbox.shard_of('main', key), gen_random_uuid(), 'events', 'main', 'event.updated', key, '{}', payload::json
        from unnest($1::text[], $2::text[]) with ordinality as m (key, payload, n) order by n";
    let text = |event: &contracts::events::EventChanged| serde_json::to_string(event).unwrap();
    sqlx::query(insert)
        .bind(vec![high.event_id.to_string(), low.event_id.to_string()])
        .bind(vec![text(&high_news), text(&low_news)])
        .execute(world.db())
        .await
        .unwrap();
    drain("the news wait", PATIENCE, async || waiting(world.db()).await > 0).await;
    // Long before PostgreSQL would look for a circle, and end one side.
    sqlx::query("set local lock_timeout = '300ms'").execute(&mut *tx).await.unwrap();
    sqlx::query(hold).bind(high.event_id).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    until_known(world.db(), &low_news).await;
    until_known(world.db(), &high_news).await;
    world.stop().await;
}

async fn waiting(db: &PgPool) -> i64 {
    let query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

#[tokio::test]
async fn large_events_are_read_by_index() {
    let world = World::start(1).await;
    let event = world.event(500).await;
    sqlx::query(
        "insert into pillarbox_joins.joins (id, event_id, user_id, status, seq, created_at, updated_at)
         select gen_random_uuid(), $1, gen_random_uuid(),
                (case when n <= 500 then 'active' else 'waitlisted' end)::pillarbox_joins.join_status, n, now(), now()
         from generate_series(1, 30000) as n",
    )
    .bind(event.event_id)
    .execute(world.db())
    .await
    .unwrap();
    let update =
        "update pillarbox_joins.event_capacity set active_count = 500, waitlist_count = 29500, next_seq = 30001";
    sqlx::query(update).execute(world.db()).await.unwrap();
    sqlx::query("vacuum analyze pillarbox_joins.joins").execute(world.db()).await.unwrap();
    let before = scans(world.db()).await;
    let user = world.fill(&event, 1).await[0];
    for _ in 0..8 {
        let place = world.user(user).get(&format!("/join/v1/events/{}/position", event.event_id)).await.json();
        assert_eq!(place["ahead"], 10_000, "so many, or more");
        for list in ["participants", "waitlist"] {
            let listed = world.organizer().get(&format!("/join/v1/events/{}/{list}?limit=5", event.event_id)).await;
            assert_eq!(listed.json()["items"].as_array().unwrap().len(), 5);
        }
        assert_eq!(world.user(user).get("/join/v1/me/joins").await.json()["items"].as_array().unwrap().len(), 1);
    }
    for _ in 0..8 {
        let one = world.fill(&event, 1).await[0];
        assert_eq!(world.cancel(&event, one).await.status, 200);
    }
    // One is taken out of the 500, so that the first who waits is looked for.
    let seated: Uuid = sqlx::query_scalar("select user_id from pillarbox_joins.joins where seq = 1")
        .fetch_one(world.db())
        .await
        .unwrap();
    assert_eq!(world.cancel(&event, seated).await.status, 200);
    assert_eq!(world.counts(&event).await, (500, 29_500));
    // Counters are told of when a connection has been idle for a while, or ends.
    for app in world.apps {
        app.stop().await;
    }
    let after = drain("all is counted", PATIENCE, async || match scans(world.database.pool()).await {
        counted if counted.1 >= before.1 + 50 => Ok(counted),
        other => Err(other),
    })
    .await;
    // Only the statement of this test that looks for seq 1 may read the table.
    assert!(after.0 - before.0 <= 30_100, "{} rows were read without an index", after.0 - before.0);
}

/// Rows of the joins that were read without an index, and how often an index was used.
async fn scans(db: &PgPool) -> (i64, i64) {
    let query =
        "select seq_tup_read, idx_scan from pg_stat_user_tables where relid = 'pillarbox_joins.joins'::regclass";
    sqlx::query_as(query).fetch_one(db).await.unwrap()
}
