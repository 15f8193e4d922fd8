//! The SQL function `post`: which arguments it accepts, ids that the producer chooses, and upgrades of it.

use std::borrow::Cow;

use mailbox::database::{migrate, migrations};
use mailbox::operations::maintenance::{Retention, run_once};
use serde_json::json;
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, PgPool};
use testkit::{TestApp, TestDatabase, eventually};
use uuid::Uuid;

use crate::log::reading::LogReader;
use crate::support::{DEADLINE, lock_waits};

const CHOSEN: &str = "7c5d2a7e-0000-4000-8000-000000000001";

async fn posted(db: &PgPool) -> Vec<String> {
    sqlx::query_scalar("select payload::text from pillarbox.log order by id").fetch_all(db).await.unwrap()
}

/// Posts with an id, in a transaction of its own.
async fn post_with_id(db: &PgPool, topic: &str, payload: &str, id: Uuid) -> sqlx::Result<Uuid> {
    let query = "select pillarbox.post($1, $2::jsonb, key => 'k', message_id => $3)";
    sqlx::query_scalar(query).bind(topic).bind(payload).bind(id).fetch_one(db).await
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
async fn a_repeated_message_id_is_one_message() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, id) = (database.pool(), CHOSEN.parse().unwrap());
    for payload in ["1", "2"] {
        assert_eq!(post_with_id(db, "a", payload, id).await.unwrap(), id);
    }
    let twice = "select pillarbox.post('b', '3', message_id => $1) = pillarbox.post('b', '4'::json, message_id => $1)";
    assert!(sqlx::query_scalar::<_, bool>(twice).bind(Uuid::new_v4()).fetch_one(db).await.unwrap());
    assert_eq!(posted(db).await, ["1", "3"]);
    assert_eq!(LogReader::from_the_beginning().read(db, 10).await.len(), 2);
    for (topic, tenant) in [("b", "main"), ("a", "acme")] {
        let other = "select pillarbox.post($1, '5', tenant => $2, message_id => $3)";
        let error = sqlx::query(other).bind(topic).bind(tenant).bind(id).execute(db).await.unwrap_err();
        let error = error.into_database_error().unwrap();
        assert_eq!(error.code().unwrap(), "22023", "another message must not be lost: {error}");
        assert!(error.message().starts_with("message_id") && error.message().contains("another id"), "{error}");
    }
    let ids: i64 = sqlx::query_scalar("select count(*) from pillarbox.chosen_id").fetch_one(db).await.unwrap();
    sqlx::query("select pillarbox.post('a', '6')").execute(db).await.unwrap();
    let after: i64 = sqlx::query_scalar("select count(*) from pillarbox.chosen_id").fetch_one(db).await.unwrap();
    assert_eq!((ids, after), (2, 2), "a post without an id stores none");
}

#[tokio::test]
async fn a_concurrent_post_of_the_same_id_waits_and_posts_only_if_the_first_rolls_back() {
    let database = TestDatabase::new(&migrations()).await;
    let db = database.pool();
    for commits in [true, false] {
        let id = Uuid::new_v4();
        let mut first = db.begin().await.unwrap();
        let query = "select pillarbox.post('a', '\"first\"', message_id => $1)";
        sqlx::query(query).bind(id).execute(&mut *first).await.unwrap();
        let second = tokio::spawn({
            let db = db.clone();
            async move { post_with_id(&db, "a", "\"second\"", id).await }
        });
        eventually("the second waits", DEADLINE, async || lock_waits(db).await == 1).await;
        if commits {
            first.commit().await.unwrap()
        } else {
            first.rollback().await.unwrap()
        }
        assert_eq!(second.await.unwrap().unwrap(), id);
        let query = "select payload::text from pillarbox.log where message_id = $1";
        let found: Vec<String> = sqlx::query_scalar(query).bind(id).fetch_all(db).await.unwrap();
        assert_eq!(found, [if commits { "\"first\"" } else { "\"second\"" }]);
    }
}

#[tokio::test]
async fn a_message_with_a_chosen_id_is_found_by_it_and_the_id_is_free_after_retention() {
    let database = TestDatabase::new(&migrations()).await;
    let (db, id) = (database.pool(), CHOSEN.parse().unwrap());
    let app = TestApp::start_with(&database, |settings| settings.roles = vec![pillarbox::settings::Role::Api]).await;
    // The time in the second one is far from the time of the post.
    let old = "01890a5d-ac96-774b-bcce-b302099a8057".parse().unwrap();
    for (id, number) in [(id, "1"), (old, "2")] {
        post_with_id(db, "order.paid", number, id).await.unwrap();
        for path in ["/admin/v1/log", "/hub/v1/events"] {
            let shown = app.admin().get(&format!("{path}/evt_{id}")).await.json();
            assert_eq!(shown["payload"].to_string(), number, "{path}: {shown}");
            assert_eq!(shown["event_id"], json!(format!("evt_{id}")));
        }
    }
    let age = "update pillarbox.chosen_id set at = now() - $1::text::interval where message_id = $2";
    sqlx::query(age).bind("15 days").bind(old).execute(db).await.unwrap();
    sqlx::query(age).bind("40 days").bind(id).execute(db).await.unwrap();
    run_once(db, Retention::default(), std::time::Duration::ZERO).await.unwrap();
    let left: Vec<Uuid> = sqlx::query_scalar("select message_id from pillarbox.chosen_id").fetch_all(db).await.unwrap();
    assert_eq!(left, [old], "an id is remembered for as long as inboxes are");
    post_with_id(db, "order.paid", "3", id).await.unwrap();
    assert_eq!(posted(db).await, ["1", "2", "3"]);
    app.stop().await;
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
