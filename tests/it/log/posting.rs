//! Posting to the log: permissions, validation and durability.

use pillarbox::database::PoolLimits;
use pillarbox::log::{AggregateId, Post, Source, create_partitions, post};
use server::migrations;
use testkit::TestDatabase;

use crate::log::reading::{LogReader, post_one};

#[tokio::test]
async fn the_producer_role_may_only_post() {
    let database = TestDatabase::new(&migrations()).await;
    let mut tx = database.pool().begin().await.unwrap();
    sqlx::query("set local role pillarbox_producer").execute(&mut *tx).await.unwrap();
    sqlx::query("select pillarbox.post('order.created', '{\"n\": 1}', key => 'o1', aggregate_type => 'ORDER', aggregate_id => '5')")
        .execute(&mut *tx)
        .await
        .unwrap();
    sqlx::query("select pillarbox.post('order.created', '2', aggregate_type => 'ORDER', aggregate_id => '007')")
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let read = LogReader::from_the_beginning().read(database.pool(), 10).await;
    let first = read.iter().find(|message| message.payload.get() == "{\"n\": 1}").unwrap();
    assert_eq!((first.source.as_str(), &first.aggregate_id), ("sql", &Some(AggregateId::Number(5))));
    let second = read.iter().find(|message| message.payload.get() == "2").unwrap();
    assert_eq!(second.aggregate_id, Some(AggregateId::Text("007".to_owned())));

    for forbidden in [
        "select * from pillarbox.log",
        "insert into pillarbox.log (shard, message_id, source, tenant, topic, payload) values (0, gen_random_uuid(), 'hub', 'main', 'a', '1')",
        "select pillarbox.make_log_partitions(9)",
        "select nextval('pillarbox.log_id')",
        "select * from pillarbox_admin.api_key",
    ] {
        let mut tx = database.pool().begin().await.unwrap();
        sqlx::query("set local role pillarbox_producer").execute(&mut *tx).await.unwrap();
        let error = sqlx::query(forbidden).execute(&mut *tx).await.unwrap_err();
        assert_eq!(error.as_database_error().unwrap().code().unwrap(), "42501", "{forbidden}: {error}");
    }
}

#[tokio::test]
async fn a_function_in_another_schema_does_not_run_with_our_rights() {
    let database = TestDatabase::new(&migrations()).await;
    // For `bigint & 15`, this operator matches better than the built-in one.
    sqlx::raw_sql(
        "create function public.evil(bigint, integer) returns bigint language plpgsql
         as $$ begin raise exception 'with the rights of %', current_user; end $$;
         create operator public.& (leftarg = bigint, rightarg = integer, function = public.evil)",
    )
    .execute(database.pool())
    .await
    .unwrap();
    for for_workers in [false, true] {
        let limits = PoolLimits { connections_min: 0, for_workers, ..PoolLimits::default() };
        let db = pillarbox::database::pool(database.connect_options(), limits);
        let mut tx = db.begin().await.unwrap();
        let message = Post::new("a", serde_json::value::to_raw_value(&1).unwrap());
        post(&mut tx, &Source::new("test"), &message).await.unwrap();
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn an_invalid_post_is_refused_with_the_accepted_values() {
    let database = TestDatabase::new(&migrations()).await;
    for (call, says) in [
        ("pillarbox.post('no good', '1')", "topic must"),
        ("pillarbox.post('a', null)", "payload must"),
        ("pillarbox.post('a', to_json(repeat('x', 300000)))", "at most 262144"),
        ("pillarbox.post('a', '\"\\u0000\"')", "unsupported Unicode escape"),
        ("pillarbox.post('a', '1', tenant => '../etc')", "tenant must"),
        ("pillarbox.post('a', '1', headers => '[]')", "headers must"),
        ("pillarbox.post('a', '\"\\ud800\"')", "invalid input syntax for type json"),
        ("pillarbox.post('a', '1', headers => '{\"a\": 1e400}')", "headers must have strings"),
        ("pillarbox.post('a', '1', headers => '{\"a\": [[[]]]}')", "headers must have strings"),
        ("pillarbox.post('a', '1', headers => '{\"X-Team\": \"a\"}')", "'X-Team' is another name"),
        ("pillarbox.post('a', '1', headers => jsonb_build_object('a', repeat('x', 4096)))", "at most 4096 bytes"),
        ("pillarbox.notify('a', 'CUSTOMER', 1, '1', headers => '{\"a b\": \"\"}')", "'a b' is another name"),
        ("pillarbox.post('a', '1', aggregate_type => 'T', aggregate_id => '')", "aggregate_id must"),
    ] {
        let error =
            sqlx::query(sqlx::AssertSqlSafe(format!("select {call}"))).execute(database.pool()).await.unwrap_err();
        assert!(error.to_string().contains(says), "{call}: {error}");
    }
    assert!(LogReader::from_the_beginning().read(database.pool(), 10).await.is_empty());
}

#[tokio::test]
async fn posts_are_durable_whatever_the_session_settings() {
    let database = TestDatabase::new(&migrations()).await;
    let mut tx = database.pool().begin().await.unwrap();
    sqlx::query("set local synchronous_commit = off").execute(&mut *tx).await.unwrap();
    post_one(&mut tx, "1").await;
    let setting: String = sqlx::query_scalar("show synchronous_commit").fetch_one(&mut *tx).await.unwrap();
    assert_eq!(setting, "on");
}

#[tokio::test]
async fn partitions_are_created_ahead_and_a_missing_one_fails_no_post() {
    let database = TestDatabase::new(&migrations()).await;
    let mut db = database.pool().acquire().await.unwrap();
    // One more if midnight passes during the test.
    assert!(create_partitions(&mut db, 7).await.unwrap() <= 1, "the migration has created them");
    assert!((2..=3).contains(&create_partitions(&mut db, 9).await.unwrap()));
    sqlx::raw_sql("set timezone = 'Pacific/Auckland'").execute(&mut *db).await.unwrap();
    assert!(
        create_partitions(&mut db, 8).await.unwrap() == 0,
        "the day does not depend on the time zone of the session"
    );
    let far = "insert into pillarbox.log (shard, message_id, source, tenant, topic, payload, at)
               values (0, gen_random_uuid(), 'test', 'main', 'a', '1', now() + interval '40 days')";
    sqlx::query(far).execute(&mut *db).await.unwrap();
    assert_eq!(LogReader::from_the_beginning().read(database.pool(), 10).await.len(), 1);
    assert!(
        create_partitions(&mut db, 45).await.unwrap() >= 34,
        "all partitions are created except the day with rows in the default partition"
    );
}

#[tokio::test]
async fn no_accepted_payload_stops_a_reader() {
    let database = TestDatabase::new(&migrations()).await;
    let deep = format!("{}{}", "[".repeat(127), "]".repeat(127));
    for payload in [deep.as_str(), "1e400", "{\"a\": 1, \"a\": 2}", "\"\\u00e9\""] {
        sqlx::query("select pillarbox.post('a', $1::json)").bind(payload).execute(database.pool()).await.unwrap();
    }
    let mut session = database.pool().acquire().await.unwrap();
    sqlx::raw_sql("set standard_conforming_strings = off; select pillarbox.post('a', '1')")
        .execute(&mut *session)
        .await
        .unwrap();
    assert_eq!(LogReader::from_the_beginning().read(database.pool(), 2).await.len(), 5);
}
