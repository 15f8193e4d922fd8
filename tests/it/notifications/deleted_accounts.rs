//! The deletion of accounts locks in the order of everybody else, and its cost does not depend on how many other users there are.

use std::collections::BTreeMap;

use contracts::identity::{ACCOUNT_DELETED, AccountDeleted};
use pillarbox::log::{Post, Source, post};
use serde_json::value::to_raw_value;
use server::migrations;
use server::settings::Role;
use sqlx::PgPool;
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use super::fixture::users;
use crate::support::DEADLINE;

/// What a user has in each table that a deletion and others lock.
const ROWS_OF_USER: [&str; 4] = [
    "insert into pillarbox_notify.inbox (user_id, last_seq, unread) values ($1, 0, 0)",
    "insert into pillarbox_notify.contact (user_id) values ($1)",
    "insert into pillarbox_notify.recipient values ('ADMIN', null, $1)",
    "insert into pillarbox_notify.preference_set values ($1, 1, now())",
];

/// The tables with rows by user.
const TABLES: [&str; 10] = [
    "participant",
    "waiting_registration",
    "inbox",
    "notification",
    "contact",
    "recipient",
    "preference_set",
    "preference",
    "quiet_hours",
    "mail",
];

/// Posts the deletions of these accounts in one transaction, so that one transaction of the handler processes them.
async fn delete_accounts(db: &PgPool, users: &[Uuid]) {
    let mut tx = db.begin().await.unwrap();
    for user_id in users {
        let payload = to_raw_value(&AccountDeleted { user_id: *user_id }).unwrap();
        let message = Post::new(ACCOUNT_DELETED, payload).with_key(user_id.to_string());
        post(&mut tx, &Source::new(contracts::identity::SOURCE), &message).await.unwrap();
    }
    tx.commit().await.unwrap();
}

async fn rows_of(db: &PgPool, users: &[Uuid]) -> BTreeMap<&'static str, i64> {
    let mut found = BTreeMap::new();
    for table in TABLES {
        let query = format!("select count(*) from pillarbox_notify.{table} where user_id = any($1)");
        let count = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(users).fetch_one(db).await.unwrap();
        found.insert(table, count);
    }
    found
}

async fn wait_until_deleted(db: &PgPool, users: &[Uuid]) {
    eventually("everything of the users is deleted", DEADLINE, async || {
        let found = rows_of(db, users).await;
        if found.values().all(|rows| *rows == 0) { Ok(()) } else { Err(found) }
    })
    .await;
}

#[tokio::test]
async fn deletions_of_accounts_lock_rows_in_the_order_of_handlers_and_imports() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, app) = (database.pool(), TestApp::start(&database).await);
    // A transaction of another kind locks the first, then the second: of the user with the lower or with the higher id.
    for (first, second) in [
        (("participant", 1), ("participant", 0)),
        (("participant", 1), ("inbox", 0)),
        (("inbox", 0), ("inbox", 1)),
        (("contact", 0), ("contact", 1)),
        (("contact", 1), ("recipient", 0)),
        (("preference_set", 0), ("preference_set", 1)),
    ] {
        let mut users = users(2);
        users.sort();
        // The order of the rows in the table is the other one.
        for user in users.iter().rev() {
            for insert in ROWS_OF_USER {
                sqlx::query(insert).bind(user).execute(db).await.unwrap();
            }
            // Participants are locked in the order of the events: here, that of the user with the higher id first.
            let insert = "insert into pillarbox_notify.participant values ($1, $2, 'active')";
            let event = Uuid::from_u128(if *user == users[0] { 2 } else { 1 });
            sqlx::query(insert).bind(event).bind(user).execute(db).await.unwrap();
        }
        // Of small tables, rows are found in the order of the table.
        sqlx::query("analyze").execute(db).await.unwrap();
        let mut tx = db.begin().await.unwrap();
        let lock = |(table, _): (&str, usize)| {
            sqlx::AssertSqlSafe(format!("select from pillarbox_notify.{table} where user_id = $1 for update nowait"))
        };
        sqlx::query(lock(first)).bind(users[first.1]).execute(&mut *tx).await.unwrap();
        let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *tx).await.unwrap();
        delete_accounts(db, &users).await;
        eventually("the deletion waits for the lock", DEADLINE, async || {
            let waits = "select exists (select from pg_stat_activity where $1 = any(pg_blocking_pids(pid)))";
            sqlx::query_scalar::<_, bool>(waits).bind(pid).fetch_one(db).await.unwrap()
        })
        .await;
        let locked = sqlx::query(lock(second)).bind(users[second.1]).execute(&mut *tx).await;
        assert!(locked.is_ok(), "{first:?}, then {second:?}: the deletion has locked it already: a deadlock");
        tx.rollback().await.unwrap();
        wait_until_deleted(db, &users).await;
    }
    app.stop().await;
}

/// Rows of other users in each table.
const OTHERS: i64 = 10_000;
/// More than the blocks that the deletion of one user needs in a table, and less than the smallest index has.
const BLOCKS_MAX: i64 = 45;

#[tokio::test]
async fn the_deletion_of_an_account_reads_no_table_as_a_whole() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, user) = (database.pool(), Uuid::now_v7());
    let mut filling = db.acquire().await.unwrap();
    for insert in [
        "insert into pillarbox_notify.participant select gen_random_uuid(), id, 'active' from users",
        "insert into pillarbox_notify.waiting_registration
             (message_id, event_id, user_id, topic, payload, due_at, created_at)
         select gen_random_uuid(), gen_random_uuid(), id, 'join.confirmed', '{}', 'infinity', now() from users",
        "insert into pillarbox_notify.inbox (user_id, last_seq, unread) select id, 1, 1 from users",
        "insert into pillarbox_notify.notification (event_id, user_id, channel, status, seq, created_at)
         select gen_random_uuid(), id, channel, 'delivered', case channel when 'in_app' then 1 end, now()
         from users cross join unnest('{in_app,email}'::text[]) as channel",
        "insert into pillarbox_notify.contact (user_id) select id from users",
        "insert into pillarbox_notify.recipient select 'ADMIN', null, id from users",
        "insert into pillarbox_notify.preference_set select id, 1, now() from users",
        "insert into pillarbox_notify.preference (user_id, enabled) select id, true from users",
        "insert into pillarbox_notify.quiet_hours select id, 'UTC', '22:00', '07:00' from users",
        "insert into pillarbox_notify.mail (message_id, source, idempotency_key, user_id, recipient, template, locale,
             subject, text, html, status, next_attempt_at, give_up_at, created_at)
         select id, 'identity', id::text, id, 'a@example.org', 't', 'en', 's', 't', 'h', 'captured', now(), now(), now()
         from users",
    ] {
        let users = "with users (id) as (select gen_random_uuid() from generate_series(1, $1) union all select $2)";
        let insert = format!("{users} {insert}");
        sqlx::query(sqlx::AssertSqlSafe(insert)).bind(OTHERS).bind(user).execute(&mut *filling).await.unwrap();
    }
    // What follows is counted, and nothing else.
    for table in TABLES {
        let quiet = format!("alter table pillarbox_notify.{table} set (autovacuum_enabled = off)");
        sqlx::query(sqlx::AssertSqlSafe(quiet)).execute(&mut *filling).await.unwrap();
    }
    for statement in ["analyze", "select pg_stat_force_next_flush()", "select pg_stat_reset()"] {
        sqlx::query(statement).execute(&mut *filling).await.unwrap();
    }
    filling.close().await.unwrap();
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Consume]).await;
    delete_accounts(db, &[user]).await;
    eventually("the deletion is recorded", DEADLINE, async || {
        let deleted = "select exists (select from pillarbox_notify.deleted_account)";
        sqlx::query_scalar::<_, bool>(deleted).fetch_one(db).await.unwrap()
    })
    .await;
    // The sessions report what they have read when they end.
    app.stop().await;
    // A worker scans a whole index rather than a table, so the blocks of both count.
    let read: Vec<(String, i64)> = sqlx::query_as(
        "select relname::text, blocks from pg_statio_user_tables cross join lateral (
             select heap_blks_read + heap_blks_hit + coalesce(idx_blks_read, 0) + coalesce(idx_blks_hit, 0)) sum (blocks)
         where schemaname = 'pillarbox_notify' and relname = any($1) and blocks > $2 order by relname",
    )
    .bind(TABLES)
    .bind(BLOCKS_MAX)
    .fetch_all(db)
    .await
    .unwrap();
    assert_eq!(read, [], "tables that were read as a whole, and how many blocks");
    assert!(rows_of(db, &[user]).await.values().all(|rows| *rows == 0));
}
