//! The operator's commands, as typed.

use mailbox::cursor::{self, Cursor, Kind, Start};
use mailbox::filter::Filter;
use mailbox::home;
use serde_json::Value;
use testkit::{TestDatabase, drain};

use crate::consuming::{
    PATIENCE, Patient, Process, copy_database, count, database, numbers, post_numbers, recorder, until_count,
    until_effects,
};
use crate::instance::{DataFolder, run};

pub(crate) struct Desk {
    folder: DataFolder,
    url: String,
}

impl Desk {
    pub(crate) fn at(database: &TestDatabase) -> Desk {
        Desk { folder: DataFolder::new(), url: database.url() }
    }

    /// Runs what an operator types behind `pillarbox`; on a thread, so that the consumers of the test go on.
    pub(crate) async fn type_in(&self, line: &str) -> (Option<i32>, String, String) {
        let line = format!("{line} --data-dir {} --database-url {}", self.folder.text(), self.url);
        let typed = move || run(&line.split_whitespace().collect::<Vec<_>>(), &[]);
        tokio::task::spawn_blocking(typed).await.unwrap()
    }

    /// It succeeds; what it prints.
    pub(crate) async fn ok(&self, line: &str) -> String {
        let (code, out, error) = self.type_in(line).await;
        assert_eq!(code, Some(0), "{line}: {out}{error}");
        out
    }

    /// It fails; what it says.
    pub(crate) async fn refused(&self, line: &str) -> String {
        let (code, out, error) = self.type_in(line).await;
        assert!(code.is_some_and(|code| code != 0), "{line}: {out}{error}");
        error
    }

    async fn json_lines(&self, line: &str) -> Vec<Value> {
        self.ok(line).await.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

#[tokio::test]
async fn cursors_are_listed_reset_and_dropped() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    assert!(desk.ok("cursors").await.starts_with("CONSUMER"));
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    until_effects(db, 3).await;
    for list in ["cursors", "cursors list"] {
        let table = desk.ok(list).await;
        assert!(table.contains("effects") && table.contains("test (16)") && table.contains("good"), "{table}");
    }
    for list in ["cursors --json", "cursors list --json"] {
        let listed = desk.json_lines(list).await;
        assert_eq!((&listed[0]["consumer"], &listed[0]["state"]), (&"effects".into(), &"good".into()), "{list}");
    }
    assert!(desk.refused("cursors drop effects").await.contains("somebody works for effects"));
    assert!(desk.ok("cursors reset effects --from 2h").await.contains("reads again"));
    process.stop().await;
    assert!(desk.ok("cursors reset effects").await.contains("0 messages of the log are passed over"));
    post_numbers(db, Some("k"), 4..=7).await;
    assert!(desk.ok("cursors").await.contains("nobody"));
    let refused = desk.refused("cursors reset effects").await;
    assert!(refused.contains("last 4 messages") && refused.contains("--yes"), "{refused}");
    assert!(desk.ok("cursors reset effects --yes").await.contains("4 messages of the log are passed over"));
    assert!(desk.refused("cursors reset effects --from lately").await.contains("2h"));
    assert!(desk.refused("cursors reset effects --from 2999-01-01T00:00:00Z").await.contains("past"));
    assert!(desk.refused("cursors reset nobody").await.contains("no consumer"));
    assert!(desk.ok("cursors drop effects").await.contains("is forgotten"));
    assert!(desk.refused("cursors drop effects").await.contains("no consumer"));
}

#[tokio::test]
async fn parked_messages_are_listed_tried_and_discarded() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    let patient = Patient::slow(db);
    post_numbers(db, None, [1]).await;
    post_numbers(db, Some("k"), [-1, -2, 3]).await;
    until_count(db, "parked", 3).await;
    let table = desk.ok("parked list --consumer effects").await;
    assert!(table.contains("negative") && table.contains("behind its key") && table.contains("test.posted"), "{table}");
    let places: Vec<i64> =
        desk.json_lines("parked list --json").await.iter().map(|one| one["place"].as_i64().unwrap()).collect();
    let [first, second, _] = places[..] else { panic!("{places:?}") };
    assert!(desk.refused(&format!("parked retry {second}")).await.contains(&format!("place {first}")));
    assert!(desk.ok(&format!("parked discard {first}")).await.contains("is discarded"));
    until_count(db, "parked", 2).await;
    patient.cure();
    drain("the second is the first of its key", PATIENCE, async || {
        let (code, ..) = desk.type_in(&format!("parked retry {second}")).await;
        code == Some(0) || count(db, "parked").await == 0
    })
    .await;
    until_count(db, "parked", 0).await;
    patient.process.stop().await;
    assert_eq!(numbers(db).await, [1, -2, 3]);
    assert!(desk.refused("parked retry 1000000").await.contains("nothing is parked"));
    assert!(desk.refused("parked discard 1000000").await.contains("nothing is parked"));
}

#[tokio::test]
async fn dead_letters_are_listed_shown_retried_and_discarded() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    let patient = Patient::hasty(db);
    for number in 1..=4 {
        post_numbers(db, None, [number * 10, -number, number * 100]).await;
    }
    until_count(db, "dead_letter", 4).await;
    let table = desk.ok("dead-letters list --consumer effects --topic test --tenant main --from 1h").await;
    assert_eq!(table.lines().count(), 5, "{table}");
    assert!(table.contains("negative") && table.contains("evt_"), "{table}");
    assert!(desk.ok("dead-letters list --to 1h").await.contains("/hub/v1/dead-letters"));
    let dead = desk.json_lines("dead-letters list --json").await;
    let id = |at: usize| dead[at]["id"].as_i64().unwrap();
    let shown: Value = serde_json::from_str(&desk.ok(&format!("dead-letters show {}", id(0))).await).unwrap();
    assert!(shown["message"]["payload"].as_i64().unwrap() < 0);
    patient.cure();
    assert!(desk.ok(&format!("dead-letters retry {}", id(0))).await.contains("due now"));
    assert!(desk.ok(&format!("dead-letters discard {}", id(1))).await.contains("is gone"));
    assert!(desk.refused(&format!("dead-letters show {}", id(1))).await.contains("no such dead letter"));
    for wrong in [
        "dead-letters retry",
        "dead-letters discard",
        "dead-letters retry 1 --all",
        "dead-letters retry 1 --consumer effects",
        "dead-letters retry --all --topic test",
        "dead-letters discard --all",
    ] {
        desk.refused(wrong).await;
    }
    assert!(desk.refused("dead-letters discard --all").await.contains("--yes"));
    assert!(desk.ok("dead-letters retry --consumer nobody --from 1h").await.contains("0 dead letters"));
    assert!(desk.ok("dead-letters retry --consumer effects --topic test --from 1h").await.contains("2 dead letters"));
    until_effects(db, 11).await;
    assert!(desk.ok("dead-letters retry --all").await.contains("0 dead letters"));
    assert!(desk.ok("dead-letters discard --all --yes").await.contains("0 dead letters"));
    patient.process.stop().await;
    // Of a queue that is read in: nobody can take it again.
    sqlx::query(
        "insert into pillarbox.dead_letter (consumer, shard, run, attempts, last_error, log_id, message_id, source, tenant,
             topic, headers, payload, at)
         values ('amqp:orders', 0, 0, 1, 'x', 0, pillarbox.uuid_v7(), 'amqp:orders', 'main', 'x', '{}', '1', now())",
    )
    .execute(db)
    .await
    .unwrap();
    assert!(desk.ok("dead-letters retry --all").await.contains("1 of amqp:orders cannot be retried"));
    assert!(desk.ok("status").await.contains("dead      1 of amqp:orders"));
}

#[tokio::test]
async fn a_replay_is_waited_for() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    let process = Process::start(db, recorder());
    post_numbers(db, Some("k"), 1..=3).await;
    until_effects(db, 3).await;
    let told = desk.ok("replay --consumer effects --from 1h --again --wait").await;
    assert!(told.contains("16 of 16 shards done"), "{told}");
    assert_eq!(numbers(db).await, [1, 2, 3, 1, 2, 3]);
    assert!(desk.ok("replay --consumer effects --from 2h --to 1h").await.contains("Replay"));
    process.stop().await;
    assert_eq!(numbers(db).await.len(), 6);
    assert!(
        desk.refused("replay --consumer effects --from 1h --to 2h").await.contains("--to must be a time after --from")
    );
    assert!(desk.refused("replay --consumer nobody --from 1h").await.contains("no consumer"));
    assert!(desk.refused("replay --consumer effects").await.contains("--from"));
}

#[tokio::test]
async fn a_restored_database_is_told_by_status_and_goes_on_by_recover() {
    let original = database().await;
    home::settle(original.pool()).await.unwrap();
    let process = Process::start(original.pool(), recorder());
    post_numbers(original.pool(), Some("k"), 1..=2).await;
    until_effects(original.pool(), 2).await;
    process.stop().await;
    let desk = Desk::at(&original);
    for way in ["recover --skip", "recover --from 1h"] {
        assert!(desk.ok(way).await.contains("was not restored"));
    }
    let status = desk.ok("status").await;
    assert!(status.contains("schema    up to date") && status.contains("effects"), "{status}");

    let copy = TestDatabase::empty().await;
    copy_database(&original, &copy);
    let desk = Desk::at(&copy);
    let (code, status, _) = desk.type_in("status").await;
    assert_eq!(code, Some(1), "{status}");
    assert!(status.contains("pillarbox recover"), "{status}");
    for wrong in ["recover", "recover --skip --from 1h", "recover --from soon"] {
        desk.refused(wrong).await;
    }
    let told = desk.ok("recover --from 1h").await;
    assert!(told.contains("reads again") && told.contains("effects"), "{told}");
    desk.ok("status").await;
    assert!(desk.ok("recover --skip").await.contains("nothing is changed"));

    sqlx::query("update pillarbox.cursor set lapsed_at = now()").execute(copy.pool()).await.unwrap();
    let (code, status, _) = desk.type_in("status").await;
    assert_eq!(code, Some(1), "{status}");
    assert!(status.contains("pillarbox cursors reset effects"), "{status}");
    desk.ok("cursors reset effects --yes").await;
    desk.ok("status").await;
}

#[tokio::test]
async fn parity_says_whether_the_legacy_exchange_keeps_up() {
    let database = database().await;
    let (db, desk) = (database.pool(), Desk::at(&database));
    assert!(desk.ok("parity").await.contains("relay.legacy is not registered"));
    let register = async |consumer: &str, start: Start| {
        let cursor = Cursor { consumer: consumer.to_owned(), kind: Kind::Relay, filter: Filter::everything(), start };
        cursor.register(db).await.unwrap();
    };
    register("relay.legacy", Start::Beginning).await;
    assert!(desk.ok("parity").await.contains("relay.email is not registered"));
    post_numbers(db, None, 1..=3).await;
    register("relay.email", Start::Now).await;
    let told = desk.ok("parity").await;
    assert!(told.contains("behind by 3 messages") && told.contains("Nobody works for relay.legacy"), "{told}");
    cursor::reset(db, "relay.legacy", None).await.unwrap();
    let told = desk.ok("parity").await;
    assert!(told.contains("has all that the new one has"), "{told}");
}

/// Every command of the runbook, on a database that has what it names.
#[tokio::test]
async fn the_runbook_works_as_written() {
    let runbook = include_str!("../../../../docs/runbook.md");
    let commands: Vec<&str> = runbook.lines().filter_map(|line| line.strip_prefix("    pillarbox ")).collect();
    assert!(commands.len() > 20, "{commands:?}");
    for command in commands {
        let database = database().await;
        let db = database.pool();
        post_numbers(db, Some("k"), [1]).await;
        for consumer in ["relay.default", "relay.email", "relay.legacy", "joins.events"] {
            let (kind, filter) = (Kind::Relay, Filter::everything());
            let cursor = Cursor { consumer: consumer.to_owned(), kind, filter, start: Start::Beginning };
            cursor.register(db).await.unwrap();
        }
        for table in ["parked (place, last_error, next_at", "dead_letter (id, last_error, died_at"] {
            let insert = format!(
                "insert into pillarbox.{table}, consumer, shard, run, attempts, log_id, message_id, source, tenant, topic,
                     key, headers, payload, at) overriding system value
                 select 17, 'x', now(), 'relay.email', shard, 0, 1, id, message_id, source, tenant, topic, key, headers,
                     payload, at
                 from pillarbox.log"
            );
            sqlx::query(sqlx::AssertSqlSafe(insert)).execute(db).await.unwrap();
        }
        let replay = "insert into pillarbox.replay (id, consumer, run, from_at, to_at) overriding system value
                      values (17, 'relay.email', 0, now(), now())";
        sqlx::query(replay).execute(db).await.unwrap();
        // Nobody works here; that it waits is another test's.
        Desk::at(&database).ok(command.trim_end_matches(" --wait")).await;
    }
}
