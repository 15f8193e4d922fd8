use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use mailbox::lease::Fence;
use mailbox::log::{self, LogRef};
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool, Row};
use uuid::Uuid;

use crate::dispatch::feed::{Attempt, Command, Death, Key, LaneRow, LaneWish, Save, What};
use crate::dispatch::{Event, Mail, Snapshot};

/// What is new since a number: the directory's version, the newest number, and who has new messages.
pub(crate) struct News {
    pub(crate) version: i64,
    pub(crate) newest: i64,
    pub(crate) subscribers: HashSet<Uuid>,
}

pub(crate) async fn news(db: &PgPool, after: i64) -> sqlx::Result<News> {
    let row = sqlx::query(
        "select (select version from pillarbox_hub.directory) as version,
                coalesce(max(n_to), $1) as newest,
                coalesce(array_agg(distinct subscriber) filter (where subscriber is not null), '{}') as subscribers
         from (select n_to, subscribers from pillarbox_hub.fanned where n_to > $1 order by n_to limit 1000) as fanned
         left join lateral unnest(fanned.subscribers) as subscriber on true",
    )
    .bind(after)
    .fetch_one(db)
    .await?;
    let subscribers: Vec<Uuid> = row.try_get("subscribers")?;
    Ok(News {
        version: row.try_get("version")?,
        newest: row.try_get("newest")?,
        subscribers: subscribers.into_iter().collect(),
    })
}

/// The newest number of all.
pub(crate) async fn newest(db: &mut PgConnection) -> sqlx::Result<i64> {
    let query = "select coalesce((select n_to from pillarbox_hub.fanned order by n_to desc limit 1), 0)";
    sqlx::query_scalar(query).fetch_one(db).await
}

/// What the database has of a subscriber's deliveries.
#[derive(Default)]
pub(crate) struct Loaded {
    pub(crate) position: i64,
    /// Each with the first of its messages that is not settled.
    pub(crate) lanes: Vec<(LaneRow, i64)>,
    /// Settled beyond the position.
    pub(crate) done: HashSet<i64>,
}

pub(crate) async fn load(db: &mut PgConnection, subscribers: &[Uuid]) -> sqlx::Result<HashMap<Uuid, Loaded>> {
    let mut loaded: HashMap<Uuid, Loaded> = HashMap::new();
    // A position is forgotten like the messages that it has passed: then all that is left is to be read.
    let rows = sqlx::query(
        "select wanted.subscriber,
                coalesce(newest.n, oldest.n - 1,
                         (select n_to from pillarbox_hub.fanned order by n_to desc limit 1), 0) as n
         from unnest($1::uuid[]) as wanted (subscriber)
         left join lateral (select n from pillarbox_hub.position
                            where position.subscriber = wanted.subscriber order by n desc limit 1) newest on true
         left join lateral (select n from pillarbox_hub.message
                            where newest.n is null and message.subscriber = wanted.subscriber
                            order by n limit 1) oldest on true",
    )
    .bind(subscribers)
    .fetch_all(&mut *db)
    .await?;
    for row in rows {
        loaded.entry(row.try_get("subscriber")?).or_default().position = row.try_get("n")?;
    }
    // A lane's head is written down now and then only: what was settled since is passed over.
    let rows = sqlx::query(
        "select lane.*, case when next_at is null or again or lane.lane is null then head
                             else coalesce(first.n, last.n + 1, head) end as next
         from pillarbox_hub.lane
         left join lateral (
             select n from pillarbox_hub.message
             where message.subscriber = lane.subscriber and message.lane = lane.lane and n >= lane.head
               and not exists (select from pillarbox_hub.attempt
                               where attempt.subscriber = lane.subscriber and attempt.n = message.n
                                 and outcome <> 'failed')
             order by n limit 1
         ) first on true
         left join lateral (
             select n from pillarbox_hub.message
             where message.subscriber = lane.subscriber and message.lane = lane.lane order by n desc limit 1
         ) last on true
         where lane.subscriber = any ($1)",
    )
    .bind(subscribers)
    .fetch_all(&mut *db)
    .await?;
    for row in rows {
        let (head, next): (i64, i64) = (row.try_get("head")?, row.try_get("next")?);
        let lane = LaneRow {
            head,
            lane: row.try_get::<Option<String>, _>("lane")?.map(Arc::from),
            attempts: if next == head { row.try_get::<i16, _>("attempts")? as u16 } else { 0 },
            next_at: row.try_get("next_at")?,
            again: row.try_get("again")?,
        };
        loaded.entry(row.try_get("subscriber")?).or_default().lanes.push((lane, next));
    }
    let positions: Vec<i64> = subscribers.iter().map(|id| loaded.get(id).map_or(0, |loaded| loaded.position)).collect();
    let rows = sqlx::query(
        "select attempt.subscriber, attempt.n from unnest($1::uuid[], $2::bigint[]) as wanted (subscriber, n)
         join pillarbox_hub.attempt on attempt.subscriber = wanted.subscriber and attempt.n > wanted.n
         where outcome <> 'failed'",
    )
    .bind(subscribers)
    .bind(positions)
    .fetch_all(&mut *db)
    .await?;
    for row in rows {
        loaded.entry(row.try_get("subscriber")?).or_default().done.insert(row.try_get("n")?);
    }
    Ok(loaded)
}

/// What is to be read: of subscribers behind a number, of lanes, and commands.
#[derive(Debug, Default, Clone)]
pub(crate) struct Wishes {
    pub(crate) feeds: Vec<(Uuid, i64, usize)>,
    pub(crate) lanes: Vec<(Uuid, LaneWish)>,
    pub(crate) commands: Vec<Uuid>,
}

#[derive(Default)]
pub(crate) struct Read {
    pub(crate) feeds: HashMap<Uuid, Vec<Mail>>,
    pub(crate) lanes: HashMap<(Uuid, Key), Vec<Mail>>,
    pub(crate) commands: Vec<(Uuid, Command)>,
}

pub(crate) async fn read(db: &PgPool, wishes: &Wishes) -> sqlx::Result<Read> {
    let mut db = db.acquire().await?;
    let (mut of_feeds, mut of_lanes, mut commands) = (Vec::new(), Vec::new(), Vec::new());
    if !wishes.feeds.is_empty() {
        of_feeds = sqlx::query(
            "select message.* from unnest($1::uuid[], $2::bigint[], $3::bigint[]) as wish (subscriber, after, most)
             cross join lateral (
                 select * from pillarbox_hub.message
                 where message.subscriber = wish.subscriber and n > wish.after order by n limit wish.most
             ) message",
        )
        .bind(wishes.feeds.iter().map(|(subscriber, _, _)| *subscriber).collect::<Vec<_>>())
        .bind(wishes.feeds.iter().map(|(_, after, _)| *after).collect::<Vec<_>>())
        .bind(wishes.feeds.iter().map(|(_, _, most)| *most as i64).collect::<Vec<_>>())
        .fetch_all(&mut *db)
        .await?;
    }
    if !wishes.commands.is_empty() {
        commands = read_commands(&mut db, &wishes.commands).await?;
    }
    if !wishes.lanes.is_empty() {
        let name = |key: &Key| match key {
            Key::Lane(lane) => Some(lane.to_string()),
            Key::Alone(_) => None,
        };
        of_lanes = sqlx::query(
            "select message.* from unnest($1::uuid[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
                  as wish (subscriber, lane, after, upto, most)
             cross join lateral (
                 (select * from pillarbox_hub.message
                  where message.subscriber = wish.subscriber and message.lane = wish.lane
                    and n > wish.after and n <= wish.upto order by n limit wish.most)
                 union all
                 (select * from pillarbox_hub.message
                  where wish.lane is null and message.subscriber = wish.subscriber and n = wish.upto)
             ) message",
        )
        .bind(wishes.lanes.iter().map(|(subscriber, _)| *subscriber).collect::<Vec<_>>())
        .bind(wishes.lanes.iter().map(|(_, wish)| name(&wish.key)).collect::<Vec<_>>())
        .bind(wishes.lanes.iter().map(|(_, wish)| wish.after).collect::<Vec<_>>())
        .bind(wishes.lanes.iter().map(|(_, wish)| wish.to).collect::<Vec<_>>())
        .bind(wishes.lanes.iter().map(|(_, wish)| wish.most as i64).collect::<Vec<_>>())
        .fetch_all(&mut *db)
        .await?;
    }
    let events = events(&mut db, of_feeds.iter().chain(&of_lanes)).await?;
    let mut read = Read { commands, ..Read::default() };
    for row in &of_feeds {
        let (subscriber, mail) = mail(row, &events)?;
        read.feeds.entry(subscriber).or_default().push(mail);
    }
    for row in &of_lanes {
        let (subscriber, mail) = mail(row, &events)?;
        let key = mail.lane.clone().map_or(Key::Alone(mail.n), Key::Lane);
        read.lanes.entry((subscriber, key)).or_default().push(mail);
    }
    read.feeds.values_mut().chain(read.lanes.values_mut()).for_each(|mails| mails.sort_by_key(|mail| mail.n));
    Ok(read)
}

async fn read_commands(db: &mut PgConnection, subscribers: &[Uuid]) -> sqlx::Result<Vec<(Uuid, Command)>> {
    let query = "select command.id, command.subscriber, command.n, command.what, command.by, message.lane
                 from pillarbox_hub.command
                 join pillarbox_hub.message on message.subscriber = command.subscriber and message.n = command.n
                 where command.subscriber = any ($1) order by command.id";
    let rows = sqlx::query(query).bind(subscribers).fetch_all(db).await?;
    rows.iter()
        .map(|row| {
            let what = match row.try_get::<&str, _>("what")? {
                "retry" => What::Retry,
                _ => What::GiveUp,
            };
            let (n, lane) = (row.try_get("n")?, row.try_get::<Option<String>, _>("lane")?);
            let key = lane.map_or(Key::Alone(n), |lane| Key::Lane(Arc::from(lane)));
            let command = Command { id: row.try_get("id")?, n, key, what, by: row.try_get("by")? };
            Ok((row.try_get("subscriber")?, command))
        })
        .collect()
}

fn place(row: &PgRow) -> sqlx::Result<LogRef> {
    Ok(LogRef { shard: row.try_get("log_shard")?, id: row.try_get("log_id")?, at: row.try_get("log_at")? })
}

fn mail(row: &PgRow, events: &BTreeMap<LogRef, Arc<Event>>) -> sqlx::Result<(Uuid, Mail)> {
    let mail = Mail {
        n: row.try_get("n")?,
        lane: row.try_get::<Option<String>, _>("lane")?.map(Arc::from),
        seq: row.try_get("seq")?,
        event: events.get(&place(row)?).cloned(),
    };
    Ok((row.try_get("subscriber")?, mail))
}

/// The content of messages, once for all subscribers: from the log, or from a dead letter that is sent again.
async fn events(
    db: &mut PgConnection,
    rows: impl Iterator<Item = &PgRow> + Clone,
) -> sqlx::Result<BTreeMap<LogRef, Arc<Event>>> {
    let mut places = rows.clone().map(place).collect::<sqlx::Result<Vec<_>>>()?;
    places.sort_unstable();
    places.dedup();
    if places.is_empty() {
        return Ok(BTreeMap::new());
    }
    let messages = log::at_places(db, &places).await?;
    let mut events: BTreeMap<LogRef, Arc<Event>> =
        messages.iter().map(|message| (message.place(), Arc::new(Event::of(message)))).collect();
    // The message that is sent again says which it was; one that blocks its lane died itself.
    let (mut dead_letters, mut died): (Vec<Uuid>, (Vec<Uuid>, Vec<i64>)) = Default::default();
    for row in rows {
        if events.contains_key(&place(row)?) {
            continue;
        }
        match row.try_get("dead_letter")? {
            Some(dead_letter) => dead_letters.push(dead_letter),
            None => {
                died.0.push(row.try_get("subscriber")?);
                died.1.push(row.try_get("n")?);
            }
        }
    }
    if !dead_letters.is_empty() || !died.0.is_empty() {
        let query = "select log_shard, log_id, log_at, event_snapshot from pillarbox_hub.dead_letter
                     where event_snapshot is not null
                       and (id = any ($1) or (subscriber, n) in (select * from unnest($2::uuid[], $3::bigint[])))";
        for row in sqlx::query(query).bind(dead_letters).bind(died.0).bind(died.1).fetch_all(db).await? {
            let Json(snapshot): Json<Snapshot> = row.try_get("event_snapshot")?;
            let place = place(&row)?;
            events.insert(place, Arc::new(Event::again(snapshot)));
        }
    }
    Ok(events)
}

/// Keeps all of it, or nothing; false if others have taken over.
pub(crate) async fn keep(db: &PgPool, fence: Fence, save: &Save, now: DateTime<Utc>) -> sqlx::Result<bool> {
    let mut tx = db.begin().await?;
    if !fence.hold(&mut tx).await? {
        return Ok(false);
    }
    insert_attempts(&mut tx, &save.attempts).await?;
    insert_deaths(&mut tx, &save.deaths).await?;
    if !save.ended.is_empty() {
        let query = "delete from pillarbox_hub.lane where (subscriber, head) in
                         (select * from unnest($1::uuid[], $2::bigint[]))";
        let (subscribers, heads): (Vec<Uuid>, Vec<i64>) = save.ended.iter().copied().unzip();
        sqlx::query(query).bind(subscribers).bind(heads).execute(&mut *tx).await?;
    }
    if !save.waiting.is_empty() {
        let query = "insert into pillarbox_hub.lane (subscriber, head, lane, attempts, next_at, again)
                     select * from unnest($1::uuid[], $2::bigint[], $3::text[], $4::smallint[], $5::timestamptz[], $6::boolean[])
                     on conflict (subscriber, head) do update
                     set lane = excluded.lane, attempts = excluded.attempts, next_at = excluded.next_at, again = excluded.again";
        sqlx::query(query)
            .bind(save.waiting.iter().map(|(subscriber, _)| *subscriber).collect::<Vec<_>>())
            .bind(save.waiting.iter().map(|(_, row)| row.head).collect::<Vec<_>>())
            .bind(save.waiting.iter().map(|(_, row)| row.lane.as_deref()).collect::<Vec<_>>())
            .bind(save.waiting.iter().map(|(_, row)| row.attempts as i16).collect::<Vec<_>>())
            .bind(save.waiting.iter().map(|(_, row)| row.next_at).collect::<Vec<_>>())
            .bind(save.waiting.iter().map(|(_, row)| row.again).collect::<Vec<_>>())
            .execute(&mut *tx)
            .await?;
    }
    if !save.positions.is_empty() {
        let query = "insert into pillarbox_hub.position (subscriber, n, at)
                     select *, $3 from unnest($1::uuid[], $2::bigint[])";
        let (subscribers, ns): (Vec<Uuid>, Vec<i64>) = save.positions.iter().copied().unzip();
        sqlx::query(query).bind(subscribers).bind(ns).bind(now).execute(&mut *tx).await?;
    }
    if !save.gone.is_empty() {
        let query = "update pillarbox_hub.subscriber
                     set is_active = false, inactive_reason = 'it answered 410 Gone', version = version + 1, updated_at = $3
                     where (id, version) in (select * from unnest($1::uuid[], $2::bigint[])) and is_active";
        let (subscribers, versions): (Vec<Uuid>, Vec<i64>) = save.gone.iter().copied().unzip();
        sqlx::query(query).bind(subscribers).bind(versions).bind(now).execute(&mut *tx).await?;
    }
    if !save.unretried.is_empty() {
        let query = "update pillarbox_hub.dead_letter set manual_retry_by = null, manual_retry_at = null
                     where (subscriber, n) in (select * from unnest($1::uuid[], $2::bigint[]))";
        let (subscribers, ns): (Vec<Uuid>, Vec<i64>) = save.unretried.iter().copied().unzip();
        sqlx::query(query).bind(subscribers).bind(ns).execute(&mut *tx).await?;
    }
    if !save.done.is_empty() {
        sqlx::query("delete from pillarbox_hub.command where id = any ($1)").bind(&save.done).execute(&mut *tx).await?;
    }
    tx.commit().await?;
    Ok(true)
}

async fn insert_attempts(tx: &mut PgConnection, attempts: &[Attempt]) -> sqlx::Result<()> {
    if attempts.is_empty() {
        return Ok(());
    }
    let text = |of: fn(&Attempt) -> Option<&str>| attempts.iter().map(of).collect::<Vec<_>>();
    sqlx::query(
        "insert into pillarbox_hub.attempt (at, subscriber, n, attempt, outcome, status, latency_ms, error, detail, excerpt)
         select * from unnest($1::timestamptz[], $2::uuid[], $3::bigint[], $4::smallint[], $5::text[], $6::smallint[],
                              $7::integer[], $8::text[], $9::text[], $10::text[])",
    )
    .bind(attempts.iter().map(|attempt| attempt.at).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.subscriber).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.n).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.attempt as i16).collect::<Vec<_>>())
    .bind(text(|attempt| Some(attempt.outcome.as_str())))
    .bind(attempts.iter().map(|attempt| attempt.came.status.map(|status| status as i16)).collect::<Vec<_>>())
    .bind(attempts.iter().map(|attempt| attempt.came.latency.as_millis() as i32).collect::<Vec<_>>())
    .bind(text(|attempt| attempt.came.error))
    .bind(text(|attempt| attempt.came.detail.as_deref()))
    .bind(text(|attempt| attempt.came.excerpt.as_deref()))
    .execute(tx)
    .await
    .map(drop)
}

async fn insert_deaths(tx: &mut PgConnection, deaths: &[Death]) -> sqlx::Result<()> {
    if deaths.is_empty() {
        return Ok(());
    }
    let event = |death: &Death| death.mail.event.clone();
    // As text: jsonb would change what was posted.
    let snapshots: Vec<Option<String>> =
        deaths.iter().map(|death| event(death).map(|event| event.snapshot())).collect();
    // The place in the log is the message's own.
    sqlx::query(
        "insert into pillarbox_hub.dead_letter
             (id, tenant, subscriber, n, lane, event_id, event_type, log_shard, log_id, log_at, event_snapshot,
              subscriber_snapshot, reason, detail, attempts, moved_to_dlq_at)
         select d.id, d.tenant, d.subscriber, d.n, d.lane, d.event_id, d.event_type, m.log_shard, m.log_id, m.log_at,
                d.event_snapshot::json, d.subscriber_snapshot::jsonb, d.reason, d.detail, d.attempts, d.at
         from unnest($1::uuid[], $2::text[], $3::uuid[], $4::bigint[], $5::text[], $6::uuid[], $7::text[], $8::text[],
                     $9::text[], $10::text[], $11::text[], $12::smallint[], $13::timestamptz[])
              as d (id, tenant, subscriber, n, lane, event_id, event_type, event_snapshot, subscriber_snapshot, reason,
                    detail, attempts, at)
         join pillarbox_hub.message as m on m.subscriber = d.subscriber and m.n = d.n
         -- One that was retried at the head of its lane, and has died again, can be retried again.
         on conflict (subscriber, n) do update
         set subscriber_snapshot = excluded.subscriber_snapshot, reason = excluded.reason, detail = excluded.detail,
             attempts = excluded.attempts, moved_to_dlq_at = excluded.moved_to_dlq_at,
             manual_retry_by = null, manual_retry_at = null
         where dead_letter.moved_to_dlq_at < excluded.moved_to_dlq_at",
    )
    .bind(deaths.iter().map(|_| Uuid::now_v7()).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.recipient.tenant.as_str()).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.recipient.id).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.mail.n).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.mail.lane.as_deref()).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| event(death).map(|event| event.id)).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| event(death).map(|event| event.topic.clone())).collect::<Vec<_>>())
    .bind(snapshots)
    .bind(deaths.iter().map(|death| death.recipient.snapshot.to_string()).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.reason.as_str()).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.detail.as_str()).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.attempts as i16).collect::<Vec<_>>())
    .bind(deaths.iter().map(|death| death.at).collect::<Vec<_>>())
    .execute(tx)
    .await
    .map(drop)
}
