//! The SQL function `post`: which arguments it accepts, and who may call it.

use server::migrations;
use sqlx::{AssertSqlSafe, PgPool};
use testkit::TestDatabase;
use uuid::Uuid;

pub(super) const CHOSEN: &str = "7c5d2a7e-0000-4000-8000-000000000001";

/// The payloads in the log.
pub(super) async fn posted(db: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select payload::text from pillarbox.log order by id").fetch_all(db).await.unwrap()
}

#[tokio::test]
async fn every_json_type_and_untyped_arguments_are_accepted() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let id = format!("message_id => '{CHOSEN}'");
    for (arguments, payload) in [
        ("'a', '{\"n\":  1}'".to_owned(), "{\"n\":  1}"),
        ("'a', '{\"n\":  2}', 'k', 'T', '5', '{}', 'acme'".to_owned(), "{\"n\":  2}"),
        ("'a', '{\"n\":  3}'::json, 'k'".to_owned(), "{\"n\":  3}"),
        ("'a', '{\"n\":  4}'::jsonb, key => 'k'".to_owned(), "{\"n\": 4}"),
        ("'a', '{\"n\":  5}'::text, tenant => 'acme'".to_owned(), "{\"n\":  5}"),
        ("topic => 'a', payload => jsonb_build_object('n', 6), headers => null".to_owned(), "{\"n\": 6}"),
        (format!("'a', '{{\"n\":  7}}'::json, {id}"), "{\"n\":  7}"),
        ("'a', '8', message_id => null".to_owned(), "8"),
    ] {
        let query = format!("select pillarbox.post({arguments})");
        sqlx::query(AssertSqlSafe(query)).execute(db).await.unwrap_or_else(|error| panic!("{arguments}: {error}"));
        assert_eq!(posted(db).await.last().map(String::as_str), Some(payload), "{arguments}");
    }
    // As drivers without parameter types do, for example psycopg with strings.
    sqlx::raw_sql("prepare untyped as select pillarbox.post($1, $2, key => $3); execute untyped('a', '9', 'k')")
        .execute(db)
        .await
        .unwrap();
    assert_eq!(posted(db).await.len(), 9);
}

/// What drivers send: psycopg a smallint, JDBC an integer, a bigint or a varchar, node-postgres what has no type.
#[tokio::test]
async fn a_key_and_an_id_of_an_aggregate_may_be_a_text_a_number_or_a_uuid() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let values = [
        ("'5'", "5"),
        ("'5'::text", "5"),
        ("'5'::varchar", "5"),
        ("5::smallint", "5"),
        ("5", "5"),
        ("5000000000::bigint", "5000000000"),
        ("'7c5d2a7e-0000-4000-8000-000000000001'::uuid", "\"7c5d2a7e-0000-4000-8000-000000000001\""),
    ];
    for payload in ["'{}'", "'{}'::text", "'{}'::varchar", "'{}'::json", "'{}'::jsonb"] {
        for (id, stored_id) in values {
            for (key, stored_key) in values {
                let aggregate =
                    format!("aggregate_type => 'ORDER', aggregate_id => {id}, headers => '{{\"a\": \"b\"}}'");
                for arguments in [format!("key => {key}"), format!("key => {key}, {aggregate}")] {
                    let post = format!("select pillarbox.post('a', {payload}, {arguments})");
                    let posted: Uuid = sqlx::query_scalar(AssertSqlSafe(post.as_str()))
                        .fetch_one(db)
                        .await
                        .unwrap_or_else(|error| panic!("{post}: {error}"));
                    let query = "select key, aggregate_id::text from pillarbox.log where message_id = $1";
                    let row: (String, Option<String>) = sqlx::query_as(query).bind(posted).fetch_one(db).await.unwrap();
                    let with_aggregate = arguments.contains("aggregate_id").then(|| stored_id.to_owned());
                    assert_eq!(row, (stored_key.replace('"', ""), with_aggregate), "{post}");
                }
            }
            let post = format!(
                "select pillarbox.post('a', {payload}, key => null, aggregate_type => 'ORDER', aggregate_id => {id})"
            );
            sqlx::query(AssertSqlSafe(post)).execute(db).await.unwrap();
        }
    }
    // By position, every function has the same order: nothing is taken for something else.
    for arguments in [
        "'{}', 'k', 'T', '5'",
        "'{}', 'k', 'T', 5",
        "'{}'::json, 'k'::text, 'T'::text, '5'::text",
        "'{}'::jsonb, 'k'::varchar, 'T'::varchar, '5'::varchar, '{}'::jsonb, 'main'",
        "'{}'::json, 'k', 'T', '5', '{}'::jsonb, 'main', null",
    ] {
        let post = format!("select pillarbox.post('by.position', {arguments})");
        sqlx::query(AssertSqlSafe(post)).execute(db).await.unwrap();
    }
    let query = "select count(*) from pillarbox.log
                 where topic = 'by.position' and (key, aggregate_type, aggregate_id::text) = ('k', 'T', '5')";
    assert_eq!(sqlx::query_scalar::<_, i64>(query).fetch_one(db).await.unwrap(), 5);
    // As node-postgres does, which leaves all types to PostgreSQL.
    sqlx::raw_sql(
        "prepare untyped as select pillarbox.post($1, $2, key => $3, aggregate_type => $4, aggregate_id => $5, headers => $6,
                                                  message_id => $7, tenant => $8);
         execute untyped('untyped', '1', 5, 'ORDER', 5, '{}', '7c5d2a7e-0000-4000-8000-000000000001', 'main')",
    )
    .execute(db)
    .await
    .unwrap();
    let query = "select key || ':' || aggregate_id from pillarbox.log where topic = 'untyped'";
    assert_eq!(sqlx::query_scalar::<_, String>(query).fetch_one(db).await.unwrap(), "5:5");
}

/// docs/sql-clients.md says which casts are needed, and that an id of an aggregate that is no text needs a key.
#[tokio::test]
async fn an_argument_of_another_type_needs_the_documented_cast() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    let post = async |arguments: &str| {
        let query = format!("select pillarbox.post('a', '{{}}'::json, {arguments})");
        sqlx::query(AssertSqlSafe(query)).execute(db).await.map(drop)
    };
    let id = "7c5d2a7e-0000-4000-8000-00000000000";
    let aggregate = "aggregate_type => 'ORDER', aggregate_id => 5";
    for (refused, accepted) in [
        ("headers => '{}'::varchar".to_owned(), "headers => '{}'::varchar::jsonb".to_owned()),
        ("headers => '{}'::json".to_owned(), "headers => '{}'::json::jsonb".to_owned()),
        (format!("message_id => '{id}2'::text"), format!("message_id => '{id}2'::text::uuid")),
        (format!("message_id => '{id}3'::varchar"), format!("message_id => '{id}3'::varchar::uuid")),
        (aggregate.to_owned(), format!("{aggregate}, key => null")),
        ("aggregate_id => 5, key => null".to_owned(), format!("{aggregate}, key => 'k'")),
        (aggregate.to_owned(), format!("{aggregate}::text")),
    ] {
        let error = post(&refused).await.unwrap_err().into_database_error().unwrap();
        assert_eq!(error.code().unwrap(), "42883", "{refused}: {error}");
        assert!(error.message().starts_with("function pillarbox.post("), "{refused}: {error}");
        post(&accepted).await.unwrap_or_else(|error| panic!("{accepted}: {error}"));
    }
    assert_eq!(posted(db).await.len(), 7);
}

#[tokio::test]
async fn an_invalid_argument_is_named_and_the_row_is_not_shown() {
    let database = TestDatabase::new(&migrations()).await;
    for (arguments, says) in [
        ("key => ''", "key must have 1 to 255 characters"),
        ("key => repeat('x', 256)", "key must have 1 to 255 characters"),
        ("aggregate_type => '', aggregate_id => '1'", "aggregate_type must have 1 to 100 characters"),
        ("aggregate_type => repeat('x', 101), aggregate_id => '1'", "aggregate_type must have 1 to 100 characters"),
        ("aggregate_type => 'T', aggregate_id => repeat('x', 256)", "aggregate_id must have 1 to 255 characters"),
        ("tenant => ''", "tenant must"),
    ] {
        for payload in ["'\"secret\"'", "'\"secret\"'::json", "'\"secret\"'::jsonb"] {
            let query = format!("select pillarbox.post('a', {payload}, {arguments})");
            let error = sqlx::query(AssertSqlSafe(query)).execute(database.pool()).await.unwrap_err();
            let error = error.into_database_error().unwrap();
            assert_eq!(error.code().unwrap(), "22023", "{arguments}: {error}");
            assert!(error.message().starts_with(says), "{arguments}: {error}");
            assert!(!format!("{error:?}").contains("secret"), "{error:?}");
        }
    }
    let longest = "select pillarbox.post('a', '1', key => repeat('x', 255), aggregate_type => repeat('x', 100),
                       aggregate_id => repeat('x', 255))";
    sqlx::query(longest).execute(database.pool()).await.unwrap();
}

#[tokio::test]
async fn producers_may_post_and_notify_and_nothing_else() {
    let database = TestDatabase::new(&migrations()).await;
    // With PUBLIC, of which every role is a member.
    let query = "select distinct proname::text from pg_proc join pg_namespace on pg_namespace.oid = pronamespace
                 where nspname like 'pillarbox%' and has_function_privilege('pillarbox_producer', pg_proc.oid, 'execute')
                   and has_schema_privilege('pillarbox_producer', pg_namespace.oid, 'usage') order by 1";
    let allowed: Vec<String> = sqlx::query_scalar(query).fetch_all(database.pool()).await.unwrap();
    assert_eq!(allowed, ["notify", "post"]);
    let query = "select count(*) from pg_class join pg_namespace on pg_namespace.oid = relnamespace
                 where nspname like 'pillarbox%' and relkind in ('r', 'p', 'v', 'm')
                   and has_table_privilege('pillarbox_producer', pg_class.oid, 'select, insert, update, delete')";
    let tables: i64 = sqlx::query_scalar(query).fetch_one(database.pool()).await.unwrap();
    assert_eq!(tables, 0);
}
