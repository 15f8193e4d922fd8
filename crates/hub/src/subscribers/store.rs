//! SQL for subscribers and their secrets.

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use runtime::secret::Cipher;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use uuid::Uuid;
use webhook_client::signature::{SigningSecret, active_secrets};

use crate::deliveries::domain::{Batch, EndpointAuth, Format, OnExhausted, RetryRules};
use crate::directory::domain::EventTypes;
use crate::directory::store::{event_types, filter, tenant, unreadable};
use crate::subscribers::domain::{Subscriber, SubscriberSettings};

/// A subscriber with its decrypted headers and secrets.
#[derive(Debug, Clone)]
pub(crate) struct StoredSubscriber {
    pub(crate) subscriber: Subscriber,
    /// Newest first, each with its expiry. None: the secret is the current one and does not expire.
    pub(crate) secrets: Vec<(SigningSecret, Option<DateTime<Utc>>)>,
    /// Why the headers and secrets cannot be decrypted. They are empty here in that case.
    pub(crate) undecryptable: Option<String>,
    /// While the tenant is suspended, nothing is sent to its subscribers.
    pub(crate) is_tenant_suspended: bool,
}

impl StoredSubscriber {
    /// The number of secrets that sign a delivery at this time.
    pub(crate) fn active_secrets(&self, now: DateTime<Utc>) -> usize {
        active_secrets(&self.secrets, now).count()
    }
}

/// Selects subscribers of a tenant. None matches any.
#[derive(Debug, Clone, Default)]
pub(crate) struct SubscriberFilter {
    pub(crate) is_active: Option<bool>,
    /// Subscribers whose `event_types` match this type.
    pub(crate) event_type: Option<String>,
    /// Subscribers whose name contains this text, in upper or lower case.
    pub(crate) name: Option<String>,
}

const COLUMNS: &str = "id, tenant, name, url, event_types, filter, ordering_key, retry_backoff_seconds, retry_rules,
    batch_max, batch_wait_ms, on_exhausted, timeout_ms, max_in_flight, rate_limit_per_second, headers, auth, format, is_active, inactive_reason,
    paused_at, verify_endpoint, unverified_since, version, created_at, updated_at,
    exists (select from pillarbox.tenant where tenant.name = subscriber.tenant and suspended_at is not null)
        as is_tenant_suspended,
    array(select sealed from pillarbox_hub.secret where secret.subscriber = subscriber.id order by secret.id desc) as sealed,
    array(select expires_at from pillarbox_hub.secret where secret.subscriber = subscriber.id
          order by secret.id desc) as sealed_until";

/// Returns the subscribers of these shards. A subscriber that cannot be decoded or decrypted is logged and left out, so
/// that it does not stop the deliveries to others.
pub(crate) async fn load_shards(
    db: &mut PgConnection,
    cipher: &Cipher,
    shards: &[i16],
) -> sqlx::Result<Vec<StoredSubscriber>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.subscriber where shard = any($1) order by id");
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).bind(shards).fetch_all(db).await?;
    let mut readable = Vec::with_capacity(rows.len());
    for row in &rows {
        let subscriber: Uuid = row.try_get("id")?;
        match stored_subscriber(row, cipher).map(|stored| (stored.undecryptable.clone(), stored)) {
            Ok((None, stored)) => readable.push(stored),
            Ok((Some(error), _)) => {
                tracing::error!(%subscriber, error, "cannot decrypt a subscriber, so its messages wait; is `secret_keys_previous` complete?");
            }
            Err(error) => {
                tracing::error!(%subscriber, %error, "cannot decode a subscriber, so its messages wait");
            }
        }
    }
    Ok(readable)
}

/// Returns all subscribers without their headers and secrets.
pub(crate) async fn load_all(db: &mut PgConnection) -> sqlx::Result<Vec<Subscriber>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.subscriber order by id");
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).fetch_all(db).await?;
    rows.iter().map(|row| subscriber(row, Credentials::default())).collect()
}

/// Returns the number of subscribers of a tenant.
pub(crate) async fn count(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<i64> {
    let query = "select count(*) from pillarbox_hub.subscriber where tenant = $1";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_one(db).await
}

pub(crate) async fn find(
    db: &mut PgConnection,
    cipher: &Cipher,
    tenant: &Tenant,
    id: Uuid,
) -> sqlx::Result<Option<StoredSubscriber>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.subscriber where id = $1 and tenant = $2");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str()).fetch_optional(db).await?;
    row.map(|row| stored_subscriber(&row, cipher)).transpose()
}

/// Returns the subscriber and locks its row until the end of the transaction.
pub(crate) async fn lock(
    db: &mut PgConnection,
    cipher: &Cipher,
    tenant: &Tenant,
    id: Uuid,
) -> sqlx::Result<Option<StoredSubscriber>> {
    // Two statements: a single one would read the secrets as of its start, before it waited for the lock.
    match lock_version(db, tenant, id).await? {
        Some(_) => find(db, cipher, tenant, id).await,
        None => Ok(None),
    }
}

/// Returns the version and the time of the last change, and locks the row until the end of the transaction.
pub(crate) async fn lock_version(
    db: &mut PgConnection,
    tenant: &Tenant,
    id: Uuid,
) -> sqlx::Result<Option<(i64, DateTime<Utc>)>> {
    sqlx::query_as("select version, updated_at from pillarbox_hub.subscriber where id = $1 and tenant = $2 for update")
        .bind(id)
        .bind(tenant.as_str())
        .fetch_optional(db)
        .await
}

/// Returns subscribers newest first, those with ids below `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    cipher: &Cipher,
    tenant: &Tenant,
    filter: &SubscriberFilter,
    (before, limit): (Option<Uuid>, u32),
) -> sqlx::Result<Vec<StoredSubscriber>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.subscriber
         where tenant = $1 and ($2::uuid is null or id < $2) and ($3::boolean is null or is_active = $3)
           and ($4::text is null or exists (
               select from unnest(event_types) as pattern
               where case when right(pattern, 1) = '*'
                   then starts_with($4, left(pattern, -1)) and length($4) >= length(pattern)
                       and (pattern <> '*' or split_part($4, '.', 1) <> 'hub')
                   else pattern = $4 end))
           and ($6::text is null or strpos(lower(name), lower($6)) > 0)
         order by id desc limit $5"
    );
    let rows = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(tenant.as_str())
        .bind(before)
        .bind(filter.is_active)
        .bind(&filter.event_type)
        .bind(i64::from(limit))
        .bind(&filter.name)
        .fetch_all(db)
        .await?;
    rows.iter().map(|row| stored_subscriber(row, cipher)).collect()
}

/// Inserts a subscriber. Its shard is that of a log message whose key is the subscriber's id.
pub(crate) async fn insert(db: &mut PgConnection, cipher: &Cipher, new: &Subscriber) -> sqlx::Result<()> {
    save(
        db,
        cipher,
        new,
        "insert into pillarbox_hub.subscriber
             (id, tenant, version, name, url, event_types, filter, ordering_key, retry_backoff_seconds, retry_rules,
              on_exhausted, timeout_ms, max_in_flight, rate_limit_per_second, headers, format, is_active,
              inactive_reason, paused_at, created_at, updated_at, batch_max, batch_wait_ms, verify_endpoint, unverified_since,
              auth, shard)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24,
              $25, $26,
              pillarbox.shard_of($2, $1::text))",
    )
    .await
}

/// Updates every column, including the version.
pub(crate) async fn update(db: &mut PgConnection, cipher: &Cipher, changed: &Subscriber) -> sqlx::Result<()> {
    save(
        db,
        cipher,
        changed,
        "update pillarbox_hub.subscriber
         set version = $3, name = $4, url = $5, event_types = $6, filter = $7, ordering_key = $8,
             retry_backoff_seconds = $9, retry_rules = $10, on_exhausted = $11, timeout_ms = $12,
             max_in_flight = $13, rate_limit_per_second = $14, headers = $15, format = $16, is_active = $17,
             inactive_reason = $18, paused_at = $19, created_at = $20, updated_at = $21,
             batch_max = $22, batch_wait_ms = $23, verify_endpoint = $24, unverified_since = $25, auth = $26
         where id = $1 and tenant = $2",
    )
    .await
}

async fn save(
    db: &mut PgConnection,
    cipher: &Cipher,
    subscriber: &Subscriber,
    statement: &'static str,
) -> sqlx::Result<()> {
    let settings = &subscriber.settings;
    sqlx::query(statement)
        .bind(subscriber.id)
        .bind(subscriber.tenant.as_str())
        .bind(subscriber.version)
        .bind(&settings.name)
        .bind(&settings.url)
        .bind(settings.event_types.iter().map(EventTypes::as_str).collect::<Vec<_>>())
        .bind(settings.filter.as_ref().map(Json))
        .bind(&settings.ordering_key)
        .bind(settings.retry_backoff_seconds.iter().map(|seconds| *seconds as i32).collect::<Vec<_>>())
        .bind(Json(&settings.retry_rules))
        .bind(settings.on_exhausted.as_str())
        .bind(settings.timeout_ms as i32)
        .bind(settings.max_in_flight as i32)
        .bind(settings.rate_limit_per_second.map(|rate| rate as i32))
        .bind(encrypted_headers(cipher, subscriber.id, &settings.headers)?)
        .bind(settings.format.as_str())
        .bind(settings.is_active)
        .bind(&subscriber.inactive_reason)
        .bind(subscriber.paused_at)
        .bind(subscriber.created_at)
        .bind(subscriber.updated_at)
        .bind(settings.batch.map(|batch| batch.max as i16))
        .bind(settings.batch.map(|batch| batch.wait_ms as i32))
        .bind(settings.verify_endpoint)
        .bind(subscriber.unverified_since)
        .bind(encrypted_auth(cipher, subscriber.id, settings.auth.as_ref())?)
        .execute(db)
        .await
        .map(drop)
}

/// The endpoint has answered the challenge. Returns false, without a change, if the subscriber has another URL by now, or has
/// to be verified again.
pub(crate) async fn set_verified(
    db: &mut PgConnection,
    tenant: &Tenant,
    id: Uuid,
    (url, since): (&str, DateTime<Utc>),
    now: DateTime<Utc>,
) -> sqlx::Result<bool> {
    let query = "update pillarbox_hub.subscriber set unverified_since = null, version = version + 1, updated_at = $5
                 where id = $1 and tenant = $2 and url = $3 and unverified_since = $4";
    let updated = sqlx::query(query).bind(id).bind(tenant.as_str()).bind(url).bind(since).bind(now).execute(db).await?;
    Ok(updated.rows_affected() > 0)
}

/// Deletes a subscriber with its secrets, detached lanes and pending commands. Its messages and attempts remain until
/// they expire.
pub(crate) async fn delete(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_hub.subscriber where id = $1 and tenant = $2")
        .bind(id)
        .bind(tenant.as_str())
        .execute(&mut *db)
        .await?;
    sqlx::query("delete from pillarbox_hub.command where subscriber = $1").bind(id).execute(&mut *db).await?;
    let query = "delete from pillarbox_hub.subscriber_state where subscriber = $1";
    sqlx::query(query).bind(id).execute(&mut *db).await?;
    sqlx::query("delete from pillarbox_hub.lane where subscriber = $1").bind(id).execute(db).await.map(drop)
}

pub(crate) async fn add_secret(
    db: &mut PgConnection,
    cipher: &Cipher,
    subscriber: Uuid,
    secret: &SigningSecret,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query("insert into pillarbox_hub.secret (id, subscriber, sealed, created_at) values ($1, $2, $3, $4)")
        .bind(Uuid::now_v7())
        .bind(subscriber)
        .bind(cipher.encrypt(secret.to_text().as_bytes(), subscriber.as_bytes()))
        .bind(now)
        .execute(db)
        .await
        .map(drop)
}

/// Lets the subscriber's secrets expire at `expires_at` unless they expire earlier, and deletes those that have expired
/// at `now`.
pub(crate) async fn expire_secrets(
    db: &mut PgConnection,
    subscriber: Uuid,
    expires_at: DateTime<Utc>,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query(
        "update pillarbox_hub.secret set expires_at = $2
         where subscriber = $1 and (expires_at is null or expires_at > $2)",
    )
    .bind(subscriber)
    .bind(expires_at)
    .execute(&mut *db)
    .await?;
    sqlx::query("delete from pillarbox_hub.secret where subscriber = $1 and expires_at <= $2")
        .bind(subscriber)
        .bind(now)
        .execute(db)
        .await
        .map(drop)
}

fn encrypted_headers(cipher: &Cipher, id: Uuid, headers: &[(String, String)]) -> sqlx::Result<Option<Vec<u8>>> {
    if headers.is_empty() {
        return Ok(None);
    }
    let plain = serde_json::to_vec(headers).map_err(|error| sqlx::Error::Encode(error.into()))?;
    Ok(Some(cipher.encrypt(&plain, id.as_bytes())))
}

fn encrypted_auth(cipher: &Cipher, id: Uuid, auth: Option<&EndpointAuth>) -> sqlx::Result<Option<Vec<u8>>> {
    let Some(auth) = auth else { return Ok(None) };
    let plain = serde_json::to_vec(auth).map_err(|error| sqlx::Error::Encode(error.into()))?;
    Ok(Some(cipher.encrypt(&plain, id.as_bytes())))
}

/// What is encrypted in the row of a subscriber.
#[derive(Default)]
struct Credentials {
    headers: Vec<(String, String)>,
    auth: Option<EndpointAuth>,
}

/// A subscriber that cannot be decrypted is returned without headers and secrets, so that it can be shown and deleted.
fn stored_subscriber(row: &PgRow, cipher: &Cipher) -> sqlx::Result<StoredSubscriber> {
    let id: Uuid = row.try_get("id")?;
    let decrypted = credentials(row, cipher, id).and_then(|found| Ok((found, secrets(row, cipher, id)?)));
    let (credentials, secrets, undecryptable) = match decrypted {
        Ok((credentials, secrets)) => (credentials, secrets, None),
        Err(error) => (Credentials::default(), Vec::new(), Some(error.to_string())),
    };
    let is_tenant_suspended = row.try_get("is_tenant_suspended")?;
    Ok(StoredSubscriber { subscriber: subscriber(row, credentials)?, secrets, undecryptable, is_tenant_suspended })
}

fn subscriber(row: &PgRow, credentials: Credentials) -> sqlx::Result<Subscriber> {
    Ok(Subscriber {
        id: row.try_get("id")?,
        tenant: tenant(row)?,
        version: row.try_get("version")?,
        settings: settings(row, credentials)?,
        paused_at: row.try_get("paused_at")?,
        unverified_since: row.try_get("unverified_since")?,
        inactive_reason: row.try_get("inactive_reason")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}

fn secrets(row: &PgRow, cipher: &Cipher, id: Uuid) -> sqlx::Result<Vec<(SigningSecret, Option<DateTime<Utc>>)>> {
    let sealed: Vec<Vec<u8>> = row.try_get("sealed")?;
    let expiries: Vec<Option<DateTime<Utc>>> = row.try_get("sealed_until")?;
    let secret = |(sealed, expires_at): (Vec<u8>, _)| {
        let plain = cipher.decrypt(&sealed, id.as_bytes()).map_err(unreadable)?;
        let secret = SigningSecret::parse(&String::from_utf8_lossy(&plain)).map_err(unreadable)?;
        Ok((secret, expires_at))
    };
    sealed.into_iter().zip(expiries).map(secret).collect()
}

fn credentials(row: &PgRow, cipher: &Cipher, id: Uuid) -> sqlx::Result<Credentials> {
    let headers = decrypted(row, "headers", cipher, id)?.unwrap_or_default();
    Ok(Credentials { headers, auth: decrypted(row, "auth", cipher, id)? })
}

fn decrypted<T: serde::de::DeserializeOwned>(
    row: &PgRow,
    column: &str,
    cipher: &Cipher,
    id: Uuid,
) -> sqlx::Result<Option<T>> {
    let Some(sealed) = row.try_get::<Option<Vec<u8>>, _>(column)? else { return Ok(None) };
    let plain = cipher.decrypt(&sealed, id.as_bytes()).map_err(unreadable)?;
    serde_json::from_slice(&plain).map(Some).map_err(unreadable)
}

fn settings(row: &PgRow, Credentials { headers, auth }: Credentials) -> sqlx::Result<SubscriberSettings> {
    let positive = |column| row.try_get::<i32, _>(column).map(i32::unsigned_abs);
    Ok(SubscriberSettings {
        name: row.try_get("name")?,
        url: row.try_get("url")?,
        event_types: event_types(row)?,
        filter: filter(row)?,
        ordering_key: row.try_get("ordering_key")?,
        retry_backoff_seconds: row
            .try_get::<Vec<i32>, _>("retry_backoff_seconds")?
            .into_iter()
            .map(i32::unsigned_abs)
            .collect(),
        retry_rules: row.try_get::<Json<RetryRules>, _>("retry_rules")?.0,
        on_exhausted: OnExhausted::named(row.try_get("on_exhausted")?).ok_or("on_exhausted").map_err(unreadable)?,
        timeout_ms: positive("timeout_ms")?,
        max_in_flight: positive("max_in_flight")?,
        rate_limit_per_second: row.try_get::<Option<i32>, _>("rate_limit_per_second")?.map(i32::unsigned_abs),
        headers,
        auth,
        batch: batch(row)?,
        format: Format::named(row.try_get("format")?).ok_or("format").map_err(unreadable)?,
        verify_endpoint: row.try_get("verify_endpoint")?,
        is_active: row.try_get("is_active")?,
    })
}

fn batch(row: &PgRow) -> sqlx::Result<Option<Batch>> {
    let max = row.try_get::<Option<i16>, _>("batch_max")?.map(|max| u32::from(max.unsigned_abs()));
    let wait_ms = row.try_get::<Option<i32>, _>("batch_wait_ms")?.map(i32::unsigned_abs);
    Ok(max.zip(wait_ms).map(|(max, wait_ms)| Batch { max, wait_ms }))
}
