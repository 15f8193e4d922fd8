//! Events and their joins, many at a time: read under the events' locks, and written.
//!
//! What is looked up for each of a list is looked up by `lateral`: a plan that was made while a table was small would read all
//! of it otherwise.

use contracts::joins::JoinStatus;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

use super::{ENTRY_COLUMNS, EVENT_COLUMNS, ban_of, entry_of, event_of};
use crate::domain::{Ban, Entry, Event, Line, News};

/// A row for each event that has none, older than any news of it.
pub(crate) async fn plant(tx: &mut PgConnection, news: &[&News]) -> sqlx::Result<()> {
    // In one order everywhere: inserting waits for who inserts the same.
    sqlx::query(
        "insert into pillarbox_joins.event_capacity
             (event_id, owner_id, status, capacity, start_time, end_time, event_version)
         select event_id, owner_id, 'draft', 0, start_time, end_time, -1
         from unnest($1::uuid[], $2::uuid[], $3::timestamptz[], $4::timestamptz[])
              as n (event_id, owner_id, start_time, end_time)
         order by event_id
         on conflict (event_id) do nothing",
    )
    .bind(news.iter().map(|news| news.event_id).collect::<Vec<_>>())
    .bind(news.iter().map(|news| news.owner_id).collect::<Vec<_>>())
    .bind(news.iter().map(|news| news.start_time).collect::<Vec<_>>())
    .bind(news.iter().map(|news| news.end_time).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

/// Those that there are, locked in the order of their ids: whoever locks several does it in this order, so nobody waits
/// in a circle.
pub(crate) async fn lock(tx: &mut PgConnection, ids: &[Uuid]) -> sqlx::Result<Vec<Event>> {
    let query = format!(
        "select {EVENT_COLUMNS} from pillarbox_joins.event_capacity where event_id = any($1)
         order by event_id for update"
    );
    let rows = sqlx::query(AssertSqlSafe(query)).bind(ids).fetch_all(tx).await?;
    rows.iter().map(event_of).collect()
}

/// By event and user.
pub(crate) async fn entries(tx: &mut PgConnection, of: &[(Uuid, Uuid)]) -> sqlx::Result<Vec<Entry>> {
    let query = format!(
        "select found.* from unnest($1::uuid[], $2::uuid[]) as k (event_id, user_id)
         cross join lateral (
             select {ENTRY_COLUMNS} from pillarbox_joins.joins
             where joins.event_id = k.event_id and joins.user_id = k.user_id limit 1) as found"
    );
    let rows = pairs(AssertSqlSafe(query), of).fetch_all(tx).await?;
    rows.iter().map(entry_of).collect()
}

/// By event and user.
pub(crate) async fn bans(tx: &mut PgConnection, of: &[(Uuid, Uuid)]) -> sqlx::Result<Vec<Ban>> {
    let query = "select found.* from unnest($1::uuid[], $2::uuid[]) as k (event_id, user_id)
                 cross join lateral (
                     select * from pillarbox_joins.event_bans as b
                     where b.event_id = k.event_id and b.user_id = k.user_id limit 1) as found";
    let rows = pairs(query, of).fetch_all(tx).await?;
    rows.iter().map(ban_of).collect()
}

/// The first of each event's waitlist: event, and how many.
pub(crate) async fn waiting(tx: &mut PgConnection, heads: &[(Uuid, i32)]) -> sqlx::Result<Vec<Entry>> {
    firsts(tx, "waitlisted", heads).await
}

/// The first of each event's participants.
pub(crate) async fn seated(tx: &mut PgConnection, heads: &[(Uuid, i32)]) -> sqlx::Result<Vec<Entry>> {
    firsts(tx, "active", heads).await
}

/// `status` is in the text, so that the index of that status is used whatever the plan.
async fn firsts(tx: &mut PgConnection, status: &str, heads: &[(Uuid, i32)]) -> sqlx::Result<Vec<Entry>> {
    let query = format!(
        "select found.* from unnest($1::uuid[], $2::int[]) as k (event_id, count)
         cross join lateral (
             select {ENTRY_COLUMNS} from pillarbox_joins.joins
             where joins.event_id = k.event_id and joins.status = '{status}' order by seq limit k.count) as found
         order by found.event_id, found.seq"
    );
    let rows = sqlx::query(AssertSqlSafe(query))
        .bind(heads.iter().map(|(event, _)| *event).collect::<Vec<_>>())
        .bind(heads.iter().map(|(_, count)| *count).collect::<Vec<_>>())
        .fetch_all(tx)
        .await?;
    rows.iter().map(entry_of).collect()
}

/// Active and waitlisted of these events, by the rows.
pub(crate) async fn counted(tx: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<Vec<(Uuid, i32, i32)>> {
    let rows = sqlx::query(
        "select k.event_id,
                (select count(*) from pillarbox_joins.joins as j
                 where j.event_id = k.event_id and j.status = 'active')::int as active,
                (select count(*) from pillarbox_joins.joins as j
                 where j.event_id = k.event_id and j.status = 'waitlisted')::int as waitlisted
         from unnest($1::uuid[]) as k (event_id)",
    )
    .bind(events)
    .fetch_all(tx)
    .await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))).collect()
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
             news_trace = n.news_trace
         from unnest($1::uuid[], $2::uuid[], $3::text[], $4::int[], $5::timestamptz[], $6::timestamptz[], $7::bigint[],
                     $8::int[], $9::int[], $10::bigint[], $11::bigint[], $12::timestamptz[], $13::text[])
              as n (event_id, owner_id, status, capacity, start_time, end_time, event_version,
                    active_count, waitlist_count, next_seq, version, sweep_at, news_trace)
         where e.event_id = n.event_id",
    )
    .bind(events.iter().map(|event| event.id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.owner_id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.status.as_str()).collect::<Vec<_>>())
    .bind(integers(|event| event.capacity))
    .bind(events.iter().map(|event| event.start_time).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.end_time).collect::<Vec<_>>())
    .bind(bigints(|event| event.event_version))
    .bind(integers(|event| event.counts.active))
    .bind(integers(|event| event.counts.waitlisted))
    .bind(bigints(|event| event.next_seq))
    .bind(bigints(|event| event.counts.version))
    .bind(events.iter().map(|event| event.sweep_at).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.news_trace.map(|trace| trace.to_string())).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

/// New ones, and those that changed.
pub(crate) async fn save_entries(tx: &mut PgConnection, entries: &[Entry]) -> sqlx::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let ids = |of: fn(&Entry) -> Uuid| entries.iter().map(of).collect::<Vec<_>>();
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
    .bind(ids(|entry| entry.id))
    .bind(ids(|entry| entry.event_id))
    .bind(ids(|entry| entry.user_id))
    .bind(entries.iter().map(|entry| entry.status.as_str()).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.seq).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.created_at).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.updated_at).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.canceled_at).collect::<Vec<_>>())
    .bind(entries.iter().map(|entry| entry.activated_at).collect::<Vec<_>>())
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

pub(crate) async fn end_bans(tx: &mut PgConnection, of: &[(Uuid, Uuid)]) -> sqlx::Result<()> {
    if of.is_empty() {
        return Ok(());
    }
    let query = "delete from pillarbox_joins.event_bans as b
                 using unnest($1::uuid[], $2::uuid[]) as k (event_id, user_id)
                 where b.event_id = k.event_id and b.user_id = k.user_id";
    pairs(query, of).execute(tx).await.map(drop)
}

pub(crate) async fn append_history(tx: &mut PgConnection, lines: &[Line]) -> sqlx::Result<()> {
    sqlx::query(
        "insert into pillarbox_joins.history
             (event_id, version, user_id, action, seq, from_status, to_status, by, reason, at)
         select event_id, version, user_id, action, seq, from_status::pillarbox_joins.join_status,
                to_status::pillarbox_joins.join_status, by, reason, at
         from unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::bigint[], $6::text[], $7::text[], $8::text[],
                     $9::text[], $10::timestamptz[])
              as n (event_id, version, user_id, action, seq, from_status, to_status, by, reason, at)",
    )
    .bind(lines.iter().map(|line| line.event_id).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.counts.version).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.user_id).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.action.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.seq).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.from.map(JoinStatus::as_str)).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.to.map(JoinStatus::as_str)).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.by.to_string()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.reason.as_deref()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.at).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}

fn pairs<'q>(
    query: impl sqlx::SqlSafeStr,
    of: &[(Uuid, Uuid)],
) -> sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments> {
    sqlx::query(query)
        .bind(of.iter().map(|(event, _)| *event).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, user)| *user).collect::<Vec<_>>())
}
