//! SQL statements appear in stores only.

use crate::paths::{paths, tokens};

const ACCEPT_TEXT: [&str; 6] = ["execute", "execute_many", "fetch", "fetch_all", "fetch_one", "fetch_optional"];

pub(crate) fn outside_a_store(text: &str) -> Vec<String> {
    let mut violations: Vec<String> = paths(text)
        .into_iter()
        .filter(|path| {
            let mut names = path.split("::");
            names.next() == Some("sqlx") && names.any(creates_a_statement)
        })
        .map(|path| format!("SQL belongs in store.rs (`{path}`)"))
        .collect();
    // Pools and connections also accept plain text.
    let tokens = tokens(text);
    let plain_text = tokens.windows(4).filter(|window| {
        window[0] == "." && ACCEPT_TEXT.contains(&window[1].as_str()) && window[2] == "(" && window[3] == "\"\""
    });
    violations.extend(plain_text.map(|window| format!("SQL belongs in store.rs (`.{}(\"…\")`)", window[1])));
    violations
}

/// `query`, `query_as!`, `query_scalar`, `query_file` and similar names. A glob could import any of them.
fn creates_a_statement(name: &str) -> bool {
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
    fn every_way_to_create_a_statement_is_found() {
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
