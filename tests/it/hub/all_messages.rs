//! The messages of all subscribers of a tenant, newest first.

use sqlx::PgPool;
use testkit::eventually;

use crate::hub::rows::{create_subscriber, insert_attempt, insert_event, insert_message, start_api_only};
use crate::support::{DEADLINE, caller, collect_pages, uuid_of};

const PATH: &str = "/hub/v1/messages";

/// The rows of messages that were read by sequential scans, the entries of their indexes, and the searches in the indexes.
async fn reads(db: &PgPool) -> (i64, i64, i64) {
    sqlx::query_as(
        "select sum(seq_tup_read)::bigint, sum(entries)::bigint, sum(searches)::bigint from pg_stat_user_tables
         join lateral (select sum(idx_tup_read) as entries, sum(idx_scan) as searches from pg_stat_user_indexes as i
                       where i.relid = pg_stat_user_tables.relid) of_indexes on true
         where schemaname = 'pillarbox_hub' and relname like 'message%'",
    )
    .fetch_one(db)
    .await
    .unwrap()
}

#[tokio::test]
async fn the_messages_of_all_subscribers_are_paged_from_the_newest_and_filtered() {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    let rival = caller(&app, "manage", "rival").await;
    let mut ids = Vec::new();
    for name in ["one", "two", "three"] {
        ids.push(create_subscriber(&acme, name).await);
    }
    let (of_rival, deleted) = (create_subscriber(&rival, "rival").await, create_subscriber(&acme, "deleted").await);
    let event = insert_event(db, "acme", "order.paid", "{}").await;
    // The first subscriber has the oldest messages, the others alternate.
    let owners = [0, 0, 0, 1, 2, 1, 2, 1, 1, 2];
    for (n, owner) in owners.iter().enumerate() {
        insert_message(db, 10 + n as i64, ids[*owner], event).await;
    }
    insert_message(db, 100, of_rival, event).await;
    insert_message(db, 101, deleted, event).await;
    assert_eq!(acme.delete(&format!("/hub/v1/subscribers/{deleted}")).await.status, 204);
    insert_attempt(db, ids[0], 11, 1, "delivered", 200).await;
    insert_attempt(db, ids[1], 13, 1, "delivered", 200).await;

    for limit in [1, 3, 100] {
        let listed = collect_pages(&acme, &format!("{PATH}?limit={limit}")).await;
        let found: Vec<_> = listed.iter().map(|message| uuid_of(&message["subscriber_id"])).collect();
        let expected: Vec<_> = owners.iter().rev().map(|owner| ids[*owner]).collect();
        assert_eq!(found, expected, "pages of {limit}");
    }
    let delivered = collect_pages(&acme, &format!("{PATH}?limit=1&outcome=delivered")).await;
    let found: Vec<_> = delivered.iter().map(|message| uuid_of(&message["subscriber_id"])).collect();
    assert_eq!(found, [ids[1], ids[0]]);
    assert!(delivered.iter().all(|message| message["event_type"] == "order.paid"), "{delivered:?}");
    assert_eq!(collect_pages(&acme, &format!("{PATH}?subscriber_id={}", ids[0])).await.len(), 3);
    // A cursor belongs to its list: neither another tenant nor another filter accepts it.
    let cursor = acme.get(&format!("{PATH}?limit=1")).await.json()["next_cursor"].as_str().unwrap().to_owned();
    for (client, query) in [(&rival, ""), (&acme, "&outcome=dead")] {
        let answer = client.get(&format!("{PATH}?limit=1&cursor={cursor}{query}")).await;
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    assert_eq!(collect_pages(&rival, PATH).await.len(), 1);
    app.stop().await;
}

/// Subscribers of a tenant that is searched for each of them, and of one whose messages are found among the newest of all.
const FEW: usize = 20;
const MANY: usize = 200;

#[tokio::test]
async fn a_page_of_all_messages_of_few_subscribers_reads_few_rows_of_many() {
    let (entries, searches) = reads_of_a_page(FEW).await;
    assert!((20..3_000).contains(&entries), "{entries} entries of indexes were read of 42,000 messages");
    assert!(searches < 2_000, "{searches} searches for 20 subscribers");
}

#[tokio::test]
async fn the_cost_of_a_page_of_all_messages_does_not_depend_on_the_number_of_subscribers() {
    let (_, searches) = reads_of_a_page(MANY).await;
    // One search per subscriber and partition would be 200 times 9.
    assert!(searches < 1_500, "{searches} searches for {MANY} subscribers");
}

/// Loads a page of a tenant with this number of subscribers, which have nearly all of 42,000 messages. Returns the entries of
/// indexes that were read for it, and the searches in them. Fails if a table of messages was scanned.
async fn reads_of_a_page(subscribers: usize) -> (i64, i64) {
    let (database, app) = start_api_only().await;
    let (db, acme) = (database.pool(), caller(&app, "manage", "acme").await);
    for n in 0..subscribers {
        create_subscriber(&acme, &format!("s{n}")).await;
    }
    create_subscriber(&caller(&app, "manage", "rival").await, "rival").await;
    // The subscribers take turns, so that acme has most of the messages and each page belongs to many.
    sqlx::query(
        "insert into pillarbox_hub.message (n, at, subscriber, lane, seq, log_shard, log_id, log_at)
         select n, now(), owner.id, 'k', n, 0, n, now()
         from generate_series(1, 42000) as n
         join (select id, row_number() over (order by id) - 1 as at from pillarbox_hub.subscriber) owner
              on owner.at = n % ($1 + 1)
         order by n",
    )
    .bind(subscribers as i64)
    .execute(db)
    .await
    .unwrap();
    let batch = "insert into pillarbox_hub.fanout_batch (n_from, n_to, subscribers, at, has_commands)
                 values (1, 42000, '{}', now(), false)";
    sqlx::query(batch).execute(db).await.unwrap();
    // The reads of these statements are counted before those of the server. A session adds its counts some seconds after it has
    // become idle, unless it is asked to.
    let mut session = db.acquire().await.unwrap();
    for statement in ["vacuum analyze pillarbox_hub.message", "select pg_stat_force_next_flush()"] {
        sqlx::query(statement).execute(&mut *session).await.unwrap();
    }
    drop(session);
    let before = reads(db).await;
    let page = acme.get(&format!("{PATH}?limit=50")).await.json();
    assert_eq!(page["items"].as_array().unwrap().len(), 50);
    let newest = if subscribers == FEW { 42_000 } else { 41_999 };
    assert!(page["items"][0]["seq"].as_i64().unwrap() >= newest, "{}", page["items"][0]);
    let after = eventually("the reads are counted", DEADLINE, async || match reads(db).await {
        after if after.2 > before.2 => Ok(after),
        other => Err(other),
    })
    .await;
    assert_eq!(after.0, before.0, "no table of messages is scanned");
    app.stop().await;
    (after.1 - before.1, after.2 - before.2)
}
