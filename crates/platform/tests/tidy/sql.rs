//! Statements are written in `store.rs` alone.

use crate::paths::{paths, tokens};

const TAKE_TEXT: [&str; 6] = ["execute", "execute_many", "fetch", "fetch_all", "fetch_one", "fetch_optional"];

pub(crate) fn outside_a_store(text: &str) -> Vec<String> {
    let mut violations: Vec<String> = paths(text)
        .into_iter()
        .filter(|path| {
            let mut names = path.split("::");
            names.next() == Some("sqlx") && names.any(makes_a_statement)
        })
        .map(|path| format!("SQL lives in store.rs (`{path}`)"))
        .collect();
    // A pool or a connection takes a plain text, too.
    let tokens = tokens(text);
    let given_text = tokens.windows(4).filter(|window| {
        window[0] == "." && TAKE_TEXT.contains(&window[1].as_str()) && window[2] == "(" && window[3] == "\"\""
    });
    violations.extend(given_text.map(|window| format!("SQL lives in store.rs (`.{}(\"…\")`)", window[1])));
    violations
}

/// `query`, `query_as!`, `query_scalar`, `query_file` and their kin. A glob could bring in any of them.
fn makes_a_statement(name: &str) -> bool {
    name == "*" || name == "raw_sql" || name == "QueryBuilder" || name == "query" || name.starts_with("query_")
}

mod samples {
    use super::*;

    #[test]
    fn code_without_statements_passes() {
        for good in [
            "use sqlx::PgPool; use sqlx::postgres::PgConnectOptions; fn f(e: sqlx::Error) {}",
            "// sqlx::query",
            "fn f() { uri.query(); store::query_all(); query_problem(\"/limit\", \"x\") }",
            "fn f() { job.execute(&plan) }",
        ] {
            assert_eq!(outside_a_store(good), [""; 0], "{good}");
        }
    }

    #[test]
    fn every_way_to_write_a_statement_is_seen() {
        for bad in [
            "fn f() { sqlx::query(\"select 1\") }",
            "fn f() { sqlx::query!(\"select 1\") }",
            "fn f() { sqlx::query_as::<_, Row>(\"select 1\") }",
            "fn f() { sqlx::query_scalar(\"select 1\") }",
            "fn f() { sqlx::raw_sql(\"select 1\") }",
            "use sqlx::{PgPool, query_as};",
            "use sqlx::query as q;",
            "use sqlx::*;",
            "use sqlx as db; fn f() { db::query(\"select 1\") }",
            "fn f() { sqlx::QueryBuilder::<Postgres>::new(x) }",
            "async fn f() { pool.execute(\"drop table x\").await }",
            "async fn f() { pool\n    .fetch_one(\n        r#\"select 1\"#).await }",
        ] {
            assert!(!outside_a_store(bad).is_empty(), "{bad}");
        }
    }
}
