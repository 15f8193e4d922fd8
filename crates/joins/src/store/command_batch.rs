//! Reads and writes of a command batch, for many events at once. The caller holds the locks of the events.
//!
//! Lookups for each item of a list use `lateral`: a generic plan that was made while the table was small would
//! otherwise scan the whole table.

use contracts::joins::JoinStatus;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use super::{EVENT_COLUMNS, REGISTRATION_COLUMNS, ROW_COUNTS};
use crate::domain::{Ban, Event, EventUpdate, HistoryEntry, Registration, RowCounts};

/// An event whose registrations were counted.
#[derive(sqlx::FromRow)]
pub(crate) struct CountedEvent {
    pub(crate) event_id: Uuid,
    #[sqlx(flatten)]
    pub(crate) counts: RowCounts,
}

/// Inserts a stub for each event that has no row yet. Its version is lower than that of any update.
pub(crate) async fn insert_stubs(tx: &mut PgConnection, updates: &[&EventUpdate]) -> sqlx::Result<()> {
    // Every transaction inserts in the order of the ids, because an insert waits for a concurrent insert of the same
    // id. A common order prevents deadlocks.
    sqlx::query(
        "insert into pillarbox_joins.event_capacity
             (event_id, owner_id, status, capacity, start_time, end_time, event_version)
         select event_id, owner_id, 'draft', 0, start_time, end_time, -1
         from unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::timestamptz[])
              as n (event_id, owner_id, start_time, end_time)
         order by event_id
         on conflict (event_id) do nothing",
    )
    .bind(updates.iter().map(|update| update.event_id).collect::<Vec<_>>())
    .bind(updates.iter().map(|update| update.owner_id).collect::<Vec<_>>())
    .bind(updates.iter().map(|update| update.start_time).collect::<Vec<_>>())
    .bind(updates.iter().map(|update| update.end_time).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

/// Locks the events that have a row, and returns them. Every transaction locks events in the order of their ids, which
/// prevents deadlocks.
pub(crate) async fn lock_events(tx: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<Vec<Event>> {
    let query = format!(
        "select {EVENT_COLUMNS} from pillarbox_joins.event_capacity where event_id = any($1)
         order by event_id for update"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(ids).fetch_all(tx).await
}

/// The registrations of these pairs of event and user.
pub(crate) async fn registrations(tx: &mut PgConnection, of: &[(Uuid, Uuid)]) -> sqlx::Result<Vec<Registration>> {
    let query = format!(
        "select found.* from unnest($1::uuid[], $2::uuid[]) as k (event_id, user_id)
         cross join lateral (
             select {REGISTRATION_COLUMNS} from pillarbox_joins.joins
             where joins.event_id = k.event_id and joins.user_id = k.user_id limit 1) as found"
    );
    let (events, users): (Vec<Uuid>, Vec<Uuid>) = of.iter().copied().unzip();
    sqlx::query_as(AssertSqlSafe(query)).bind(events).bind(users).fetch_all(tx).await
}

/// The bans of these pairs of event and user.
pub(crate) async fn bans(tx: &mut PgConnection, of: &[(Uuid, Uuid)]) -> sqlx::Result<Vec<Ban>> {
    let query = "select found.* from unnest($1::uuid[], $2::uuid[]) as k (event_id, user_id)
                 cross join lateral (
                     select * from pillarbox_joins.event_bans as b
                     where b.event_id = k.event_id and b.user_id = k.user_id limit 1) as found";
    let (events, users): (Vec<Uuid>, Vec<Uuid>) = of.iter().copied().unzip();
    sqlx::query_as(query).bind(events).bind(users).fetch_all(tx).await
}

/// The first waitlisted registrations of each event: pairs of event and maximum number.
pub(crate) async fn waitlist_heads(tx: &mut PgConnection, heads: &[(Uuid, i32)]) -> sqlx::Result<Vec<Registration>> {
    first_registrations(tx, JoinStatus::Waitlisted, heads).await
}

/// The first active registrations of each event: pairs of event and maximum number.
pub(crate) async fn active_heads(tx: &mut PgConnection, heads: &[(Uuid, i32)]) -> sqlx::Result<Vec<Registration>> {
    first_registrations(tx, JoinStatus::Active, heads).await
}

/// The status is a literal, so that every plan uses the partial index of that status.
async fn first_registrations(
    tx: &mut PgConnection,
    status: JoinStatus,
    heads: &[(Uuid, i32)],
) -> sqlx::Result<Vec<Registration>> {
    let query = format!(
        "select found.* from unnest($1::uuid[], $2::int[]) as k (event_id, count)
         cross join lateral (
             select {REGISTRATION_COLUMNS} from pillarbox_joins.joins
             where joins.event_id = k.event_id and joins.status = '{}' order by seq limit k.count) as found
         order by found.event_id, found.seq",
        status.into_str()
    );
    let (events, counts): (Vec<Uuid>, Vec<i32>) = heads.iter().copied().unzip();
    sqlx::query_as(AssertSqlSafe(query)).bind(events).bind(counts).fetch_all(tx).await
}

/// The numbers of active and waitlisted registrations of these events, counted from the rows.
pub(crate) async fn count_rows(tx: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<Vec<CountedEvent>> {
    let query = format!("select e.event_id, {ROW_COUNTS} from unnest($1::uuid[]) as e (event_id)");
    sqlx::query_as(AssertSqlSafe(query)).bind(events).fetch_all(tx).await
}

pub(crate) async fn save_events(tx: &mut PgConnection, events: &[Event]) -> sqlx::Result<()> {
    if events.is_empty() {
        return Ok(());
    }
    let integers = |of: fn(&Event) -> i32| events.iter().map(of).collect::<Vec<_>>();
    let bigints = |of: fn(&Event) -> i64| events.iter().map(of).collect::<Vec<_>>();
    sqlx::query(
        "update pillarbox_joins.event_capacity as e
         set owner_id = n.owner_id, status = n.status, capacity = n.capacity, start_time = n.start_time,
             end_time = n.end_time, event_version = n.event_version, active_count = n.active_count,
             waitlist_count = n.waitlist_count, next_seq = n.next_seq, version = n.version, sweep_at = n.sweep_at,
             update_trace = n.update_trace
         from unnest($1::uuid[], $2::uuid[], $3::text[], $4::int[], $5::timestamptz[], $6::timestamptz[], $7::bigint[],
                     $8::int[], $9::int[], $10::bigint[], $11::bigint[], $12::timestamptz[], $13::text[])
              as n (event_id, owner_id, status, capacity, start_time, end_time, event_version,
                    active_count, waitlist_count, next_seq, version, sweep_at, update_trace)
         where e.event_id = n.event_id",
    )
    .bind(events.iter().map(|event| event.id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.owner_id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.status.into_str()).collect::<Vec<_>>())
    .bind(integers(|event| event.capacity))
    .bind(events.iter().map(|event| event.start_time).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.end_time).collect::<Vec<_>>())
    .bind(bigints(|event| event.event_version))
    .bind(integers(|event| event.counts.active))
    .bind(integers(|event| event.counts.waitlisted))
    .bind(bigints(|event| event.next_seq))
    .bind(bigints(|event| event.counts.version))
    .bind(events.iter().map(|event| event.sweep_at).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.update_trace.map(|trace| trace.to_string())).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

/// Inserts new registrations and updates existing ones.
pub(crate) async fn save_registrations(tx: &mut PgConnection, registrations: &[Registration]) -> sqlx::Result<()> {
    if registrations.is_empty() {
        return Ok(());
    }
    let ids = |of: fn(&Registration) -> Uuid| registrations.iter().map(of).collect::<Vec<_>>();
    sqlx::query(
        "insert into pillarbox_joins.joins
             (id, event_id, user_id, status, seq, created_at, updated_at, canceled_at, activated_at)
         select id, event_id, user_id, status::pillarbox_joins.join_status, seq, created_at, updated_at, canceled_at,
                activated_at
         from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::bigint[], $6::timestamptz[],
                     $7::timestamptz[], $8::timestamptz[], $9::timestamptz[])
              as n (id, event_id, user_id, status, seq, created_at, updated_at, canceled_at, activated_at)
         on conflict (event_id, user_id) do update
         set status = excluded.status, seq = excluded.seq, updated_at = excluded.updated_at,
             canceled_at = excluded.canceled_at, activated_at = excluded.activated_at",
    )
    .bind(ids(|row| row.id))
    .bind(ids(|row| row.event_id))
    .bind(ids(|row| row.user_id))
    .bind(registrations.iter().map(|row| row.status.into_str()).collect::<Vec<_>>())
    .bind(registrations.iter().map(|row| row.seq).collect::<Vec<_>>())
    .bind(registrations.iter().map(|row| row.created_at).collect::<Vec<_>>())
    .bind(registrations.iter().map(|row| row.updated_at).collect::<Vec<_>>())
    .bind(registrations.iter().map(|row| row.canceled_at).collect::<Vec<_>>())
    .bind(registrations.iter().map(|row| row.activated_at).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

pub(crate) async fn save_bans(tx: &mut PgConnection, bans: &[Ban]) -> sqlx::Result<()> {
    if bans.is_empty() {
        return Ok(());
    }
    let ids = |of: fn(&Ban) -> Uuid| bans.iter().map(of).collect::<Vec<_>>();
    sqlx::query(
        "insert into pillarbox_joins.event_bans (id, event_id, user_id, reason, banned_by, expires_at, created_at)
         select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::timestamptz[],
                              $7::timestamptz[])
         on conflict (event_id, user_id) do update
         set reason = excluded.reason, banned_by = excluded.banned_by, expires_at = excluded.expires_at,
             created_at = excluded.created_at",
    )
    .bind(ids(|ban| ban.id))
    .bind(ids(|ban| ban.event_id))
    .bind(ids(|ban| ban.user_id))
    .bind(bans.iter().map(|ban| ban.reason.as_deref()).collect::<Vec<_>>())
    .bind(bans.iter().map(|ban| ban.banned_by.as_str()).collect::<Vec<_>>())
    .bind(bans.iter().map(|ban| ban.expires_at).collect::<Vec<_>>())
    .bind(bans.iter().map(|ban| ban.created_at).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

pub(crate) async fn delete_bans(tx: &mut PgConnection, of: &[(Uuid, Uuid)]) -> sqlx::Result<()> {
    if of.is_empty() {
        return Ok(());
    }
    let query = "delete from pillarbox_joins.event_bans as b
                 using unnest($1::uuid[], $2::uuid[]) as k (event_id, user_id)
                 where b.event_id = k.event_id and b.user_id = k.user_id";
    let (events, users): (Vec<Uuid>, Vec<Uuid>) = of.iter().copied().unzip();
    sqlx::query(query).bind(events).bind(users).execute(tx).await.map(drop)
}

pub(crate) async fn append_history(tx: &mut PgConnection, entries: &[HistoryEntry]) -> sqlx::Result<()> {
    sqlx::query(
        "insert into pillarbox_joins.history
             (event_id, version, user_id, action, seq, from_status, to_status, by, reason, at)
         select event_id, version, user_id, action, seq, from_status::pillarbox_joins.join_status,
                to_status::pillarbox_joins.join_status, by, reason, at
         from unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::bigint[], $6::text[], $7::text[], $8::text[],
                     $9::text[], $10::timestamptz[])
              as n (event_id, version, user_id, action, seq, from_status, to_status, by, reason, at)",
    )
    .bind(entries.iter().map(|entry| entry.event_id).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.counts.version).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.user_id).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.action.into_str()).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.seq).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.from.map(|status| status.into_str())).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.to.map(|status| status.into_str())).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.by.to_string()).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.reason.as_deref()).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.at).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}
