//! The users behind aggregates, and how to reach users.

use std::collections::BTreeSet;

use pillarbox::log::Tenant;
use sqlx::{PgConnection, QueryBuilder};
use uuid::Uuid;

/// A user behind one aggregate, or behind every aggregate of a type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, sqlx::FromRow)]
pub(crate) struct Recipient {
    pub(crate) aggregate_type: String,
    /// None: every aggregate of the type.
    pub(crate) aggregate_id: Option<i64>,
    pub(crate) user_id: Uuid,
}

/// How to reach a user, as identity or an import tells it; None: it tells nothing about that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewContact {
    pub(crate) user_id: Uuid,
    pub(crate) email: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) locale: Option<String>,
    pub(crate) tenant: Option<String>,
    /// The version of the account; 0 for an import.
    pub(crate) version: i64,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct RecipientFilter {
    pub(crate) aggregate_type: Option<String>,
    pub(crate) aggregate_id: Option<i64>,
    pub(crate) user_id: Option<Uuid>,
}

/// Adds recipients. Returns how many are new. Deleted users are not added.
pub(crate) async fn add(db: &mut PgConnection, recipients: &[Recipient]) -> sqlx::Result<u64> {
    let done = sqlx::query(
        "insert into pillarbox_notify.recipient (aggregate_type, aggregate_id, user_id)
         select aggregate_type, aggregate_id, user_id
         from unnest($1::text[], $2::bigint[], $3::uuid[]) as new (aggregate_type, aggregate_id, user_id)
         where not exists (select from pillarbox_notify.deleted_account deleted where deleted.user_id = new.user_id)
         order by user_id, aggregate_type, aggregate_id on conflict do nothing",
    )
    .bind(recipients.iter().map(|one| one.aggregate_type.as_str()).collect::<Vec<_>>())
    .bind(recipients.iter().map(|one| one.aggregate_id).collect::<Vec<_>>())
    .bind(recipients.iter().map(|one| one.user_id).collect::<Vec<_>>())
    .execute(db)
    .await?;
    Ok(done.rows_affected())
}

/// Removes a recipient. Returns false if there is none.
pub(crate) async fn remove(db: &mut PgConnection, recipient: &Recipient) -> sqlx::Result<bool> {
    let query = "delete from pillarbox_notify.recipient
                 where aggregate_type = $1 and aggregate_id is not distinct from $2 and user_id = $3";
    let done = sqlx::query(query)
        .bind(&recipient.aggregate_type)
        .bind(recipient.aggregate_id)
        .bind(recipient.user_id)
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// Whether an aggregate type has recipients.
pub(crate) async fn has_recipients(db: &mut PgConnection, aggregate_type: &str) -> sqlx::Result<bool> {
    let query = "select exists (select from pillarbox_notify.recipient where aggregate_type = $1)";
    sqlx::query_scalar(query).bind(aggregate_type).fetch_one(db).await
}

/// Recipients after a position, by user and aggregate.
pub(crate) async fn list(
    db: &mut PgConnection,
    filter: &RecipientFilter,
    after: Option<&(Uuid, String, Option<i64>)>,
    limit: u32,
) -> sqlx::Result<Vec<Recipient>> {
    // Every aggregate of a type comes before a single one.
    let mut query = QueryBuilder::new("select * from pillarbox_notify.recipient where true");
    if let Some(aggregate_type) = &filter.aggregate_type {
        query.push(" and aggregate_type = ").push_bind(aggregate_type);
    }
    if let Some(aggregate_id) = filter.aggregate_id {
        query.push(" and aggregate_id = ").push_bind(aggregate_id);
    }
    if let Some(user_id) = filter.user_id {
        query.push(" and user_id = ").push_bind(user_id);
    }
    if let Some((user_id, aggregate_type, aggregate_id)) = after {
        query.push(" and user_id >= ").push_bind(user_id);
        query.push(" and (user_id, aggregate_type, aggregate_id is not null, coalesce(aggregate_id, 0)) > (");
        query.push_bind(user_id).push(", ").push_bind(aggregate_type).push(", ");
        query.push_bind(aggregate_id.is_some()).push(", ").push_bind(aggregate_id.unwrap_or_default()).push(")");
    }
    query.push(" order by user_id, aggregate_type, aggregate_id is not null, coalesce(aggregate_id, 0) limit ");
    query.push_bind(i64::from(limit));
    query.build_query_as().fetch_all(db).await
}

/// Saves contacts, unless a newer version of the account is known. Each user occurs once. Deleted users are skipped.
pub(crate) async fn save_contacts(db: &mut PgConnection, contacts: &[NewContact]) -> sqlx::Result<()> {
    sqlx::query(
        "insert into pillarbox_notify.contact as known (user_id, email, name, locale, tenant, version)
         select user_id, email, coalesce(name, ''), coalesce(locale, 'en'), tenant, version
         from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[])
             as new (user_id, email, name, locale, tenant, version)
         where not exists (select from pillarbox_notify.deleted_account deleted where deleted.user_id = new.user_id)
         order by user_id
         on conflict (user_id) do update set email = excluded.email, name = excluded.name, locale = excluded.locale,
             tenant = coalesce(excluded.tenant, known.tenant), version = excluded.version
         where known.version < excluded.version",
    )
    .bind(contacts.iter().map(|one| one.user_id).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.email.as_deref()).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.name.as_deref()).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.locale.as_deref()).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.tenant.as_deref()).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.version).collect::<Vec<_>>())
    .execute(db)
    .await
    .map(drop)
}

/// Returns those of these users who have an account.
pub(crate) async fn with_account(db: &mut PgConnection, users: &[Uuid]) -> sqlx::Result<BTreeSet<Uuid>> {
    let query = "select user_id from pillarbox_notify.contact where user_id = any($1) and version > 0";
    Ok(sqlx::query_scalar(query).bind(users).fetch_all(db).await?.into_iter().collect())
}

/// Imports contacts, which replace those of former imports, except for the fields that they do not have. Of a user with an account, identity knows the address, so only the
/// tenant is imported.
pub(crate) async fn import_contacts(db: &mut PgConnection, contacts: &[NewContact]) -> sqlx::Result<()> {
    sqlx::query(
        "with new as (
             select * from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[])
                 as new (user_id, email, name, locale, tenant)
         )
         insert into pillarbox_notify.contact as known (user_id, email, name, locale, tenant)
         select new.user_id, coalesce(new.email, before.email), coalesce(new.name, before.name, ''),
                coalesce(new.locale, before.locale, 'en'), new.tenant
         from new left join pillarbox_notify.contact before on before.user_id = new.user_id
         where not exists (select from pillarbox_notify.deleted_account deleted where deleted.user_id = new.user_id)
         order by new.user_id
         on conflict (user_id) do update set
             email = case when known.version = 0 then excluded.email else known.email end,
             name = case when known.version = 0 then excluded.name else known.name end,
             locale = case when known.version = 0 then excluded.locale else known.locale end,
             tenant = coalesce(excluded.tenant, known.tenant)",
    )
    .bind(contacts.iter().map(|one| one.user_id).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.email.as_deref()).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.name.as_deref()).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.locale.as_deref()).collect::<Vec<_>>())
    .bind(contacts.iter().map(|one| one.tenant.as_deref()).collect::<Vec<_>>())
    .execute(db)
    .await
    .map(drop)
}

/// Removes a deleted tenant from at most `limit` contacts: a later tenant of the same name must not get the webhooks about their
/// users. Returns how many there were.
pub(crate) async fn remove_tenant(db: &mut PgConnection, tenant: &Tenant, limit: i64) -> sqlx::Result<u64> {
    let query = "update pillarbox_notify.contact set tenant = null where user_id in (
                     select user_id from pillarbox_notify.contact where tenant = $1 order by user_id limit $2 for update)";
    Ok(sqlx::query(query).bind(tenant.as_str()).bind(limit).execute(db).await?.rows_affected())
}
