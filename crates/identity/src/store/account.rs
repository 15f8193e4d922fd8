//! Accounts, and the networks that they are known to use.

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use crate::domain::Account;

const COLUMNS: &str = "account.id, account.email, account.name, account.locale, account.role, account.password_hash,
    account.needs_password, account.verified_at, account.created_at, account.updated_at, account.version";
/// The number of networks that are remembered for each account.
const NETWORKS_MAX: i64 = 20;

/// An account, as a sign-in finds it.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct LoginAccount {
    #[sqlx(flatten)]
    pub(crate) account: Account,
    /// Whether the user has signed in from the same network before.
    pub(crate) is_network_known: bool,
}

/// Finds an account for a sign-in.
pub(crate) async fn find_for_login(
    db: &mut PgConnection,
    email: &str,
    network: &[u8; 32],
) -> sqlx::Result<Option<LoginAccount>> {
    let query = format!(
        "select {COLUMNS}, exists (select from pillarbox_identity.known_network known
                                   where known.user_id = account.id and known.network = $2) as is_network_known
         from pillarbox_identity.account where email = $1"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(email).bind(network.as_slice()).fetch_optional(db).await
}

/// Whether there is an account with this address whose user has signed in from this network before.
pub(crate) async fn knows_network(db: &mut PgConnection, email: &str, network: &[u8; 32]) -> sqlx::Result<bool> {
    let query = "select exists (select from pillarbox_identity.account
                                join pillarbox_identity.known_network known on known.user_id = account.id
                                where account.email = $1 and known.network = $2)";
    sqlx::query_scalar(query).bind(email).bind(network.as_slice()).fetch_one(db).await
}

/// Returns the password hash of an account at about this fraction of the time between the first and the last registration; None
/// if there are no accounts. Ids begin with the time, so a few lookups in their index are enough.
pub(crate) async fn password_hash_at(db: &mut PgConnection, fraction: f64) -> sqlx::Result<Option<String>> {
    let query = "with times as (
                     select ('x' || left(replace((select id from pillarbox_identity.account order by id limit 1)::text,
                                                 '-', ''), 12))::bit(48)::bigint as first,
                            ('x' || left(replace((select id from pillarbox_identity.account order by id desc limit 1)::text,
                                                 '-', ''), 12))::bit(48)::bigint as last
                 )
                 select password_hash from pillarbox_identity.account
                 where id >= (select rpad(lpad(to_hex(first + floor((last - first) * $1)::bigint), 12, '0'), 32, '0')::uuid
                              from times)
                 order by id limit 1";
    sqlx::query_scalar(query).bind(fraction).fetch_optional(db).await
}

/// Finds the account of a live session.
pub(crate) async fn find_by_session(
    db: &mut PgConnection,
    user_id: Uuid,
    session_id: Uuid,
    now: DateTime<Utc>,
) -> sqlx::Result<Option<Account>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_identity.account
         join pillarbox_identity.session on session.user_id = account.id
         where account.id = $1 and session.id = $2 and session.expires_at > $3"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(user_id).bind(session_id).bind(now).fetch_optional(db).await
}

/// Finds an account and locks its row until the end of the transaction.
pub(crate) async fn lock(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<Account>> {
    let query = format!("select {COLUMNS} from pillarbox_identity.account where id = $1 for update");
    sqlx::query_as(AssertSqlSafe(query)).bind(id).fetch_optional(db).await
}

pub(crate) async fn lock_by_email(db: &mut PgConnection, email: &str) -> sqlx::Result<Option<Account>> {
    let query = format!("select {COLUMNS} from pillarbox_identity.account where email = $1 for update");
    sqlx::query_as(AssertSqlSafe(query)).bind(email).fetch_optional(db).await
}

/// The accounts whose address begins with `prefix`, newest first, before `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    prefix: Option<&str>,
    before: Option<Uuid>,
    limit: u32,
) -> sqlx::Result<Vec<Account>> {
    // The end of the range of all texts with the prefix, in the collation "C".
    let end = prefix.map(|prefix| format!("{prefix}\u{10ffff}"));
    let query = format!(
        "select {COLUMNS} from pillarbox_identity.account
         where ($1::text is null or (email >= $1 and email < $2)) and ($3::uuid is null or id < $3)
         order by id desc limit $4"
    );
    let query = sqlx::query_as(AssertSqlSafe(query)).bind(prefix).bind(end).bind(before).bind(i64::from(limit));
    query.fetch_all(db).await
}

/// Inserts an account. Returns false if its address has one already.
pub(crate) async fn insert(db: &mut PgConnection, new: &Account) -> sqlx::Result<bool> {
    let statement = "insert into pillarbox_identity.account
             (id, email, name, locale, role, password_hash, verified_at, created_at, updated_at, version, needs_password)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) on conflict (email) do nothing";
    save(db, new, statement).await
}

pub(crate) async fn update(db: &mut PgConnection, changed: &Account) -> sqlx::Result<bool> {
    let statement = "update pillarbox_identity.account
         set name = $3, locale = $4, role = $5, password_hash = $6, verified_at = $7, created_at = $8, updated_at = $9,
             version = $10, needs_password = $11
         where id = $1 and email = $2";
    save(db, changed, statement).await
}

async fn save(db: &mut PgConnection, account: &Account, statement: &'static str) -> sqlx::Result<bool> {
    let done = sqlx::query(statement)
        .bind(account.id)
        .bind(&account.email)
        .bind(&account.name)
        .bind(&account.locale)
        .bind(account.role.into_str())
        .bind(&account.password_hash)
        .bind(account.verified_at)
        .bind(account.created_at)
        .bind(account.updated_at)
        .bind(account.version)
        .bind(account.needs_password)
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// Locks up to `limit` verified accounts of which the other services do not know the current version.
pub(crate) async fn lock_unannounced(db: &mut PgConnection, limit: i64) -> sqlx::Result<Vec<Account>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_identity.account where verified_at is not null and announced_version < version
         order by id limit $1 for update skip locked"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(limit).fetch_all(db).await
}

/// Records that the other services get to know these versions of accounts.
pub(crate) async fn mark_announced(db: &mut PgConnection, accounts: &[(Uuid, i64)]) -> sqlx::Result<()> {
    let query = "update pillarbox_identity.account set announced_version = announced.version
                 from unnest($1::uuid[], $2::bigint[]) as announced (id, version)
                 where account.id = announced.id and account.announced_version < announced.version";
    let (ids, versions): (Vec<Uuid>, Vec<i64>) = accounts.iter().copied().unzip();
    sqlx::query(query).bind(ids).bind(versions).execute(db).await.map(drop)
}

/// Forgets that up to `limit` accounts after `after` were announced. Returns the last of them and how many there are; None if
/// there is none.
pub(crate) async fn reset_announced(
    db: &mut PgConnection,
    after: Uuid,
    limit: i64,
) -> sqlx::Result<Option<(Uuid, u64)>> {
    let query = "update pillarbox_identity.account set announced_version = 0 where id in (
                     select id from pillarbox_identity.account where id > $1 and verified_at is not null order by id limit $2
                 ) returning id";
    let ids: Vec<Uuid> = sqlx::query_scalar(query).bind(after).bind(limit).fetch_all(db).await?;
    Ok(ids.iter().max().map(|last| (*last, ids.len() as u64)))
}

/// Deletes the account with its sessions, tokens, networks and subscriptions.
pub(crate) async fn delete(db: &mut PgConnection, id: Uuid) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_identity.account where id = $1").bind(id).execute(db).await.map(drop)
}

/// Remembers that a user has signed in from this network, and the latest ones only.
pub(crate) async fn remember_network(
    db: &mut PgConnection,
    user_id: Uuid,
    network: &[u8; 32],
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let insert = "insert into pillarbox_identity.known_network (user_id, network, last_used_at) values ($1, $2, $3)
                  on conflict (user_id, network) do update set last_used_at = excluded.last_used_at";
    sqlx::query(insert).bind(user_id).bind(network.as_slice()).bind(now).execute(&mut *db).await?;
    let delete = "delete from pillarbox_identity.known_network where user_id = $1 and network in
             (select network from pillarbox_identity.known_network where user_id = $1
              order by last_used_at desc, network offset $2)";
    sqlx::query(delete).bind(user_id).bind(NETWORKS_MAX).execute(db).await.map(drop)
}
