//! Shards: how many there are is said by the code and by the schema, since neither can ask the other; and each is for itself.

use mailbox::cursor::Start;
use mailbox::log::SHARDS;
use mailbox::status;

use crate::consuming::{database, post_numbers};
use crate::cursors::register;

#[tokio::test]
async fn the_code_the_schema_and_the_hash_know_the_same_shards() {
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
async fn a_shard_that_has_read_all_of_its_own_is_not_behind_for_another() {
    let database = database().await;
    let db = database.pool();
    register(db, "effects", Start::Beginning).await;
    post_numbers(db, Some("k"), 1..=3).await;
    let behind = async || status::consumers(db).await.unwrap()[0].lag_messages;
    assert_eq!(behind().await, 3);
    // Only the shard of the key has anything to read, and has read it.
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
