//! What posts in SQL are checked against: the schemas of the event types of their tenant. `pillarbox.check_post` reads them; the
//! service that has the catalogue of event types writes them in the transaction that changes the catalogue.

use serde_json::Value;
use sqlx::{PgConnection, Postgres, Transaction};

/// How the posts of a tenant are checked.
#[derive(Debug, Clone, Copy)]
pub struct EventRule {
    /// Topics without an entry are refused.
    pub refuses_unknown: bool,
    /// The posts of tenants without a rule are checked in the same way. For the tenant `main` only.
    pub is_shared: bool,
}

/// Checks the posts of a tenant from now on.
pub async fn set_event_rule(tx: &mut Transaction<'_, Postgres>, tenant: &str, rule: EventRule) -> sqlx::Result<()> {
    let query = "insert into pillarbox.event_rule (tenant, refuses_unknown, is_shared) values ($1, $2, $3)
                 on conflict (tenant) do update
                 set refuses_unknown = excluded.refuses_unknown, is_shared = excluded.is_shared";
    sqlx::query(query).bind(tenant).bind(rule.refuses_unknown).bind(rule.is_shared).execute(&mut **tx).await.map(drop)
}

/// Sets the schema of a topic, without references and annotations and with patterns in the syntax of PostgreSQL. None: every
/// payload is accepted.
pub async fn set_event_schema(
    tx: &mut Transaction<'_, Postgres>,
    tenant: &str,
    topic: &str,
    schema: Option<&Value>,
) -> sqlx::Result<()> {
    let query = "insert into pillarbox.event_schema (tenant, topic, schema) values ($1, $2, $3)
                 on conflict (tenant, topic) do update set schema = excluded.schema";
    sqlx::query(query).bind(tenant).bind(topic).bind(schema).execute(&mut **tx).await.map(drop)
}

/// Removes the entry of a topic.
pub async fn remove_event_schema(tx: &mut Transaction<'_, Postgres>, tenant: &str, topic: &str) -> sqlx::Result<()> {
    let query = "delete from pillarbox.event_schema where tenant = $1 and topic = $2";
    sqlx::query(query).bind(tenant).bind(topic).execute(&mut **tx).await.map(drop)
}

/// Removes everything that is checked for a tenant.
pub async fn remove_event_rules(db: &mut PgConnection, tenant: &str) -> sqlx::Result<()> {
    for table in ["event_rule", "event_schema"] {
        let query = format!("delete from pillarbox.{table} where tenant = $1");
        sqlx::query(sqlx::AssertSqlSafe(query)).bind(tenant).execute(&mut *db).await?;
    }
    Ok(())
}

/// Compiles regular expressions. Fails if PostgreSQL cannot compile one of them.
pub async fn compile_patterns(db: &mut PgConnection, patterns: &[String]) -> sqlx::Result<()> {
    if patterns.is_empty() {
        return Ok(());
    }
    sqlx::query("select count(*) from unnest($1::text[]) as pattern where '' ~ pattern")
        .bind(patterns)
        .execute(db)
        .await
        .map(drop)
}
