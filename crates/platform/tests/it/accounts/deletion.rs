//! After the deletion of an account nothing contains the person's address or name: no table and no log line.

use hyper::Method;
use mailbox::database::migrations;
use serde_json::json;
use sqlx::{AssertSqlSafe, PgPool};
use testkit::{Client, TestDatabase, eventually};
use uuid::Uuid;

use super::{DEADLINE, PASSWORD, emailed_token, log_in, register_verified, session};
use crate::server::process::{ADMIN_KEY, DataFolder, serve};

const ADDRESS: &str = "grace.hopper@example.org";
/// The name that `register` gives to every account.
const NAME: &str = "Ada Lovelace";

#[tokio::test]
async fn no_table_and_no_log_line_has_personal_data_of_a_deleted_account() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let mut process = serve(&folder, &database, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY), ("PILLARBOX_LOG", "trace")]);
    let anonymous = Client::new(&process.base_url().await);
    let admin = anonymous.bearer(ADMIN_KEY);
    register_verified(&anonymous, &admin, ADDRESS).await;
    assert_eq!(anonymous.post("/identity/v1/password/forgot", json!({"email": ADDRESS})).await.status, 202);
    emailed_token(&admin, ADDRESS, "password_reset").await;
    assert_eq!(log_in(&anonymous, ADDRESS, "a wrong password").await.status, 401);
    let (user, _) = session(&anonymous, ADDRESS, PASSWORD).await;
    // A response with personal data under an Idempotency-Key must not be stored.
    let keyed = user.with_header("idempotency-key", &Uuid::new_v4().to_string());
    let named = keyed.send(Method::PATCH, "/identity/v1/me", Some(json!({"name": "Rear Admiral Hopper"}))).await;
    assert_eq!(named.status, 200, "{named:?}");
    assert!(!tables_with(database.pool(), ADDRESS).await.is_empty(), "the search finds the address of an account");

    let deleted = user.send(Method::DELETE, "/identity/v1/me", Some(json!({"password": PASSWORD}))).await;
    assert!((200..300).contains(&deleted.status), "{deleted:?}");
    // The handlers of notify delete its part a moment later.
    eventually("no table has personal data", DEADLINE, async || {
        let mut found = Vec::new();
        for personal in [ADDRESS, NAME, "Rear Admiral Hopper"] {
            found.extend(tables_with(database.pool(), personal).await);
        }
        if found.is_empty() { Ok(()) } else { Err(found) }
    })
    .await;
    // A new mail to the address, as if it had never been registered.
    assert_eq!(anonymous.post("/identity/v1/password/forgot", json!({"email": ADDRESS})).await.status, 202);
    assert!(process.terminate().await.success());
    assert_eq!(tables_with(database.pool(), ADDRESS).await, [""; 0]);
    let logs = process.logs();
    for secret in [ADDRESS, PASSWORD, "Rear Admiral Hopper"] {
        let found = logs.lines().find(|line| line.contains(secret));
        assert!(found.is_none(), "`{secret}` is in the log: {}", found.unwrap());
    }
}

/// Returns the tables with a row that contains this text, as text or in the hexadecimal form of bytes.
async fn tables_with(db: &PgPool, wanted: &str) -> Vec<String> {
    let tables: Vec<String> = sqlx::query_scalar(
        "select format('%I.%I', schemaname, tablename) from pg_tables
         where schemaname not in ('pg_catalog', 'information_schema')",
    )
    .fetch_all(db)
    .await
    .unwrap();
    let hex: String = wanted.bytes().map(|byte| format!("{byte:02x}")).collect();
    let mut found = Vec::new();
    for table in tables {
        let query = format!(
            "select exists (select from {table} as row where position(lower($1) in lower(row::text)) > 0
                            or position($2 in row::text) > 0)"
        );
        let query = sqlx::query_scalar(AssertSqlSafe(query));
        if query.bind(wanted).bind(&hex).fetch_one(db).await.unwrap() {
            found.push(table);
        }
    }
    found
}
