//! Days of the log and of positions: which ones retention drops, and the state that a returning consumer finds.

use pillarbox::operations::cursors::{self, DeleteResult};
use pillarbox::operations::maintenance::Retention;
use testkit::eventually;

use crate::consumers::support::{Process, TIMEOUT, count, numbers, recorder, wait_for_effects};
use crate::days::support::{DAY, POST, day, exists, maintain, positions, post, start};

/// A consumer may be behind for longer than in these tests.
const PATIENT: Retention = Retention { log_days: 7, behind_days: 40 };

#[tokio::test]
async fn a_consumer_away_for_longer_than_a_partition_lives_resumes_where_it_was() {
    let time = start().await;
    let db = time.database().pool();
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    let before = positions(db).await;
    assert_eq!(before.len(), 16);
    let (log, position) = (day(db, "pillarbox.log", 0).await, day(db, "pillarbox.position", 0).await);
    for number in 2..=20 {
        post(db, number).await;
        time.advance(DAY);
        maintain(db, PATIENT).await;
    }
    assert!(!exists(db, &position).await, "the day of its positions is dropped");
    assert_eq!(positions(db).await, before, "its positions are not");
    assert!(exists(db, &log).await, "the log waits for it");
    let process = Process::start(db, recorder());
    wait_for_effects(db, 20).await;
    process.stop().await;
    assert_eq!(numbers(db).await, (1..=20).collect::<Vec<_>>(), "each message once, in order");
    time.advance(DAY);
    maintain(db, PATIENT).await;
    assert!(!exists(db, &log).await, "everything of that day is read");

    assert_eq!(cursors::delete(db, "effects").await.unwrap(), DeleteResult::Deleted { dead_letters: 0 });
    time.advance(10 * DAY);
    maintain(db, PATIENT).await;
    assert_eq!(count(db, "position").await, 0, "the positions of a dropped consumer are dropped with their days");
}

#[tokio::test]
async fn a_position_that_is_saved_while_its_day_is_dropped_wins() {
    let time = start().await;
    let db = time.database().pool();
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    let old = day(db, "pillarbox.position", 0).await;
    let (before, rows) = (positions(db).await, count(db, "position").await);
    time.advance(10 * DAY);

    // A shard worker is about to commit a newer position. Until then the day cannot be dropped, and nothing is copied.
    let mut saving = db.begin().await.unwrap();
    let save = "insert into pillarbox.position (consumer, shards, last_ids, old, old_id, old_at, new, new_id, new_at)
                select 'effects', array[shard], array[77::bigint], old, old_id, old_at, new, new_id, new_at
                from pillarbox.shards() as shard cross join lateral pillarbox.latest_position('effects', shard)";
    sqlx::query(save).execute(&mut *saving).await.unwrap();
    maintain(db, PATIENT).await;
    assert!(exists(db, &old).await);
    assert_eq!((positions(db).await, count(db, "position").await), (before.clone(), rows));
    saving.commit().await.unwrap();
    let saved = positions(db).await;
    assert!(saved != before && saved.iter().all(|position| position.ends_with(" 77")), "{saved:?}");
    maintain(db, PATIENT).await;
    assert!(!exists(db, &old).await);
    assert_eq!(positions(db).await, saved);
}

#[tokio::test]
async fn overflow_rows_survive_until_every_consumer_has_read_them() {
    let time = start().await;
    let db = time.database().pool();
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    // No process maintains the log for nine days: the partitions that were created ahead are used up.
    time.advance(9 * DAY);
    let mut late = db.begin().await.unwrap();
    sqlx::query(POST).bind(2_i64).execute(&mut *late).await.unwrap();
    assert_eq!(
        sqlx::query_scalar::<_, i64>("select count(*) from pillarbox.log_overflow")
            .fetch_one(&mut *late)
            .await
            .unwrap(),
        1
    );
    // It commits two days later, when the consumer's position is already beyond its time.
    time.advance(2 * DAY);
    post(db, 3).await;
    wait_for_effects(db, 2).await;
    process.stop().await;
    late.commit().await.unwrap();
    post(db, 4).await;
    let newest = positions(db).await;
    assert!(count(db, "position_overflow").await > 0, "its positions are also in their overflow partition");
    time.advance(10 * DAY);
    for _ in 0..3 {
        maintain(db, PATIENT).await;
    }
    assert_eq!(positions(db).await, newest, "it continues there");
    assert_eq!(count(db, "log_overflow").await, 3, "the consumer has not read two of them");
    let process = Process::start(db, recorder());
    wait_for_effects(db, 4).await;
    process.stop().await;
    let mut all = numbers(db).await;
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3, 4]);
    time.advance(2 * DAY);
    maintain(db, PATIENT).await;
    assert_eq!(count(db, "log_overflow").await, 0, "they are deleted once they are read");
    assert_eq!(count(db, "position_overflow").await, 0, "the newest positions are not there any more");
}

#[tokio::test]
async fn a_commit_later_than_its_day_is_not_dropped_with_it() {
    let time = start().await;
    let db = time.database().pool();
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    let mut late = db.begin().await.unwrap();
    sqlx::query(POST).bind(2_i64).execute(&mut *late).await.unwrap();
    let day = day(db, "pillarbox.log", 0).await;
    time.advance(2 * DAY);
    post(db, 3).await;
    wait_for_effects(db, 2).await;
    process.stop().await;
    time.advance(8 * DAY);
    maintain(db, PATIENT).await;
    assert!(exists(db, &day).await, "its transaction is in progress");
    late.commit().await.unwrap();
    maintain(db, PATIENT).await;
    assert!(exists(db, &day).await, "the consumer has not read it");
    let process = Process::start(db, recorder());
    wait_for_effects(db, 3).await;
    post(db, 4).await;
    wait_for_effects(db, 4).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 3, 2, 4]);
    time.advance(DAY);
    maintain(db, PATIENT).await;
    assert!(!exists(db, &day).await);
}

#[tokio::test]
async fn no_day_from_yesterday_on_is_dropped_whatever_the_settings_are() {
    const NOTHING: Retention = Retention { log_days: 0, behind_days: 0 };
    let time = start().await;
    let db = time.database().pool();
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    let tables = ["pillarbox.log", "pillarbox.position", "pillarbox.inbox"];
    let mut days = Vec::new();
    for table in tables {
        days.push(day(db, table, 0).await);
    }
    for _ in 0..2 {
        maintain(db, NOTHING).await;
        for (table, day) in tables.iter().zip(&days) {
            assert!(exists(db, day).await);
            let drop =
                sqlx::query("select pillarbox.drop_day($1::text::regclass, $2::text::regclass)").bind(table).bind(day);
            let refused = drop.execute(db).await.unwrap_err().to_string();
            assert!(refused.contains("only days before yesterday"), "{refused}");
        }
        time.advance(DAY);
    }
    // The consumer advances beyond the day; only then all of it may go.
    post(db, 2).await;
    wait_for_effects(db, 2).await;
    eventually("the position is saved", TIMEOUT, async || {
        let query = "select min(old_at) > now() - interval '1 hour' from pillarbox.shards() as shard
                     cross join lateral pillarbox.latest_position('effects', shard)";
        sqlx::query_scalar::<_, bool>(query).fetch_one(db).await.unwrap()
    })
    .await;
    process.stop().await;
    maintain(db, NOTHING).await;
    assert!(!exists(db, &days[0]).await, "it is the day before yesterday by now");
    assert!(exists(db, &day(db, "pillarbox.log", 1).await).await);
}

#[tokio::test]
async fn a_consumer_lapses_after_its_days_and_continues_after_a_reset() {
    let time = start().await;
    let db = time.database().pool();
    let process = Process::start(db, recorder());
    post(db, 1).await;
    wait_for_effects(db, 1).await;
    process.stop().await;
    post(db, 2).await;
    let first = day(db, "pillarbox.log", 0).await;
    let lapsed = async || {
        let query = "select count(*) from pillarbox.cursor where lapsed_at is not null";
        sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap()
    };
    time.advance(13 * DAY);
    maintain(db, Retention::default()).await;
    assert_eq!((lapsed().await, exists(db, &first).await), (0, true), "the log waits for it for 14 days");
    time.advance(2 * DAY);
    maintain(db, Retention::default()).await;
    assert_eq!((lapsed().await, exists(db, &first).await), (1, false), "retention goes on without it");

    let process = Process::start(db, recorder());
    post(db, 3).await;
    eventually("the health report names the reset command", TIMEOUT, async || {
        let report = process.health.report();
        report.iter().any(|state| state.error.as_ref().is_some_and(|error| error.contains("cursors reset effects")))
    })
    .await;
    assert_eq!(numbers(db).await, [1], "it reads nothing");
    assert!(cursors::reset(db, "effects", None).await.unwrap());
    post(db, 4).await;
    wait_for_effects(db, 2).await;
    process.stop().await;
    assert_eq!(numbers(db).await, [1, 4]);
}
