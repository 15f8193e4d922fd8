//! The store of a service runs inside the transaction of its caller: it receives a connection, and opens none.

use crate::paths::tokens;

/// The violations in a `store` module of a service.
pub(crate) fn opens_a_transaction(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let tokens = tokens(text);
    let mut violations = Vec::new();
    if tokens.iter().any(|token| ["PgPool", "Pool", "Database"].contains(&token.as_str())) {
        violations.push("a store receives a connection, not a pool".to_owned());
    }
    if tokens.windows(3).any(|window| window[0] == "." && window[1] == "begin" && window[2] == "(") {
        violations.push("a store opens no transaction: its caller does".to_owned());
    }
    violations
}

mod samples {
    use super::*;

    #[test]
    fn a_store_that_receives_a_connection_passes() {
        for good in [
            "use sqlx::PgConnection; pub async fn save(db: &mut PgConnection) { sqlx::query(\"begin\") }",
            "// PgPool and .begin() belong to the flow\nfn begin() {}",
            "fn f() {}\n#[cfg(test)]\nmod tests { fn g(db: &PgPool) {} }",
        ] {
            assert_eq!(opens_a_transaction(good), [""; 0], "{good}");
        }
    }

    #[test]
    fn a_pool_or_a_transaction_in_a_store_is_found() {
        for bad in [
            "pub async fn save(db: &PgPool) {}",
            "use sqlx::{PgPool, Row};",
            "pub async fn save(db: &Database) {}",
            "fn f(db: sqlx::Pool<Postgres>) {}",
            "async fn f() { let mut tx = connection.begin().await?; }",
            "async fn f() { connection\n    .begin()\n    .await }",
        ] {
            assert!(!opens_a_transaction(bad).is_empty(), "{bad}");
        }
    }
}
