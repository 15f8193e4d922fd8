//! `pillarbox.post` runs with more rights than its caller, so nothing of the caller's session may change what it does.

use sqlx::{AssertSqlSafe, PgConnection};
use testkit::TestDatabase;
use uuid::Uuid;

use server::migrations;

/// Functions, operators and types with the names that `post` uses, in a schema of the producer. Each of them records who
/// runs it and returns a wrong result.
const TRAPS: &str = "
    create table evil.trapped (who text, what text);
    create function evil.trap(what text) returns void language plpgsql
        as $$ begin insert into evil.trapped values (current_user, what); end $$;
    create function evil.length(text) returns integer language plpgsql
        as $$ begin perform evil.trap('length'); return 7; end $$;
    create function evil.octet_length(text) returns integer language plpgsql
        as $$ begin perform evil.trap('octet_length'); return 7; end $$;
    create function evil.jsonb_typeof(jsonb) returns text language plpgsql
        as $$ begin perform evil.trap('jsonb_typeof'); return 'string'; end $$;
    create function evil.to_json(text) returns json language plpgsql
        as $$ begin perform evil.trap('to_json'); return '0'; end $$;
    create function evil.set_config(text, text, boolean) returns text language plpgsql
        as $$ begin perform evil.trap('set_config'); return 'off'; end $$;
    create function evil.gen_random_uuid() returns uuid language plpgsql
        as $$ begin perform evil.trap('gen_random_uuid'); return '00000000-0000-0000-0000-000000000000'; end $$;
    create function evil.clock_timestamp() returns timestamptz language plpgsql
        as $$ begin perform evil.trap('clock_timestamp'); return '2001-01-01'; end $$;
    create function evil.hashtextextended(text, bigint) returns bigint language plpgsql
        as $$ begin perform evil.trap('hashtextextended'); return 3; end $$;
    create function evil.text_text(text, text) returns boolean language plpgsql
        as $$ begin perform evil.trap('an operator on text'); return false; end $$;
    create operator evil.~ (leftarg = text, rightarg = text, function = evil.text_text);
    create operator evil.!~ (leftarg = text, rightarg = text, function = evil.text_text);
    create operator evil.= (leftarg = text, rightarg = text, function = evil.text_text);
    create operator evil.<> (leftarg = text, rightarg = text, function = evil.text_text);
    create function evil.integer_integer(integer, integer) returns boolean language plpgsql
        as $$ begin perform evil.trap('an operator on integers'); return false; end $$;
    create operator evil.> (leftarg = integer, rightarg = integer, function = evil.integer_integer);
    create operator evil.>= (leftarg = integer, rightarg = integer, function = evil.integer_integer);
    create operator evil.<= (leftarg = integer, rightarg = integer, function = evil.integer_integer);
    -- For `bigint & 15`, this operator matches better than the built-in one.
    create function evil.bigint_integer(bigint, integer) returns bigint language plpgsql
        as $$ begin perform evil.trap('an operator on bigint'); return 3; end $$;
    create operator evil.& (leftarg = bigint, rightarg = integer, function = evil.bigint_integer);
    create operator evil.* (leftarg = bigint, rightarg = integer, function = evil.bigint_integer);
    create table evil.log (like pillarbox.log);
    create table evil.chosen_id (message_id pg_catalog.uuid, tenant text, topic text);
    create domain evil.jsonb as text;
    create domain evil.uuid as text;
    create domain evil.json as text;
    create temp table log (id bigint);
    create temp table cursor (id bigint);
    create temp table chosen_id (message_id pg_catalog.uuid);
    create domain pg_temp.uuid as text;
    create domain pg_temp.smallint as text;
    create function pg_temp.length(text) returns integer language sql as 'select 7'";

/// Settings that a producer may change in its session.
const SETTINGS: &str = "
    set search_path = evil, pg_temp, pg_catalog;
    set standard_conforming_strings = off;
    set bytea_output = escape;
    set datestyle = 'German, DMY';
    set intervalstyle = sql_standard;
    set timezone = 'Pacific/Auckland';
    set row_security = off;
    set transform_null_equals = on;
    set array_nulls = off;
    set extra_float_digits = -15;
    set quote_all_identifiers = on;
    set xmloption = document;
    set synchronous_commit = off;
    set plan_cache_mode = force_generic_plan;
    set constraint_exclusion = off;
    set statement_timeout = '5s'";

/// A session of the role `pillarbox_producer` with its own schema, traps and settings.
async fn hostile_session(database: &TestDatabase) -> PgConnection {
    let mut session = database.pool().acquire().await.unwrap().detach();
    let schema = "create schema evil; grant all on schema evil to pillarbox_producer;
                  grant select on pillarbox.log to pillarbox_producer; set session authorization pillarbox_producer";
    sqlx::raw_sql(schema).execute(&mut session).await.unwrap();
    sqlx::raw_sql(TRAPS).execute(&mut session).await.unwrap();
    sqlx::raw_sql(SETTINGS).execute(&mut session).await.unwrap();
    session
}

#[tokio::test]
async fn nothing_in_the_session_of_a_producer_changes_what_post_does() {
    let database = TestDatabase::new(&migrations()).await;
    let mut session = hostile_session(&database).await;
    let post = "select pillarbox.post('order.created'::pg_catalog.text, '{\"a\":\"b\"}'::pg_catalog.json,
                    key => 'k1', aggregate_type => 'ORDER', aggregate_id => '007', headers => '{\"x\": \"1\"}',
                    tenant => 'acme')::pg_catalog.text";
    sqlx::raw_sql("begin").execute(&mut session).await.unwrap();
    sqlx::raw_sql(post).execute(&mut session).await.unwrap();
    let mut chosen = Vec::new();
    for payload in ["'\"2\"'::pg_catalog.jsonb", "'\"2\"'::pg_catalog.text", "'\"2\"'::pg_catalog.json"] {
        let id = Uuid::new_v4();
        let post = format!(
            "select pillarbox.post('order.created'::pg_catalog.text, {payload}, key => 'k2', tenant => 'acme',
                 message_id => '{id}'::pg_catalog.uuid)::pg_catalog.text"
        );
        // The second one is a repetition.
        for _ in 0..2 {
            sqlx::raw_sql(AssertSqlSafe(post.as_str())).execute(&mut session).await.unwrap();
        }
        chosen.push(id);
    }
    let durable: String = sqlx::query_scalar("show synchronous_commit").fetch_one(&mut session).await.unwrap();
    assert_eq!(durable, "on", "an acknowledged post is on disk");
    sqlx::raw_sql("commit").execute(&mut session).await.unwrap();

    let db = database.pool();
    let trapped: Vec<(String, String)> =
        sqlx::query_as("select who, what from evil.trapped").fetch_all(db).await.unwrap();
    assert_eq!(trapped, [], "code of the producer has run inside `post`");
    let copies: i64 = sqlx::query_scalar("select count(*) from evil.log").fetch_one(db).await.unwrap();
    assert_eq!(copies, 0);
    let (id, shard, is_right_shard, source, topic): (Uuid, i16, bool, String, String) = sqlx::query_as(
        "select message_id, shard, shard = pillarbox.shard_of('acme', 'k1'), source, topic from pillarbox.log
         where tenant = 'acme' and key = 'k1' and aggregate_type = 'ORDER' and aggregate_id::text = '\"007\"'
           and headers = '{\"x\": \"1\"}' and payload::text = '{\"a\":\"b\"}' and at > now() - interval '1 minute'",
    )
    .fetch_one(db)
    .await
    .unwrap();
    assert_eq!((id.get_version_num(), source.as_str(), topic.as_str()), (7, "sql", "order.created"));
    assert!(is_right_shard, "shard {shard}");
    let query = "select message_id from pillarbox.log where key = 'k2' and payload::text = '\"2\"' and source = 'sql'
                   and shard = pillarbox.shard_of('acme', 'k2') order by id";
    let with_ids: Vec<Uuid> = sqlx::query_scalar(query).fetch_all(db).await.unwrap();
    assert_eq!(with_ids, chosen, "one message for each id");
}

#[tokio::test]
async fn post_checks_its_arguments_in_a_hostile_session_too() {
    let database = TestDatabase::new(&migrations()).await;
    let mut session = hostile_session(&database).await;
    for (arguments, says) in [
        ("'no good', '1'", "topic must"),
        ("'a', null", "payload must"),
        ("'a', pg_catalog.to_json(repeat('x', 300000))", "at most 262144"),
        ("'a', '1', tenant => '../etc'", "tenant must"),
        ("'a', '1', headers => '{\"a\": [1]}'", "headers must"),
        ("'a', '1', aggregate_type => 'T', aggregate_id => ''", "aggregate_id must"),
        ("'a', '1', key => ''", "key must"),
        (
            "'a', '1'::pg_catalog.jsonb, aggregate_type => pg_catalog.repeat('x', 101), aggregate_id => '1'",
            "aggregate_type must",
        ),
    ] {
        let call = AssertSqlSafe(format!("select pillarbox.post({arguments})"));
        let error = sqlx::raw_sql(call).execute(&mut session).await.unwrap_err();
        assert!(error.to_string().contains(says), "{arguments}: {error}");
    }
    // Settings that would switch off the trigger that makes posts durable, or let a column win over an argument.
    for forbidden in ["set session_replication_role = replica", "set plpgsql.variable_conflict = use_column"] {
        let error = sqlx::raw_sql(forbidden).execute(&mut session).await.unwrap_err();
        assert_eq!(error.as_database_error().unwrap().code().unwrap(), "42501", "{forbidden}: {error}");
    }
    sqlx::raw_sql("set default_transaction_read_only = on").execute(&mut session).await.unwrap();
    let error = sqlx::raw_sql("select pillarbox.post('a', '1')").execute(&mut session).await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().unwrap(), "25006", "a read-only transaction posts nothing");
    let posted: i64 =
        sqlx::query_scalar("select count(*) from pillarbox.log").fetch_one(database.pool()).await.unwrap();
    assert_eq!(posted, 0);
}
