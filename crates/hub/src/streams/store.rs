//! SQL for streams, their parts and their readers.

pub(crate) mod maintenance;
pub(crate) mod messages;

use chrono::{DateTime, Utc};
use pillarbox::log::Tenant;
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use crate::directory::domain::{EventTypes, Interest};
use crate::directory::store::InterestRow;
use crate::streams::domain::{Assignment, PARTS, Part, Stream};

const COLUMNS: &str = "id, tenant, name, event_types, filter, ordering_key, version, created_at, updated_at";
/// Messages that are counted at most, for each part.
pub(crate) const COUNTED_MAX: i64 = 1_000;

/// A stream whose parts are locked, and the time of the database after that.
pub(crate) struct LockedStream {
    pub(crate) stream: Stream,
    pub(crate) assignment: Assignment,
    /// Messages of events from before this time are dropped.
    pub(crate) dropped_before: Option<DateTime<Utc>>,
    /// While the tenant is suspended, nothing is handed out.
    pub(crate) is_tenant_suspended: bool,
    pub(crate) now: DateTime<Utc>,
}

/// What waits in a part of a stream.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct PartLag {
    pub(crate) part: i16,
    /// At most [`COUNTED_MAX`].
    pub(crate) messages: i64,
    /// When the event of the oldest message was posted. None if nothing waits.
    pub(crate) oldest_at: Option<DateTime<Utc>>,
}

/// Returns the matching rules of all streams.
pub(crate) async fn load_interests(db: &mut PgConnection) -> sqlx::Result<Vec<Interest>> {
    let query =
        "select id as subscriber, true as is_stream, tenant, event_types, filter, ordering_key, true as is_active,
                        created_at as since, null::bigint as backfill
                 from pillarbox_hub.stream";
    let rows: Vec<InterestRow> = sqlx::query_as(query).fetch_all(db).await?;
    Ok(rows.into_iter().map(Interest::from).collect())
}

/// Inserts a stream with its parts. Returns false if the tenant has a stream of this name.
pub(crate) async fn insert(db: &mut PgConnection, new: &Stream) -> sqlx::Result<bool> {
    let statement = "insert into pillarbox_hub.stream
                         (id, tenant, version, event_types, filter, ordering_key, updated_at, name, created_at)
                     values ($1, $2, $3, $4, $5, $6, $7, $8, $9) on conflict (tenant, name) do nothing";
    let inserted = save(statement, new).bind(&new.name).bind(new.created_at).execute(&mut *db).await?;
    if inserted.rows_affected() == 0 {
        return Ok(false);
    }
    // No message of the stream has a number yet, so the first one is above 0.
    let parts = "insert into pillarbox_hub.stream_part (stream, part, acknowledged, handed_out)
                 select $1, part, 0, 0 from generate_series(0, $2 - 1) as slot (part)";
    sqlx::query(parts).bind(new.id).bind(i32::from(PARTS)).execute(db).await?;
    Ok(true)
}

/// Updates the settings and the version.
pub(crate) async fn update(db: &mut PgConnection, changed: &Stream) -> sqlx::Result<()> {
    let statement = "update pillarbox_hub.stream
                     set version = $3, event_types = $4, filter = $5, ordering_key = $6, updated_at = $7
                     where id = $1 and tenant = $2";
    save(statement, changed).execute(db).await.map(drop)
}

fn save<'q>(
    statement: &'static str,
    stream: &'q Stream,
) -> sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments> {
    let settings = &stream.settings;
    sqlx::query(statement)
        .bind(stream.id)
        .bind(stream.tenant.as_str())
        .bind(stream.version)
        .bind(settings.event_types.iter().map(EventTypes::as_str).collect::<Vec<_>>())
        .bind(settings.filter.as_ref().map(Json))
        .bind(&settings.ordering_key)
        .bind(stream.updated_at)
}

/// Deletes a stream with its parts and readers. Its messages remain until their day is dropped.
pub(crate) async fn delete(db: &mut PgConnection, id: Uuid) -> sqlx::Result<()> {
    sqlx::query("delete from pillarbox_hub.stream where id = $1").bind(id).execute(db).await.map(drop)
}

/// Returns the number of streams of a tenant.
pub(crate) async fn count(db: &mut PgConnection, tenant: &Tenant) -> sqlx::Result<i64> {
    let query = "select count(*) from pillarbox_hub.stream where tenant = $1";
    sqlx::query_scalar(query).bind(tenant.as_str()).fetch_one(db).await
}

/// Returns the streams of a tenant in the order of their names, those after `after`.
pub(crate) async fn list(
    db: &mut PgConnection,
    tenant: &Tenant,
    after: Option<String>,
    limit: u32,
) -> sqlx::Result<Vec<Stream>> {
    let query = format!(
        "select {COLUMNS} from pillarbox_hub.stream where tenant = $1 and ($2::text is null or name > $2)
         order by name limit $3"
    );
    let query = sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(after).bind(i64::from(limit));
    query.fetch_all(db).await
}

pub(crate) async fn find(db: &mut PgConnection, tenant: &Tenant, name: &str) -> sqlx::Result<Option<Stream>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.stream where tenant = $1 and name = $2");
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(name).fetch_optional(db).await
}

/// Returns the stream and locks its row until the end of the transaction.
pub(crate) async fn lock_settings(db: &mut PgConnection, tenant: &Tenant, name: &str) -> sqlx::Result<Option<Stream>> {
    let query = format!("select {COLUMNS} from pillarbox_hub.stream where tenant = $1 and name = $2 for no key update");
    sqlx::query_as(sqlx::AssertSqlSafe(query)).bind(tenant.as_str()).bind(name).fetch_optional(db).await
}

/// Returns the stream and locks its parts until the end of the transaction.
pub(crate) async fn lock_parts(
    db: &mut PgConnection,
    tenant: &Tenant,
    name: &str,
) -> sqlx::Result<Option<LockedStream>> {
    let Some(stream) = find(&mut *db, tenant, name).await? else { return Ok(None) };
    let lock = "select part from pillarbox_hub.stream_part where stream = $1 order by part for update";
    // The parts of a stream that was deleted in between are missing.
    if sqlx::query(lock).bind(stream.id).fetch_all(&mut *db).await?.is_empty() {
        return Ok(None);
    }
    load(db, stream).await.map(Some)
}

/// Returns the stream with its parts and readers as they are now, without a lock.
pub(crate) async fn show_parts(
    db: &mut PgConnection,
    tenant: &Tenant,
    name: &str,
) -> sqlx::Result<Option<LockedStream>> {
    match find(&mut *db, tenant, name).await? {
        Some(stream) => load(db, stream).await.map(Some),
        None => Ok(None),
    }
}

/// A part of a stream, with what all its parts share.
#[derive(sqlx::FromRow)]
struct PartRow {
    #[sqlx(flatten)]
    part: Part,
    dropped_before: Option<DateTime<Utc>>,
    generation: i64,
    incarnation: Option<Uuid>,
    now: DateTime<Utc>,
    is_tenant_suspended: bool,
}

/// Separate statements after the lock: one that waits for a lock would read readers and time as of its start.
async fn load(db: &mut PgConnection, stream: Stream) -> sqlx::Result<LockedStream> {
    let query = "select part, acknowledged, handed_out, reader, epoch, generation, dropped_to, dropped_before,
                        clock_timestamp() as now, (select id from pillarbox.incarnation) as incarnation,
                        exists (select from pillarbox.tenant where name = $2 and suspended_at is not null)
                            as is_tenant_suspended
                 from pillarbox_hub.stream_part where stream = $1 order by part";
    let rows: Vec<PartRow> =
        sqlx::query_as(query).bind(stream.id).bind(stream.tenant.as_str()).fetch_all(&mut *db).await?;
    let first = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let PartRow { generation, incarnation, now, is_tenant_suspended, .. } = *first;
    let dropped_before = rows.iter().filter_map(|row| row.dropped_before).max();
    let parts = rows.into_iter().map(|row| row.part).collect();
    let query = "select reader, lease_until from pillarbox_hub.stream_reader where stream = $1 order by reader";
    let readers = sqlx::query_as(query).bind(stream.id).fetch_all(db).await?;
    let assignment = Assignment { parts, readers, generation, incarnation };
    Ok(LockedStream { stream, assignment, dropped_before, is_tenant_suspended, now })
}

/// Saves what has changed between two states of an assignment whose parts are locked.
pub(crate) async fn save_assignment(
    db: &mut PgConnection,
    stream: Uuid,
    before: &Assignment,
    after: &Assignment,
) -> sqlx::Result<()> {
    let changed: Vec<&Part> = if before.generation == after.generation {
        after.parts.iter().filter(|part| !before.parts.contains(part)).collect()
    } else {
        after.parts.iter().collect()
    };
    if !changed.is_empty() {
        sqlx::query(
            "update pillarbox_hub.stream_part
             set acknowledged = changed.acknowledged, handed_out = changed.handed_out, reader = changed.reader,
                 epoch = changed.epoch, dropped_to = changed.dropped_to, generation = $8
             from unnest($2::smallint[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[])
                  as changed (part, acknowledged, handed_out, reader, epoch, dropped_to)
             where stream_part.stream = $1 and stream_part.part = changed.part",
        )
        .bind(stream)
        .bind(changed.iter().map(|part| part.part).collect::<Vec<_>>())
        .bind(changed.iter().map(|part| part.acknowledged).collect::<Vec<_>>())
        .bind(changed.iter().map(|part| part.handed_out).collect::<Vec<_>>())
        .bind(changed.iter().map(|part| part.reader.as_deref()).collect::<Vec<_>>())
        .bind(changed.iter().map(|part| part.epoch).collect::<Vec<_>>())
        .bind(changed.iter().map(|part| part.dropped_to).collect::<Vec<_>>())
        .bind(after.generation)
        .execute(&mut *db)
        .await?;
    }
    save_readers(db, stream, before, after).await
}

async fn save_readers(
    db: &mut PgConnection,
    stream: Uuid,
    before: &Assignment,
    after: &Assignment,
) -> sqlx::Result<()> {
    let is_known = |name: &String| after.readers.iter().any(|reader| reader.name == *name);
    let deleted: Vec<&str> =
        before.readers.iter().map(|reader| &reader.name).filter(|name| !is_known(name)).map(String::as_str).collect();
    if !deleted.is_empty() {
        let query = "delete from pillarbox_hub.stream_reader where stream = $1 and reader = any ($2)";
        sqlx::query(query).bind(stream).bind(deleted).execute(&mut *db).await?;
    }
    for reader in after.readers.iter().filter(|reader| !before.readers.contains(reader)) {
        let query = "insert into pillarbox_hub.stream_reader (stream, reader, lease_until) values ($1, $2, $3)
                     on conflict (stream, reader) do update set lease_until = excluded.lease_until";
        sqlx::query(query).bind(stream).bind(&reader.name).bind(reader.lease_until).execute(&mut *db).await?;
    }
    Ok(())
}

/// Returns what waits in each part of a stream.
pub(crate) async fn lag(db: &mut PgConnection, stream: Uuid) -> sqlx::Result<Vec<PartLag>> {
    sqlx::query_as(
        "select part.part, waiting.messages, waiting.oldest_at from pillarbox_hub.stream_part as part
         cross join lateral (
             select count(*) as messages, min(at) as oldest_at from (
                 select at from pillarbox_hub.stream_message as message
                 where message.stream = part.stream and message.part = part.part and n > part.acknowledged
                 order by n limit $2) as counted
         ) waiting
         where part.stream = $1 order by part.part",
    )
    .bind(stream)
    .bind(COUNTED_MAX)
    .fetch_all(db)
    .await
}
