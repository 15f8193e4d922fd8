//! The SQL function `post`: which arguments it accepts, and upgrades of it.

use std::borrow::Cow;

use mailbox::database::{migrate, migrations};
use sqlx::migrate::Migrator;
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

#[tokio::test]
async fn an_invalid_argument_is_named_and_the_row_is_not_shown() {
    let database = TestDatabase::new(&migrations()).await;
    for (arguments, says) in [
        ("key => ''", "key must have 1 to 255 characters"),
        ("key => repeat('x', 256)", "key must have 1 to 255 characters"),
        ("aggregate_type => ''", "aggregate_type must have 1 to 100 characters"),
        ("aggregate_type => repeat('x', 101)", "aggregate_type must have 1 to 100 characters"),
        ("aggregate_id => repeat('x', 256)", "aggregate_id must have 1 to 255 characters"),
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
    let longest = "select pillarbox.post('a', '1', key => repeat('x', 255), aggregate_type => repeat('x', 100))";
    sqlx::query(longest).execute(database.pool()).await.unwrap();
}

#[tokio::test]
async fn callers_and_grants_of_the_first_version_of_post_stay_valid() {
    let before = migrations().iter().filter(|migration| migration.version <= 8).cloned().collect();
    let before = Migrator { migrations: Cow::Owned(before), ..migrations() };
    let database = TestDatabase::new(&before).await;
    let db = database.pool();
    let role = format!("\"{}\"", Uuid::new_v4().simple());
    // The function's body refers to `post` itself, not to its name.
    let setup = format!(
        "create role {role};
         grant usage on schema pillarbox to {role};
         grant execute on function pillarbox.post to {role};
         create function public.by_reference() returns uuid language sql
             begin atomic select pillarbox.post('a', '1'::json, key => 'k'); end;
         create function public.by_name() returns uuid language plpgsql
             as $$ begin return pillarbox.post('a', '2'); end $$"
    );
    sqlx::raw_sql(AssertSqlSafe(setup)).execute(db).await.unwrap();
    migrate(&database.connect_options()).await.unwrap();
    let mut session = db.acquire().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("set role {role}"))).execute(&mut *session).await.unwrap();
    for call in ["public.by_reference()", "public.by_name()", "pillarbox.post('a', '3'::jsonb)"] {
        let query = AssertSqlSafe(format!("select {call}"));
        sqlx::query(query).execute(&mut *session).await.unwrap_or_else(|error| panic!("{call}: {error}"));
    }
    let query = "select has_function_privilege('public', oid, 'execute') from pg_proc
                 where pronamespace = 'pillarbox'::regnamespace and proname in ('post', 'post_first_version')";
    let open: Vec<bool> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
    assert_eq!(open, [false; 4], "nobody else may post");
    let drop = format!("reset role; drop owned by {role}; drop role {role}");
    sqlx::raw_sql(AssertSqlSafe(drop)).execute(&mut *session).await.unwrap();
    assert_eq!(posted(db).await, ["1", "2", "3"]);
}
