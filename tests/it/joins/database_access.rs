//! Locks and indexes: how the joins service uses PostgreSQL.

use sqlx::PgPool;
use testkit::eventually;
use uuid::Uuid;

use crate::joins::fixture::{Fixture, next_version, wait_until_known};
use crate::support::{DEADLINE, lock_waits};

#[tokio::test]
async fn a_batch_of_event_updates_waits_for_a_lock_without_holding_another() {
    let fixture = Fixture::start(1).await;
    let mut events = [fixture.create_event(1).await, fixture.create_event(1).await];
    events.sort_by_key(|event| event.event_id);
    let [low, high] = &events;
    // Lock like a batch of another replica: in the order of the ids.
    let lock = "select 1 from pillarbox_joins.event_capacity where event_id = $1 for update";
    let mut tx = fixture.db().begin().await.unwrap();
    sqlx::query(lock).bind(low.event_id).execute(&mut *tx).await.unwrap();
    // Both updates are in one batch, in the opposite order.
    let (low_update, high_update) =
        (next_version(low, |event| event.capacity = 2), next_version(high, |event| event.capacity = 2));
    let insert = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
        select pillarbox.shard_of('main', key), gen_random_uuid(), 'events', 'main', 'event.updated', key, '{}', payload::json
        from unnest($1::text[], $2::text[]) with ordinality as m (key, payload, n) order by n";
    let text = |event: &contracts::events::EventChanged| serde_json::to_string(event).unwrap();
    sqlx::query(insert)
        .bind(vec![high.event_id.to_string(), low.event_id.to_string()])
        .bind(vec![text(&high_update), text(&low_update)])
        .execute(fixture.db())
        .await
        .unwrap();
    eventually("the updates wait for the lock", DEADLINE, async || lock_waits(fixture.db()).await > 0).await;
    // Shorter than the time after which PostgreSQL detects a deadlock and aborts one side.
    sqlx::query("set local lock_timeout = '300ms'").execute(&mut *tx).await.unwrap();
    sqlx::query(lock).bind(high.event_id).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    wait_until_known(fixture.db(), &low_update).await;
    wait_until_known(fixture.db(), &high_update).await;
    fixture.stop().await;
}

#[tokio::test]
async fn large_events_are_read_through_indexes() {
    let fixture = Fixture::start(1).await;
    let event = fixture.create_event(500).await;
    sqlx::query(
        "insert into pillarbox_joins.joins (id, event_id, user_id, status, seq, created_at, updated_at)
         select gen_random_uuid(), $1, gen_random_uuid(),
                (case when n <= 500 then 'active' else 'waitlisted' end)::pillarbox_joins.join_status, n, now(), now()
         from generate_series(1, 30000) as n",
    )
    .bind(event.event_id)
    .execute(fixture.db())
    .await
    .unwrap();
    let update =
        "update pillarbox_joins.event_capacity set active_count = 500, waitlist_count = 29500, next_seq = 30001";
    sqlx::query(update).execute(fixture.db()).await.unwrap();
    sqlx::query("vacuum analyze pillarbox_joins.joins").execute(fixture.db()).await.unwrap();
    let before = scans(fixture.db()).await;
    let user = fixture.join_users(&event, 1).await[0];
    for _ in 0..8 {
        let position = fixture.user(user).get(&format!("/join/v1/events/{}/position", event.event_id)).await.json();
        assert_eq!(position["ahead"], 10_000, "the maximum that is counted");
        for list in ["participants", "waitlist"] {
            let listed = fixture.organizer().get(&format!("/join/v1/events/{}/{list}?limit=5", event.event_id)).await;
            assert_eq!(listed.json()["items"].as_array().unwrap().len(), 5);
        }
        assert_eq!(fixture.user(user).get("/join/v1/me/joins").await.json()["items"].as_array().unwrap().len(), 1);
    }
    for _ in 0..8 {
        let one = fixture.join_users(&event, 1).await[0];
        assert_eq!(fixture.cancel(&event, one).await.status, 200);
    }
    // Cancel one of the 500 active registrations, so that the service searches the first waitlisted one.
    let seated: Uuid = sqlx::query_scalar("select user_id from pillarbox_joins.joins where seq = 1")
        .fetch_one(fixture.db())
        .await
        .unwrap();
    assert_eq!(fixture.cancel(&event, seated).await.status, 200);
    assert_eq!(fixture.counts(&event).await, (500, 29_500));
    // PostgreSQL reports statistics when a connection has been idle for a while, or ends.
    for app in fixture.apps {
        app.stop().await;
    }
    let after =
        eventually("the statistics are reported", DEADLINE, async || match scans(fixture.database.pool()).await {
            counted if counted.1 >= before.1 + 50 => Ok(counted),
            other => Err(other),
        })
        .await;
    // Only this test's own query for seq 1 may scan the table.
    assert!(after.0 - before.0 <= 30_100, "{} rows were read without an index", after.0 - before.0);
}

/// The rows of the table `joins` that were read without an index, and the number of index scans.
async fn scans(db: &PgPool) -> (i64, i64) {
    let query =
        "select seq_tup_read, idx_scan from pg_stat_user_tables where relid = 'pillarbox_joins.joins'::regclass";
    sqlx::query_as(query).fetch_one(db).await.unwrap()
}
