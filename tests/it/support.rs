//! Helpers that the tests of several services share.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool};
use testkit::{Client, TestApp};
use uuid::Uuid;

/// The default deadline for a condition to become true.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// A client with a new API key of this role and tenant.
pub(crate) async fn caller(app: &TestApp, role: &str, tenant: &str) -> Client {
    let made = app.admin().post("/admin/v1/keys", json!({"name": "test", "role": role, "tenant": tenant})).await;
    assert_eq!(made.status, 201, "{made:?}");
    app.anonymous().bearer(made.json()["key"].as_str().unwrap())
}

/// The string in a JSON value. Fails if it is not a string.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("not a string: {value}"))
}

/// The UUID in a JSON value.
pub(crate) fn uuid_of(value: &Value) -> Uuid {
    value.as_str().unwrap().parse().unwrap()
}

/// All items of a list, page by page.
pub(crate) async fn collect_pages(client: &Client, path: &str) -> Vec<Value> {
    collect_pages_with(client, path, async |_| {}).await
}

/// All items of a list, page by page; `between` runs after each page but the last, with the number of the page from 0.
/// Fails if the list has no end, or if the `Link` header does not lead to the next page.
pub(crate) async fn collect_pages_with(client: &Client, path: &str, mut between: impl AsyncFnMut(usize)) -> Vec<Value> {
    let (mut items, mut next) = (Vec::new(), path.to_owned());
    for page_number in 0..1_000 {
        let answer = client.get(&next).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let page = answer.json();
        items.extend(page["items"].as_array().unwrap().clone());
        let Some(cursor) = page["next_cursor"].as_str() else { return items };
        let link = answer.header("link");
        assert!(link.contains(cursor) && link.ends_with("rel=\"next\""), "{answer:?}");
        next = link.trim_start_matches('<').split_once('>').unwrap().0.to_owned();
        between(page_number).await;
    }
    panic!("{path}: the list has no end");
}

/// The number of backends of this database that wait for a lock.
pub(crate) async fn lock_waits(db: &PgPool) -> i64 {
    // Not the short waits of inserts for more space in a table.
    let query = "select count(*) from pg_stat_activity
                 where datname = current_database() and wait_event_type = 'Lock' and wait_event <> 'extend'";
    sqlx::query_scalar(query).fetch_one(db).await.unwrap()
}

/// The tables with a row that contains this text, in upper or lower case, or in the hexadecimal form of bytes.
pub(crate) async fn tables_with(db: &PgPool, wanted: &str) -> Vec<String> {
    let tables: Vec<String> = sqlx::query_scalar(
        "select format('%I.%I', schemaname, tablename) from pg_tables
         where schemaname not in ('pg_catalog', 'information_schema') order by 1",
    )
    .fetch_all(db)
    .await
    .unwrap();
    assert!(tables.len() > 20, "{}", tables.len());
    let search = |table: &String| {
        format!(
            "select '{table}' where exists (select from {table} as row where position(lower($1) in lower(row::text)) > 0
                                            or position($2 in row::text) > 0)"
        )
    };
    let query = tables.iter().map(search).collect::<Vec<_>>().join(" union all ");
    let hex: String = wanted.bytes().map(|byte| format!("{byte:02x}")).collect();
    sqlx::query_scalar(AssertSqlSafe(query)).bind(wanted).bind(hex).fetch_all(db).await.unwrap()
}
