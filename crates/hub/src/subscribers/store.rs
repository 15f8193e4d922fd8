//! SQL for subscribers and their secrets.

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use runtime::secret::Cipher;
use sqlx::types::Json;
use sqlx::{FromRow, PgConnection, Row};
use uuid::Uuid;
use webhook_client::signature::{SigningSecret, active_secrets};

use crate::deliveries::domain::EndpointAuth;
use crate::directory::domain::EventTypes;
use crate::directory::store::unreadable;
use crate::subscribers::domain::Subscriber;

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
        match SubscriberRow::from_row(row).map(|row| row.decrypt(cipher)) {
            Ok(StoredSubscriber { undecryptable: Some(error), .. }) => {
                tracing::error!(%subscriber, error, "cannot decrypt a subscriber, so its messages wait; is `secret_keys_previous` complete?");
            }
            Ok(stored) => readable.push(stored),
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
    sqlx::query_as(sqlx::AssertSqlSafe(query)).fetch_all(db).await
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
    let query = sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str());
    Ok(query.fetch_optional(db).await?.map(|row: SubscriberRow| row.decrypt(cipher)))
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
    before: Option<Uuid>,
    limit: u32,
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
    let rows: Vec<SubscriberRow> = sqlx::query_as(sqlx::AssertSqlSafe(query))
        .bind(tenant.as_str())
        .bind(before)
        .bind(filter.is_active)
        .bind(&filter.event_type)
        .bind(i64::from(limit))
        .bind(&filter.name)
        .fetch_all(db)
        .await?;
    Ok(rows.into_iter().map(|row| row.decrypt(cipher)).collect())
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
    url: &str,
    since: DateTime<Utc>,
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

/// A subscriber as its row has it: its headers, credentials and secrets are encrypted.
#[derive(FromRow)]
struct SubscriberRow {
    #[sqlx(flatten)]
    subscriber: Subscriber,
    headers: Option<Vec<u8>>,
    auth: Option<Vec<u8>>,
    sealed: Vec<Vec<u8>>,
    sealed_until: Vec<Option<DateTime<Utc>>>,
    is_tenant_suspended: bool,
}

/// What is encrypted in the row of a subscriber.
#[derive(Default)]
struct Credentials {
    headers: Vec<(String, String)>,
    auth: Option<EndpointAuth>,
    secrets: Vec<(SigningSecret, Option<DateTime<Utc>>)>,
}

impl SubscriberRow {
    /// A subscriber that cannot be decrypted is returned without headers and secrets, so that it can be shown and deleted.
    fn decrypt(mut self, cipher: &Cipher) -> StoredSubscriber {
        let (Credentials { headers, auth, secrets }, undecryptable) = match self.credentials(cipher) {
            Ok(credentials) => (credentials, None),
            Err(error) => (Credentials::default(), Some(error.to_string())),
        };
        (self.subscriber.settings.headers, self.subscriber.settings.auth) = (headers, auth);
        let SubscriberRow { subscriber, is_tenant_suspended, .. } = self;
        StoredSubscriber { subscriber, secrets, undecryptable, is_tenant_suspended }
    }

    fn credentials(&self, cipher: &Cipher) -> sqlx::Result<Credentials> {
        let plain = |sealed: &[u8]| cipher.decrypt(sealed, self.subscriber.id.as_bytes()).map_err(unreadable);
        let mut found = Credentials::default();
        if let Some(sealed) = &self.headers {
            found.headers = serde_json::from_slice(&plain(sealed)?).map_err(unreadable)?;
        }
        if let Some(sealed) = &self.auth {
            found.auth = serde_json::from_slice(&plain(sealed)?).map_err(unreadable)?;
        }
        for (sealed, expires_at) in self.sealed.iter().zip(&self.sealed_until) {
            let text = plain(sealed)?;
            let secret = SigningSecret::parse(&String::from_utf8_lossy(&text)).map_err(unreadable)?;
            found.secrets.push((secret, *expires_at));
        }
        Ok(found)
    }
}
