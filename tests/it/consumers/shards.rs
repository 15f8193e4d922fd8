//! Shards: code and schema agree on their number, and each has a position of its own.

use pillarbox::consumers::StartAt;
use pillarbox::log::SHARDS;
use pillarbox::operations::status;

use crate::consumers::removal::register;
use crate::consumers::support::{database, post_numbers};

#[tokio::test]
async fn code_schema_and_hash_have_the_same_shards() {
    let database = database().await;
    let ours: Vec<i16> = (0..SHARDS).collect();
    for (whose, query) in [
        ("the schema's", "select shard from pillarbox.shards() as shard order by shard"),
        (
            "the hash's",
            "select distinct pillarbox.shard_of('main', key::text) as shard from generate_series(1, 5000) as key order by shard",
        ),
    ] {
        let found: Vec<i16> = sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap();
        assert_eq!(found, ours, "{whose}");
    }
}

#[tokio::test]
async fn messages_of_other_shards_do_not_count_as_lag() {
    let database = database().await;
    let db = database.pool();
    register(db, "effects", StartAt::Beginning).await;
    post_numbers(db, Some("k"), 1..=3).await;
    let behind = async || status::consumers(db).await.unwrap()[0].lag_messages;
    assert_eq!(behind().await, 3);
    // Only the shard of the key has messages, and it has read them.
    sqlx::query(
        "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
         select 'effects', array[pillarbox.shard_of('main', 'k')], array[0], now, id, now(), now, id, now()
         from (select pg_current_snapshot() as now, max(id) as id from pillarbox.log) as all_of_it",
    )
    .execute(db)
    .await
    .unwrap();
    assert_eq!(behind().await, 0);
}
