//! SQL of events, their participants, and the messages that wait for an event.

use std::collections::{HashMap, HashSet};

use chrono::{DateTime, TimeDelta, Utc};
use contracts::joins::JoinChanged;
use pillarbox::database::try_work_lock;
use pillarbox::log::Message;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::participants::{JoinableEvent, Registration};

/// How long events are locked.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lock {
    /// No other transaction changes them until the end of this one.
    Share,
    /// Nor does another transaction lock them.
    Update,
}

/// Finds and locks events, in the order of their ids.
pub(crate) async fn lock_events(
    db: &mut PgConnection,
    ids: &[Uuid],
    lock: Lock,
) -> sqlx::Result<HashMap<Uuid, JoinableEvent>> {
    let query = match lock {
        Lock::Share => {
            "select * from pillarbox_notify.joinable_event where event_id = any($1) order by event_id for share"
        }
        Lock::Update => {
            "select * from pillarbox_notify.joinable_event where event_id = any($1) order by event_id for update"
        }
    };
    let events: Vec<JoinableEvent> = sqlx::query_as(query).bind(ids).fetch_all(db).await?;
    Ok(events.into_iter().map(|event| (event.event_id, event)).collect())
}

pub(crate) async fn find_event(db: &mut PgConnection, id: Uuid) -> sqlx::Result<Option<JoinableEvent>> {
    let query = "select * from pillarbox_notify.joinable_event where event_id = $1";
    sqlx::query_as(query).bind(id).fetch_optional(db).await
}

/// Saves events, in the order of their ids.
pub(crate) async fn save_events(db: &mut PgConnection, events: &[&JoinableEvent]) -> sqlx::Result<()> {
    sqlx::query(
        "insert into pillarbox_notify.joinable_event as known
             (event_id, version, status, title, city, start_time, end_time, time_zone, canceled_by, reason, owner_id)
         select * from unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::timestamptz[],
             $7::timestamptz[], $8::text[], $9::uuid[], $10::text[], $11::uuid[])
             as new (event_id, version, status, title, city, start_time, end_time, time_zone, canceled_by, reason, owner_id)
         order by event_id
         on conflict (event_id) do update set version = excluded.version, status = excluded.status,
             title = excluded.title, city = excluded.city, start_time = excluded.start_time,
             end_time = excluded.end_time, time_zone = excluded.time_zone, canceled_by = excluded.canceled_by,
             reason = excluded.reason, owner_id = excluded.owner_id
         where known.version < excluded.version",
    )
    .bind(events.iter().map(|event| event.event_id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.version).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.status.into_str()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.title.as_str()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.city.as_str()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.start_time).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.end_time).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.time_zone.as_str()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.canceled_by).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.reason.as_deref()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.owner_id).collect::<Vec<_>>())
    .execute(db)
    .await
    .map(drop)
}

/// Saves who takes part in events, and who does not any more, unless a newer state is known. Each pair of event and user occurs
/// once. Deleted users are skipped.
pub(crate) async fn save_participants(db: &mut PgConnection, participants: &[Registration]) -> sqlx::Result<()> {
    let query = "insert into pillarbox_notify.participant as known (event_id, user_id, status, version)
                 select * from unnest($1::uuid[], $2::uuid[], $3::text[], $4::bigint[])
                     as new (event_id, user_id, status, version)
                 where not exists (select from pillarbox_notify.deleted_account deleted where deleted.user_id = new.user_id)
                 order by event_id, user_id
                 on conflict (event_id, user_id) do update set status = excluded.status, version = excluded.version
                 where known.version <= excluded.version";
    sqlx::query(query)
        .bind(participants.iter().map(|one| one.event_id).collect::<Vec<_>>())
        .bind(participants.iter().map(|one| one.user_id).collect::<Vec<_>>())
        .bind(participants.iter().map(|one| one.status.into_str()).collect::<Vec<_>>())
        .bind(participants.iter().map(|one| one.version).collect::<Vec<_>>())
        .execute(db)
        .await
        .map(drop)
}

/// The time since which posted messages become notifications.
pub(crate) async fn facts_since(db: &mut PgConnection) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar("select max(at) from pillarbox_notify.facts_since").fetch_one(db).await
}

/// A message about a registration whose text waits for the message about the event.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct WaitingRegistration {
    pub(crate) message_id: Uuid,
    pub(crate) topic: String,
    /// The payload of the message.
    pub(crate) payload: String,
    /// Whether it has waited for as long as it may.
    pub(crate) is_over: bool,
}

/// Makes messages wait, in their order.
pub(crate) async fn wait_for_events(
    db: &mut PgConnection,
    waiting: &[(&Message, &JoinChanged)],
    pause: TimeDelta,
) -> sqlx::Result<()> {
    let query = "insert into pillarbox_notify.waiting_registration
                     (message_id, event_id, user_id, topic, payload, due_at, created_at)
                 select message_id, event_id, user_id, topic, payload::json, statement_timestamp() + $6, statement_timestamp()
                 from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::text[]) with ordinality
                     as new (message_id, event_id, user_id, topic, payload, n)
                 where not exists (select from pillarbox_notify.deleted_account deleted where deleted.user_id = new.user_id)
                 order by n on conflict do nothing";
    sqlx::query(query)
        .bind(waiting.iter().map(|(message, _)| message.message_id).collect::<Vec<_>>())
        .bind(waiting.iter().map(|(_, change)| change.event_id).collect::<Vec<_>>())
        .bind(waiting.iter().map(|(_, change)| change.user_id).collect::<Vec<_>>())
        .bind(waiting.iter().map(|(message, _)| message.topic.as_str()).collect::<Vec<_>>())
        .bind(waiting.iter().map(|(message, _)| message.payload.get()).collect::<Vec<_>>())
        .bind(pause)
        .execute(db)
        .await
        .map(drop)
}

/// The pairs of event and user with messages that wait, of these events.
pub(crate) async fn waiting_users(db: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<HashSet<(Uuid, Uuid)>> {
    let query = "select event_id, user_id from pillarbox_notify.waiting_registration where event_id = any($1)";
    let waiting: Vec<(Uuid, Uuid)> = sqlx::query_as(query).bind(events).fetch_all(db).await?;
    Ok(waiting.into_iter().collect())
}

/// Ends the wait for these events: the messages are due at once.
pub(crate) async fn end_wait(db: &mut PgConnection, events: &[Uuid]) -> sqlx::Result<()> {
    let query =
        "update pillarbox_notify.waiting_registration set due_at = statement_timestamp() where event_id = any($1)";
    sqlx::query(query).bind(events).execute(db).await.map(drop)
}

/// Makes this process the only one that works on waiting messages, until the end of the transaction. Returns false if another
/// one does.
pub(crate) async fn lock_waiting(db: &mut PgConnection) -> sqlx::Result<bool> {
    try_work_lock(db, "notify.waiting_registrations").await
}

/// The messages that are due, in their order. `time_max`: how long a message may wait.
pub(crate) async fn due_registrations(
    db: &mut PgConnection,
    time_max: TimeDelta,
    limit: i64,
) -> sqlx::Result<Vec<WaitingRegistration>> {
    let query = "select message_id, topic, payload::text as payload,
                        created_at <= statement_timestamp() - $1 as is_over
                 from (select * from pillarbox_notify.waiting_registration where due_at <= statement_timestamp()
                       order by due_at, id limit $2) due
                 order by id";
    sqlx::query_as(query).bind(time_max).bind(limit).fetch_all(db).await
}

/// Deletes messages that wait no longer.
pub(crate) async fn delete_waiting(db: &mut PgConnection, messages: &[Uuid]) -> sqlx::Result<()> {
    let query = "delete from pillarbox_notify.waiting_registration where message_id = any($1)";
    sqlx::query(query).bind(messages).execute(db).await.map(drop)
}

/// Makes messages wait for longer.
pub(crate) async fn postpone(db: &mut PgConnection, messages: &[Uuid], pause: TimeDelta) -> sqlx::Result<()> {
    let query = "update pillarbox_notify.waiting_registration set due_at = statement_timestamp() + $2
                 where message_id = any($1)";
    sqlx::query(query).bind(messages).bind(pause).execute(db).await.map(drop)
}

/// Deletes events that have ended longer ago than `age`, and before them their participants, up to `limit` of each. Returns how
/// many rows of the more frequent kind.
pub(crate) async fn delete_ended(db: &mut PgConnection, age: TimeDelta, limit: i64) -> sqlx::Result<u64> {
    let participants = "delete from pillarbox_notify.participant where (event_id, user_id) in (
                            select event_id, user_id from pillarbox_notify.joinable_event
                            join pillarbox_notify.participant using (event_id)
                            where end_time < statement_timestamp() - $1 limit $2
                        )";
    let participants = sqlx::query(participants).bind(age).bind(limit).execute(&mut *db).await?.rows_affected();
    let events = "delete from pillarbox_notify.joinable_event where event_id in (
                      select event_id from pillarbox_notify.joinable_event ended
                      where end_time < statement_timestamp() - $1 and not exists (
                          select from pillarbox_notify.participant where participant.event_id = ended.event_id)
                      order by end_time limit $2
                  )";
    let events = sqlx::query(events).bind(age).bind(limit).execute(db).await?.rows_affected();
    Ok(participants.max(events))
}

/// Returns up to `limit` events that have participants, with ids above `after` and below `before`, by their ids.
pub(crate) async fn events_with_participants(
    db: &mut PgConnection,
    after: Uuid,
    before: Uuid,
    limit: i64,
) -> sqlx::Result<Vec<Uuid>> {
    // One row of each event, by the primary key: the cost does not depend on how many participants an event has.
    let query = "with recursive one (event_id, n) as (
                     (select event_id, 1::bigint from pillarbox_notify.participant
                      where event_id > $1 and event_id < $2 order by event_id limit 1)
                     union all
                     select next.event_id, one.n + 1 from one cross join lateral (
                         select event_id from pillarbox_notify.participant
                         where participant.event_id > one.event_id and participant.event_id < $2
                         order by participant.event_id limit 1
                     ) next where one.n < $3
                 )
                 select event_id from one order by event_id";
    sqlx::query_scalar(query).bind(after).bind(before).bind(limit).fetch_all(db).await
}

/// Deletes up to `limit` participants of those of the events that are not known, and that no message waits for. Returns how many.
/// None are deleted until notifications have existed for `age`: the messages about events may be older than those about
/// registrations.
pub(crate) async fn delete_of_unknown(
    db: &mut PgConnection,
    events: &[Uuid],
    age: TimeDelta,
    limit: i64,
) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_notify.participant where (event_id, user_id) in (
                     select event_id, user_id from pillarbox_notify.participant one
                     where event_id = any($1)
                         and not exists (select from pillarbox_notify.joinable_event known
                                         where known.event_id = one.event_id)
                         and not exists (select from pillarbox_notify.waiting_registration waiting
                                         where waiting.event_id = one.event_id)
                         and (select max(at) from pillarbox_notify.facts_since) < statement_timestamp() - $2
                     limit $3
                 )";
    Ok(sqlx::query(query).bind(events).bind(age).bind(limit).execute(db).await?.rows_affected())
}
