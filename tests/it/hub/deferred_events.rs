//! Deferred events: turns that fail, the log that they need, and operators who skip them; and operator commands with old ids.

use chrono::{DateTime, Utc};
use pillarbox::consumers::{Consumer, ConsumerKind, StartAt};
use pillarbox::log::Filter;
use serde_json::json;
use server::settings::Role;
use sqlx::PgPool;
use testkit::{Receiver, Reply, TestApp, TestDatabase, eventually};

use crate::hub::fanout::{copy_subscriber, count};
use crate::hub::fixture::{
    Fixture, post, replay_fanout, subscribe, subscriber_path, wait_for_dead_letters, wait_for_webhooks,
};
use crate::operator::commands::Cli;
use crate::support::{DEADLINE, caller, text, uuid_of};

/// Makes PostgreSQL refuse to insert more than `rows` hub messages of the tenant `acme` at once.
async fn refuse_more_than(db: &PgPool, rows: i32) {
    let function = format!(
        "create or replace function refuse_many() returns trigger language plpgsql as $$
         begin
             if (select count(*) from made join pillarbox_hub.subscriber on subscriber.id = made.subscriber
                 where tenant = 'acme') > {rows} then
                 raise exception 'too many';
             end if;
             return null;
         end $$;
         create or replace trigger refuse_many after insert on pillarbox_hub.message referencing new table as made
             for each statement execute function refuse_many()"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(function)).execute(db).await.unwrap();
}

#[tokio::test]
async fn a_turn_that_fails_is_repeated_in_parts_and_delays_no_other_tenant() {
    // More than fit into one turn.
    const SUBSCRIBERS: i32 = 600;
    let Fixture { database, app, manager } = Fixture::start_with(|settings| settings.roles = vec![Role::Api]).await;
    let (db, zeta) = (database.pool(), caller(&app, "manage", "zeta").await);
    for client in [&manager, &zeta] {
        let first = subscribe(client, "https://example.com/hook", json!({})).await;
        copy_subscriber(db, uuid_of(&first["id"]), SUBSCRIBERS - 1).await;
        post(client, "test.posted", json!({}), None).await;
    }
    app.stop().await;
    let made_for = async |tenant: &str| {
        let query = "select count(*) from pillarbox_hub.message
                     join pillarbox_hub.subscriber on subscriber.id = message.subscriber where tenant = $1";
        sqlx::query_scalar::<_, i64>(query).bind(tenant).fetch_one(db).await.unwrap()
    };
    let until_made = async |tenant: &str| {
        eventually(&format!("the messages of {tenant}"), DEADLINE, async || match made_for(tenant).await {
            made if made == i64::from(SUBSCRIBERS) => Ok(()),
            other => Err(other),
        })
        .await;
    };
    refuse_more_than(db, 0).await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Fanout]).await;
    until_made("zeta").await;
    assert_eq!(made_for("acme").await, 0);
    refuse_more_than(db, 100).await;
    until_made("acme").await;
    app.stop().await;
}

/// The holds of the log, with the time from which on they preserve it.
async fn retention_hold_starts(db: &PgPool) -> Vec<(String, DateTime<Utc>)> {
    let query = "select holder, from_at from pillarbox.retention_hold order by holder";
    sqlx::query_as(query).fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn an_old_event_has_a_retention_hold_with_the_transaction_that_reads_it() {
    let Fixture { database, app, manager } = Fixture::start_with(|settings| settings.roles = vec![Role::Api]).await;
    let db = database.pool();
    let subscriber = subscribe(&manager, "https://example.com/hook", json!({})).await;
    assert_eq!(manager.post(&format!("{}/pause", subscriber_path(&subscriber)), json!({})).await.status, 200);
    let since = "update pillarbox_hub.subscriber set created_at = created_at - interval '9 days'";
    sqlx::query(since).execute(db).await.unwrap();
    let event = post(&manager, "test.posted", json!({}), None).await;
    // Fan-out was away for three days.
    let old = "update pillarbox.log set at = at - interval '3 days' where message_id = $1 returning at";
    let id: uuid::Uuid = event.trim_start_matches("evt_").parse().unwrap();
    let at: DateTime<Utc> = sqlx::query_scalar(old).bind(id).fetch_one(db).await.unwrap();
    app.stop().await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Fanout]).await;
    let messages = "select count(*) from pillarbox_hub.message";
    eventually("its message is created", DEADLINE, async || count(db, messages).await == 1).await;
    assert_eq!(retention_hold_starts(db).await, [("hub.fanout".to_owned(), at)]);
    app.stop().await;
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![Role::Maintain]).await;
    eventually("maintenance includes it in the hold of the hub", DEADLINE, async || {
        match retention_hold_starts(db).await {
            held if held == [("hub".to_owned(), at)] => Ok(()),
            other => Err(other),
        }
    })
    .await;
    app.stop().await;
}

#[tokio::test]
async fn a_reset_of_fan_out_skips_the_deferred_events_from_before() {
    let database = TestDatabase::new(&server::migrations()).await;
    let (db, (cli, app)) = (database.pool(), Cli::with_api(&database).await);
    let (name, kind, filter) = ("hub.fanout".to_owned(), ConsumerKind::Handler, Filter::everything());
    Consumer { name, kind, filter, start: StartAt::Now }.register(db).await.unwrap();
    let defer = "insert into pillarbox_hub.deferred_event (tenant, log_shard, log_id, log_at, matches, is_checked)
                 select 'acme', 0, n, now() - make_interval(hours => n), 1, true from generate_series(1, 4) as n";
    sqlx::query(defer).execute(db).await.unwrap();
    let deferred = "select count(*) from pillarbox_hub.deferred_event";
    let refused = cli.refused("cursors reset hub.fanout").await;
    assert!(refused.contains("has not processed the last 4 messages") && refused.contains("--yes"), "{refused}");
    assert_eq!(count(db, deferred).await, 4);
    cli.ok("cursors reset hub.fanout --from 150m").await;
    assert_eq!(count(db, deferred).await, 2, "those since then are still fanned out");
    let skipped = cli.ok("cursors reset hub.fanout --yes").await;
    assert!(skipped.contains("2 messages of the log are skipped"), "{skipped}");
    assert_eq!(count(db, deferred).await, 0);
    app.stop().await;
}

#[tokio::test]
async fn an_operator_command_whose_id_is_too_old_is_executed_once() {
    let Fixture { database, app, manager } = Fixture::start().await;
    let (db, receiver) = (database.pool(), Receiver::with_reply(|_| Reply::status(400)).await);
    let subscriber = subscribe(&manager, &receiver.url(), json!({})).await;
    post(&manager, "test.posted", json!({}), None).await;
    let dead = wait_for_dead_letters(&manager, &subscriber, 1).await;
    // The clock of the process that posted the command was ten days behind.
    let command = "insert into pillarbox.log (shard, message_id, source, tenant, topic, key, headers, payload)
                   values (pillarbox.shard_of('acme', $1), overlay(overlay(pillarbox.uuid_at(now() - interval '10 days')::text
                               placing '7' from 15) placing '8' from 20)::uuid, 'hub.control', 'acme',
                           'hub.dead_letter.retry', $1, '{}', json_build_object('dead_letter', $2))";
    let query = sqlx::query(command).bind(text(&subscriber["id"])).bind(text(&dead[0]["id"]));
    query.execute(db).await.unwrap();
    wait_for_webhooks(&receiver, 2).await;
    // Retention drops the inbox by the days in the ids.
    sqlx::query("delete from pillarbox.inbox").execute(db).await.unwrap();
    replay_fanout(db, false).await;
    assert_eq!(count(db, "select count(*) from pillarbox_hub.message").await, 2, "the event and one retry");
    app.stop().await;
}
