//! Runs every command of the runbook, and checks what it prints or changes.

use futures_util::StreamExt;
use pillarbox::consumers::{Consumer, ConsumerKind, StartAt};
use pillarbox::log::Filter;
use sqlx::PgPool;
use testkit::TestDatabase;

use crate::consumers::support::{database, post_numbers};
use crate::operator::commands::Cli;

/// What a command of the runbook must do.
enum Effect {
    /// It prints a text that contains this.
    Prints(&'static str),
    /// It changes the database: this condition is false before and true after it.
    Makes(&'static str),
}
use Effect::{Makes, Prints};

const EFFECTS: &[(&str, Effect)] = &[
    ("status", Prints("relay.email")),
    ("cursors", Prints("no_worker")),
    ("reconcile --dry-run", Prints("0 drifted")),
    ("parked list", Prints("17 ")),
    ("parked list --consumer relay.email", Prints("17 ")),
    ("parked retry 17", Makes("exists (select from pillarbox.parked where id = 17 and next_at <= now())")),
    ("parked discard 17", Makes("exists (select from pillarbox.parked where id = 17 and discarded)")),
    ("dead-letters list --consumer relay.email --from 2h", Prints("17 ")),
    ("dead-letters show 17", Prints("email.requested")),
    ("dead-letters retry 17", Makes("(select array_agg(id) from pillarbox.dead_letter) = '{18}'")),
    (
        "dead-letters retry --consumer relay.email --topic email --from 2h",
        Makes("(select array_agg(id) from pillarbox.dead_letter) = '{18}'"),
    ),
    ("dead-letters retry --all", Makes("(select count(*) from pillarbox.parked) = 3")),
    ("dead-letters discard 17", Makes("(select array_agg(id) from pillarbox.dead_letter) = '{18}'")),
    (
        "dead-letters discard --consumer relay.email --from 7d --to 1d",
        Makes("(select array_agg(id) from pillarbox.dead_letter) = '{17}'"),
    ),
    ("dead-letters discard --all --yes", Makes("(select count(*) from pillarbox.discarded) = 2")),
    (
        "replay --consumer relay.default --from 2h",
        Makes("exists (select from pillarbox.replay where consumer = 'relay.default' and run = 0)"),
    ),
    (
        "replay --consumer relay.default --from 2026-01-31T08:00:00Z --to 2026-01-31T09:00:00Z",
        Makes("exists (select from pillarbox.replay where to_at = '2026-01-31T09:00:00Z')"),
    ),
    (
        "replay --consumer joins.events --from 2h --again",
        Makes("exists (select from pillarbox.replay where consumer = 'joins.events' and run = 1)"),
    ),
    ("replay list", Prints("17 ")),
    ("replay cancel 17", Makes("exists (select from pillarbox.replay where canceled_at is not null)")),
    (
        "cursors reset relay.default --from 7d",
        Makes("exists (select from pillarbox.replay where consumer = 'relay.default')"),
    ),
    (
        "cursors reset relay.default --yes",
        Makes(
            "(select max(new_id) from pillarbox.position where consumer = 'relay.default')
             >= (select max(id) from pillarbox.log)",
        ),
    ),
    ("cursors drop relay.default", Makes("not exists (select from pillarbox.cursor where consumer = 'relay.default')")),
    ("recover --from 2h", Makes("exists (select from pillarbox.cluster_identity where restored_at is null)")),
    ("recover --skip", Makes("(select count(*) from pillarbox.dead_letter) = 3")),
    ("parity", Prints("relay.legacy")),
    ("parity --check --from 7d", Prints("relay.legacy")),
    (
        "cursors reset notify.mail --like relay.legacy",
        Makes("(select since > created_at from pillarbox.cursor where consumer = 'notify.mail')"),
    ),
    (
        "cursors reset relay.legacy --like notify.mail",
        Makes("(select since > created_at from pillarbox.cursor where consumer = 'relay.legacy')"),
    ),
    ("cursors drop relay.legacy", Makes("not exists (select from pillarbox.cursor where consumer = 'relay.legacy')")),
    ("mail retry --all", Makes("exists (select from pillarbox_notify.mail where status = 'queued')")),
    ("notifications retry --all", Makes("exists (select from pillarbox_notify.notification where status = 'waiting')")),
    ("user announce", Makes("exists (select from pillarbox_identity.account where announced_version = 0)")),
    ("reconcile --force", Prints("0 drifted")),
    ("replay webhooks --from 2h --dry-run", Prints("0 messages would be sent")),
    ("replay webhooks list", Prints("SUBSCRIBER")),
];

#[tokio::test]
async fn the_runbook_works_as_written() {
    let runbook = include_str!("../../../docs/runbook.md");
    // No process runs here that could end a replay; another test proves that the command waits.
    let commands: Vec<&str> = runbook
        .lines()
        .filter_map(|line| line.strip_prefix("    pillarbox "))
        .map(|line| line.trim_end_matches(" --wait"))
        .collect();
    let checked: Vec<&str> = EFFECTS.iter().map(|(command, _)| *command).collect();
    assert_eq!(commands, checked, "every command of the runbook has its effect in this file");
    // Commands that only print share a database, and those of them that call a server share the server.
    let (unchanged, served) = (runbook_database(false).await, runbook_database(false).await);
    let (client, app) = Cli::with_api(&served).await;
    futures_util::stream::iter(EFFECTS)
        .for_each_concurrent(2, async |(command, effect)| match effect {
            Prints(expected) if is_client(command) => {
                let printed = client.ok(command).await;
                assert!(printed.contains(expected), "{command}: {printed}");
            }
            Prints(expected) => {
                let cli = Cli::new(&unchanged);
                let printed = match *command {
                    "status" => cli.status_without_process("").await,
                    _ => cli.ok(command).await,
                };
                assert!(printed.contains(expected), "{command}: {printed}");
            }
            Makes(condition) => {
                let database = runbook_database(command.starts_with("recover")).await;
                assert!(!is_true(database.pool(), condition).await, "{command}: {condition} is true before");
                if is_client(command) {
                    let (cli, app) = Cli::with_api(&database).await;
                    cli.ok(command).await;
                    app.stop().await;
                } else {
                    Cli::new(&database).ok(command).await;
                }
                assert!(is_true(database.pool(), condition).await, "{command}: {condition} is not true afterwards");
            }
        })
        .await;
    app.stop().await;
}

/// Whether a command calls a server.
fn is_client(command: &str) -> bool {
    let with_database = ["status", "reconcile", "recover", "parity", "user"];
    !with_database.contains(&command.split(' ').next().unwrap())
}

async fn is_true(db: &PgPool, condition: &str) -> bool {
    let query = format!("select coalesce({condition}, false)");
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(db).await.unwrap()
}

/// A database with the consumers, the parked message, the dead letters and the replay that the runbook names.
async fn runbook_database(is_restored: bool) -> TestDatabase {
    let database = database().await;
    let db = database.pool();
    post_numbers(db, Some("k"), [1, 2, 3]).await;
    for consumer in ["relay.default", "relay.email", "relay.legacy", "joins.events", "notify.mail"] {
        let (kind, filter) = (ConsumerKind::Relay, Filter::everything());
        let cursor = Consumer { name: consumer.to_owned(), kind, filter, start: StartAt::Beginning };
        cursor.register(db).await.unwrap();
    }
    for (number, table, at) in [
        (1, "parked (id, last_error, next_at", "17, 'x', now() + interval '1 hour'"),
        (2, "dead_letter (id, last_error, died_at", "17, 'x', now()"),
        (3, "dead_letter (id, last_error, died_at", "18, 'x', now() - interval '3 days'"),
    ] {
        let insert = format!(
            "insert into pillarbox.{table}, consumer, shard, run, attempts, log_id, message_id, source, tenant, topic,
                 key, headers, payload, at) overriding system value
             select {at}, 'relay.email', shard, 0, 1, id, message_id, source, tenant, 'email.requested', key, headers,
                 payload, at
             from pillarbox.log where payload::text = '{number}'"
        );
        sqlx::query(sqlx::AssertSqlSafe(insert)).execute(db).await.unwrap();
    }
    let statements = "insert into pillarbox.replay (id, consumer, run, from_at, to_at) overriding system value
                      values (17, 'relay.email', 0, now(), now());
                      insert into pillarbox.replay_shard (replay, shard) values (17, 0);
                      insert into pillarbox_notify.mail (message_id, source, idempotency_key, recipient, template, locale,
                          subject, text, html, status, next_attempt_at, give_up_at, created_at)
                      select id, 'identity', id, 'a@example.org', 'verification', 'en', 's', 't', 'h', 'dead', now(), now(), now()
                      from gen_random_uuid() as new (id);
                      insert into pillarbox_notify.notification (event_id, user_id, channel, status, created_at)
                      values (gen_random_uuid(), gen_random_uuid(), 'email', 'dead', now());
                      insert into pillarbox_identity.account (id, email, name, locale, password_hash, verified_at, created_at,
                          updated_at, announced_version)
                      values (gen_random_uuid(), 'a@example.org', 'a', 'en', 'x', now(), now(), now(), 1)";
    sqlx::raw_sql(statements).execute(db).await.unwrap();
    if is_restored {
        let mark = "update pillarbox.cluster_identity set restored_at = now()";
        sqlx::query(mark).execute(db).await.unwrap();
    }
    database
}
