use chrono::{DateTime, Utc};
use kit::auth::Tenant;
use kit::secret::Seal;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use crate::domain::{EventTypes, Filter, Format, Interest, OnExhausted, Subscriber, SubscriberSettings};
use crate::signature::{SigningSecret, live};

/// A subscriber and what belongs to it.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) subscriber: Subscriber,
    /// The newest first, each with the time from which nothing is signed with it any more; None: it is in use.
    pub(crate) secrets: Vec<(SigningSecret, Option<DateTime<Utc>>)>,
    /// Why its headers and secrets cannot be opened, and are missing here.
    pub(crate) unopened: Option<String>,
}

impl Known {
    /// What a delivery at this time is signed with.
    pub(crate) fn secrets_at(&self, now: DateTime<Utc>) -> Vec<&SigningSecret> {
        live(&self.secrets, now).collect()
    }
}

/// Which of a tenant's; None is any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Which {
    pub(crate) is_active: Option<bool>,
    /// Those that are sent this type.
    pub(crate) event_type: Option<String>,
}

const COLUMNS: &str = "id, tenant, name, url, event_types, filter, ordering_key, retry_backoff_seconds, retry_statuses,
    on_exhausted, timeout_ms, max_in_flight, rate_limit_per_second, headers, format, is_active, inactive_reason,
    paused_at, version, created_at, updated_at,
    array(select sealed from pillarbox_hub.secret where secret.subscriber = subscriber.id order by secret.id desc) as sealed,
    array(select expires_at from pillarbox_hub.secret where secret.subscriber = subscriber.id
          order by secret.id desc) as sealed_until";

/// Grows with each change to any subscriber or secret. Read it before them: what changes in between is read again.
pub(crate) async fn version(db: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("select version from pillarbox_hub.directory").fetch_one(db).await
}

/// What everyone is sent. Nothing that is sealed is opened for it: one that cannot be is sent to later, but gets its messages.
pub(crate) async fn interests(db: &mut PgConnection) -> sqlx::Result<Vec<Interest>> {
    let query = "select id, tenant, event_types, filter, ordering_key, is_active, created_at from pillarbox_hub.subscriber order by id";
    let rows = sqlx::query(query).fetch_all(db).await?;
    let interest = |row: &PgRow| {
        Ok(Interest {
            subscriber: row.try_get("id")?,
            tenant: tenant(row)?,
            event_types: event_types(row)?,
            filter: filter(row)?,
            ordering_key: row.try_get("ordering_key")?,
            is_active: row.try_get("is_active")?,
            since: row.try_get("created_at")?,
        })
    };
    rows.iter().map(interest).collect()
}

/// Those of these shards. One that cannot be read keeps nobody else from being sent to: it is left out, and told of.
pub(crate) async fn of_shards(db: &mut PgConnection, seal: &Seal, shards: &[i16]) -> sqlx::Result<Vec<Known>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.subscriber where shard = any($1) order by id");
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).bind(shards).fetch_all(db).await?;
    let mut readable = Vec::with_capacity(rows.len());
    for row in &rows {
        let subscriber: Uuid = row.try_get("id")?;
        match known(row, seal).map(|known| (known.unopened.clone(), known)) {
            Ok((None, known)) => readable.push(known),
            Ok((Some(error), _)) => {
                tracing::error!(%subscriber, error, "a subscriber cannot be opened, so its messages wait; is `secret_keys_previous` complete?");
            }
            Err(error) => {
                tracing::error!(%subscriber, %error, "a subscriber cannot be read, so its messages wait");
            }
        }
    }
    Ok(readable)
}

/// Everyone, with nothing that is sealed.
pub(crate) async fn all(db: &mut PgConnection) -> sqlx::Result<Vec<Subscriber>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.subscriber order by id");
    let rows = sqlx::query(sqlx::AssertSqlSafe(query)).fetch_all(db).await?;
    rows.iter().map(|row| subscriber(row, Vec::new())).collect()
}

/// How many a tenant has.
pub(crate) async fn count(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<i64> {
    let query = "select count(*) from pillarbox_hub.subscriber where tenant = $1";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_one(db).await
}

pub(crate) async fn find(db: &mut PgConnection, seal: &Seal, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<Known>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.subscriber where id = $1 and tenant = $2");
    let row = sqlx::query(sqlx::AssertSqlSafe(query)).bind(id).bind(tenant.as_str()).fetch_optional(db).await?;
    row.map(|row| known(&row, seal)).transpose()
}

/// Who changes it next waits for this transaction.
pub(crate) async fn lock(db: &mut PgConnection, seal: &Seal, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<Known>> {
    // First the lock, then the look: a statement sees the secrets as they were when it began, before it waited.
    match lock_version(db, tenant, id).await? {
        Some(_) => find(db, seal, tenant, id).await,
        None => Ok(None),
    }
}

/// The same for who needs to know nothing but its version.
pub(crate) async fn lock_version(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar("select version from pillarbox_hub.subscriber where id = $1 and tenant = $2 for update")
        .bind(id)
        .bind(tenant.as_str())
        .fetch_optional(db)
        .await
}

/// Whether this tenant has it.
pub(crate) async fn exists(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<bool> {
    sqlx::query_scalar("select exists (select from pillarbox_hub.subscriber where id = $1 and tenant = $2)")
        .bind(id)
        .bind(tenant.as_str())
        .fetch_one(db)
        .await
}

/// Newest first, behind `before`.
pub(crate) async fn list(
    db: &mut PgConnection,
    seal: &Seal,
    tenant: &Tenant,
    which: &Which,
    (before, limit): (Option<Uuid>, u32),
) -> sqlx::Result<Vec<Known>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.subscriber
         where tenant = $1 and ($2::uuid is null or id < $2) and ($3::boolean is null or is_active = $3)
           and ($4::text is null or exists (
               select from unnest(event_types) as pattern
               where case when right(pattern, 1) = '*'
                   then starts_with($4, left(pattern, -1)) and length($4) >= length(pattern)
                   else pattern = $4 end))
         order by id desc limit $5"
    );
    let rows = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(tenant.as_str())
        .bind(before)
        .bind(which.is_active)
        .bind(&which.event_type)
        .bind(i64::from(limit))
        .fetch_all(db)
        .await?;
    rows.iter().map(|row| known(row, seal)).collect()
}

/// Its shard follows from its tenant and its id, as that of a message with its id as key does.
pub(crate) async fn insert(db: &mut PgConnection, seal: &Seal, new: &Subscriber) -> sqlx::Result<()> {
    save(
        db,
        seal,
        new,
        "insert into pillarbox_hub.subscriber
             (id, tenant, version, name, url, event_types, filter, ordering_key, retry_backoff_seconds, retry_statuses,
              on_exhausted, timeout_ms, max_in_flight, rate_limit_per_second, headers, format, is_active,
              inactive_reason, paused_at, created_at, updated_at, shard)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
              pillarbox.shard_of($2, $1::text))",
    )
    .await
}

/// All of it, its version as given.
pub(crate) async fn update(db: &mut PgConnection, seal: &Seal, changed: &Subscriber) -> sqlx::Result<()> {
    save(
        db,
        seal,
        changed,
        "update pillarbox_hub.subscriber
         set version = $3, name = $4, url = $5, event_types = $6, filter = $7, ordering_key = $8,
             retry_backoff_seconds = $9, retry_statuses = $10, on_exhausted = $11, timeout_ms = $12,
             max_in_flight = $13, rate_limit_per_second = $14, headers = $15, format = $16, is_active = $17,
             inactive_reason = $18, paused_at = $19, created_at = $20, updated_at = $21
         where id = $1 and tenant = $2",
    )
    .await
}

async fn save(
    db: &mut PgConnection,
    seal: &Seal,
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
        .bind(settings.retry_statuses.iter().map(|status| *status as i16).collect::<Vec<_>>())
        .bind(settings.on_exhausted.as_str())
        .bind(settings.timeout_ms as i32)
        .bind(settings.max_in_flight as i32)
        .bind(settings.rate_limit_per_second.map(|rate| rate as i32))
        .bind(sealed_headers(seal, subscriber.id, &settings.headers)?)
        .bind(settings.format.as_str())
        .bind(settings.is_active)
        .bind(&subscriber.inactive_reason)
        .bind(subscriber.paused_at)
        .bind(subscriber.created_at)
        .bind(subscriber.updated_at)
        .execute(db)
        .await
        .map(drop)
}

/// Its secrets, the lanes that wait and what was to be done with its messages go with it; what was sent stays known until it is forgotten by age.
pub(crate) async fn delete(db: &mut PgConnection, tenant: &Tenant, id: Uuid) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_hub.subscriber where id = $1 and tenant = $2")
        .bind(id)
        .bind(tenant.as_str())
        .execute(&mut *db)
        .await?;
    sqlx::query("delete from pillarbox_hub.command where subscriber = $1").bind(id).execute(&mut *db).await?;
    sqlx::query("delete from pillarbox_hub.lane where subscriber = $1").bind(id).execute(db).await.map(drop)
}

pub(crate) async fn add_secret(
    db: &mut PgConnection,
    seal: &Seal,
    subscriber: Uuid,
    secret: &SigningSecret,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query("insert into pillarbox_hub.secret (id, subscriber, sealed, created_at) values ($1, $2, $3, $4)")
        .bind(Uuid::now_v7())
        .bind(subscriber)
        .bind(seal.seal(secret.to_text().as_bytes(), subscriber.as_bytes()))
        .bind(now)
        .execute(db)
        .await
        .map(drop)
}

/// Those that it has end then, or earlier if they were to; those that have ended at `now` are forgotten.
pub(crate) async fn end_secrets(
    db: &mut PgConnection,
    subscriber: Uuid,
    at: DateTime<Utc>,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    sqlx::query(
        "update pillarbox_hub.secret set expires_at = $2
         where subscriber = $1 and (expires_at is null or expires_at > $2)",
    )
    .bind(subscriber)
    .bind(at)
    .execute(&mut *db)
    .await?;
    sqlx::query("delete from pillarbox_hub.secret where subscriber = $1 and expires_at <= $2")
        .bind(subscriber)
        .bind(now)
        .execute(db)
        .await
        .map(drop)
}

fn sealed_headers(seal: &Seal, id: Uuid, headers: &[(String, String)]) -> sqlx::Result<Option<Vec<u8>>> {
    if headers.is_empty() {
        return Ok(None);
    }
    let plain = serde_json::to_vec(headers).map_err(|error| sqlx::Error::Encode(error.into()))?;
    Ok(Some(seal.seal(&plain, id.as_bytes())))
}

/// One that cannot be opened is known all the same, and can be seen and deleted.
fn known(row: &PgRow, seal: &Seal) -> sqlx::Result<Known> {
    let id: Uuid = row.try_get("id")?;
    let opened = headers(row, seal, id).and_then(|headers| Ok((headers, secrets(row, seal, id)?)));
    let (headers, secrets, unopened) = match opened {
        Ok((headers, secrets)) => (headers, secrets, None),
        Err(error) => (Vec::new(), Vec::new(), Some(error.to_string())),
    };
    Ok(Known { subscriber: subscriber(row, headers)?, secrets, unopened })
}

fn subscriber(row: &PgRow, headers: Vec<(String, String)>) -> sqlx::Result<Subscriber> {
    Ok(Subscriber {
        id: row.try_get("id")?,
        tenant: tenant(row)?,
        version: row.try_get("version")?,
        settings: settings(row, headers)?,
        paused_at: row.try_get("paused_at")?,
        inactive_reason: row.try_get("inactive_reason")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}

fn secrets(row: &PgRow, seal: &Seal, id: Uuid) -> sqlx::Result<Vec<(SigningSecret, Option<DateTime<Utc>>)>> {
    let sealed: Vec<Vec<u8>> = row.try_get("sealed")?;
    let ends: Vec<Option<DateTime<Utc>>> = row.try_get("sealed_until")?;
    let secret = |(sealed, expires_at): (Vec<u8>, _)| {
        let plain = seal.open(&sealed, id.as_bytes()).map_err(unreadable)?;
        let secret = SigningSecret::parse(&String::from_utf8_lossy(&plain)).map_err(unreadable)?;
        Ok((secret, expires_at))
    };
    sealed.into_iter().zip(ends).map(secret).collect()
}

fn headers(row: &PgRow, seal: &Seal, id: Uuid) -> sqlx::Result<Vec<(String, String)>> {
    match row.try_get::<Option<Vec<u8>>, _>("headers")? {
        Some(sealed) => {
            let plain = seal.open(&sealed, id.as_bytes()).map_err(unreadable)?;
            serde_json::from_slice(&plain).map_err(unreadable)
        }
        None => Ok(Vec::new()),
    }
}

fn settings(row: &PgRow, headers: Vec<(String, String)>) -> sqlx::Result<SubscriberSettings> {
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
        retry_statuses: row.try_get::<Vec<i16>, _>("retry_statuses")?.into_iter().map(i16::unsigned_abs).collect(),
        on_exhausted: OnExhausted::named(row.try_get("on_exhausted")?).ok_or("on_exhausted").map_err(unreadable)?,
        timeout_ms: positive("timeout_ms")?,
        max_in_flight: positive("max_in_flight")?,
        rate_limit_per_second: row.try_get::<Option<i32>, _>("rate_limit_per_second")?.map(i32::unsigned_abs),
        headers,
        format: Format::named(row.try_get("format")?).ok_or("format").map_err(unreadable)?,
        is_active: row.try_get("is_active")?,
    })
}

fn tenant(row: &PgRow) -> sqlx::Result<Tenant> {
    row.try_get::<&str, _>("tenant")?.parse().map_err(unreadable)
}

fn event_types(row: &PgRow) -> sqlx::Result<Vec<EventTypes>> {
    let event_types: Vec<String> = row.try_get("event_types")?;
    event_types.into_iter().map(EventTypes::try_from).collect::<Result<_, _>>().map_err(unreadable)
}

fn filter(row: &PgRow) -> sqlx::Result<Option<Filter>> {
    Ok(row.try_get::<Option<Json<Filter>>, _>("filter")?.map(|Json(filter)| filter))
}

/// A row that this version did not write, or a seal of another secret key.
fn unreadable(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> sqlx::Error {
    sqlx::Error::Decode(error.into())
}
