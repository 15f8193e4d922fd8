//! Notifications: what decides about them, and how they are recorded. Every statement is for a whole batch.

use std::collections::{BTreeMap, HashMap, HashSet};

use chrono::{DateTime, Utc};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::domain::business_event::{BusinessEvent, NewNotification};

/// The users behind some aggregates of a type.
#[derive(Debug, Default)]
pub(crate) struct Recipients {
    pub(crate) of_aggregate: HashMap<i64, Vec<Uuid>>,
    /// Those of every aggregate of the type.
    pub(crate) of_all: Vec<Uuid>,
}

/// Finds the users behind aggregates, at most `limit` for each, and at most `limit` for all of them.
pub(crate) async fn recipients(
    db: &mut PgConnection,
    aggregate_type: &str,
    aggregate_ids: &[i64],
    limit: usize,
) -> sqlx::Result<Recipients> {
    let query = "select one.aggregate_id, found.user_id from unnest($2::bigint[]) as one (aggregate_id)
                 cross join lateral (
                     select user_id from pillarbox_notify.recipient
                     where aggregate_type = $1 and recipient.aggregate_id = one.aggregate_id limit $3
                 ) found
                 union all
                 (select null, user_id from pillarbox_notify.recipient
                  where aggregate_type = $1 and aggregate_id is null limit $3)";
    let mut found = Recipients::default();
    let query = sqlx::query_as(query).bind(aggregate_type).bind(aggregate_ids).bind(limit as i64);
    let recipients: Vec<(Option<i64>, Uuid)> = query.fetch_all(db).await?;
    for (aggregate, user) in recipients {
        match aggregate {
            Some(aggregate) => found.of_aggregate.entry(aggregate).or_default().push(user),
            None => found.of_all.push(user),
        }
    }
    Ok(found)
}

/// Records events. Returns the ids of those that were not recorded before; an event that another transaction is recording is
/// waited for.
pub(crate) async fn insert_events(db: &mut PgConnection, events: &[&BusinessEvent]) -> sqlx::Result<HashSet<Uuid>> {
    let new: Vec<Uuid> = sqlx::query_scalar(
        "insert into pillarbox_notify.business_event (id, event_type, aggregate_type, aggregate_id, payload, at)
         select id, event_type, aggregate_type, aggregate_id, payload::json, at
         from unnest($1::uuid[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::timestamptz[])
             as event (id, event_type, aggregate_type, aggregate_id, payload, at)
         order by id on conflict do nothing returning id",
    )
    .bind(events.iter().map(|event| event.id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.event_type.as_str()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.aggregate_type.as_deref()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.aggregate_id).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.payload.get()).collect::<Vec<_>>())
    .bind(events.iter().map(|event| event.at).collect::<Vec<_>>())
    .fetch_all(db)
    .await?;
    Ok(HashSet::from_iter(new))
}

/// Adds unread notifications to inboxes, and locks these until the end of the transaction. `added`: users in the order of
/// their ids, because transactions that lock in another order can deadlock. Returns the highest number of each inbox.
pub(crate) async fn add_to_inboxes(db: &mut PgConnection, added: &[(Uuid, i32)]) -> sqlx::Result<HashMap<Uuid, i64>> {
    let last: Vec<(Uuid, i64)> = sqlx::query_as(
        "insert into pillarbox_notify.inbox as inbox (user_id, last_seq, unread)
         select user_id, added, added from unnest($1::uuid[], $2::int[]) with ordinality as new (user_id, added, n)
         order by n
         on conflict (user_id) do update
             set last_seq = inbox.last_seq + excluded.last_seq, unread = inbox.unread + excluded.unread
         returning user_id, last_seq",
    )
    .bind(added.iter().map(|(user, _)| *user).collect::<Vec<_>>())
    .bind(added.iter().map(|(_, count)| *count).collect::<Vec<_>>())
    .fetch_all(db)
    .await?;
    Ok(last.into_iter().collect())
}

/// Which users have a notification about which of these events in their inboxes already.
pub(crate) async fn existing_in_app(
    db: &mut PgConnection,
    events: &[Uuid],
    users: &[Uuid],
) -> sqlx::Result<HashSet<(Uuid, Uuid)>> {
    let query = "select event_id, user_id from unnest($1::uuid[], $2::uuid[]) as pair (event_id, user_id)
                 join pillarbox_notify.notification using (event_id, user_id) where channel = 'in_app'";
    let existing: Vec<(Uuid, Uuid)> = sqlx::query_as(query).bind(events).bind(users).fetch_all(db).await?;
    Ok(existing.into_iter().collect())
}

/// Adds these e-mails to the counts of this hour. Returns the counts. They are locked until the end of the transaction, in the
/// order of the subjects.
pub(crate) async fn count_emails(
    db: &mut PgConnection,
    now: DateTime<Utc>,
    demands: &BTreeMap<String, i32>,
) -> sqlx::Result<HashMap<String, i32>> {
    let query = "insert into pillarbox_notify.email_count as old (hour, subject, emails)
                 select $1, subject, emails from unnest($2::text[], $3::int[]) with ordinality as new (subject, emails, n)
                 order by n
                 on conflict (hour, subject) do update set emails = old.emails + excluded.emails
                 returning subject, emails";
    let counts: Vec<(String, i32)> = sqlx::query_as(query)
        .bind(hour_of(now))
        .bind(demands.keys().cloned().collect::<Vec<_>>())
        .bind(demands.values().copied().collect::<Vec<_>>())
        .fetch_all(db)
        .await?;
    Ok(counts.into_iter().collect())
}

/// Deletes up to `limit` counts of past hours. Returns how many.
pub(crate) async fn delete_email_counts(db: &mut PgConnection, now: DateTime<Utc>, limit: i64) -> sqlx::Result<u64> {
    let query = "delete from pillarbox_notify.email_count where (hour, subject) in (
                     select hour, subject from pillarbox_notify.email_count where hour < $1 limit $2)";
    Ok(sqlx::query(query).bind(hour_of(now)).bind(limit).execute(db).await?.rows_affected())
}

fn hour_of(now: DateTime<Utc>) -> i64 {
    now.timestamp().div_euclid(3_600)
}

/// Records notifications, except those that exist. `senders`: those of their events that have one. `are_new`: none of them
/// exists, which is cheaper.
pub(crate) async fn insert_notifications(
    db: &mut PgConnection,
    notifications: &[NewNotification],
    senders: &HashMap<Uuid, String>,
    are_new: bool,
    now: DateTime<Utc>,
) -> sqlx::Result<()> {
    let query = if are_new { INSERT_NEW } else { INSERT_MISSING };
    sqlx::query(query)
        .bind(notifications.iter().map(|one| one.event_id).collect::<Vec<_>>())
        .bind(notifications.iter().map(|one| one.user_id).collect::<Vec<_>>())
        .bind(notifications.iter().map(|one| one.channel.into_str()).collect::<Vec<_>>())
        .bind(notifications.iter().map(|one| one.due_at).collect::<Vec<_>>())
        .bind(notifications.iter().map(|one| one.seq).collect::<Vec<_>>())
        .bind(now)
        .bind(notifications.iter().map(|one| one.skipped).collect::<Vec<_>>())
        .bind(notifications.iter().map(|one| senders.get(&one.event_id).cloned()).collect::<Vec<_>>())
        .execute(db)
        .await
        .map(drop)
}

const INSERT_NEW: &str = "
    insert into pillarbox_notify.notification
        (event_id, user_id, channel, status, due_at, seq, created_at, last_error, sender)
    select event_id, user_id, channel,
        case when skipped is not null then 'skipped' when due_at is null then 'delivered' else 'waiting' end,
        case when skipped is null then due_at end, seq, $6, skipped, sender
    from unnest($1::uuid[], $2::uuid[], $3::text[], $4::timestamptz[], $5::bigint[], $7::text[], $8::text[])
        as new (event_id, user_id, channel, due_at, seq, skipped, sender)";

const INSERT_MISSING: &str = "
    insert into pillarbox_notify.notification
        (event_id, user_id, channel, status, due_at, seq, created_at, last_error, sender)
    select event_id, user_id, channel,
        case when skipped is not null then 'skipped' when due_at is null then 'delivered' else 'waiting' end,
        case when skipped is null then due_at end, seq, $6, skipped, sender
    from unnest($1::uuid[], $2::uuid[], $3::text[], $4::timestamptz[], $5::bigint[], $7::text[], $8::text[])
        as new (event_id, user_id, channel, due_at, seq, skipped, sender)
    on conflict (event_id, user_id, channel) do nothing";
