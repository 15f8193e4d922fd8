//! Business events to notifications, compared with inserting the same rows into the same tables with `unnest`, in batches of
//! the same size. Both measure the time from the committed events to the last notification; the events are posted before.

use std::path::Path;
use std::time::{Duration, Instant};

use sqlx::PgPool;
use uuid::Uuid;

use crate::Outcome;
use crate::costs::Costs;
use crate::installation::Installation;
use crate::report::{Pairs, Report};

const AGGREGATES: i64 = 1_000;
/// Recipients of each aggregate.
const RECIPIENTS: i64 = 3;
/// Events per statement of the raw limit, as in a batch of a listener.
const BATCH: i64 = 500;
/// A run that takes longer has failed.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) async fn measure(pillarbox: &Path, pairs: usize, events: i64) -> Outcome<Report> {
    let args = ["--services", "notify", "--roles", "api,consume,maintain"];
    let installation = Installation::start(pillarbox, "", &args).await?;
    let mut report = Report::default();
    let outcome = measure_pairs(&installation, pairs, events, &mut report).await;
    installation.end().await?;
    outcome.map(|()| report)
}

async fn measure_pairs(installation: &Installation, pairs: usize, events: i64, report: &mut Report) -> Outcome<()> {
    let db = &installation.site.db;
    prepare(db).await?;
    ours(db, events / 4).await?; // warm-up
    let mut costs = Costs::default();
    let measured = async || {
        let began = installation.used().await?;
        let rate = ours(db, events).await?;
        costs.add(began, installation.used().await?, (events * RECIPIENTS) as u64);
        Ok(rate)
    };
    let runs = Pairs::run("notifications", pairs, async || raw(db, events).await, measured).await?;
    report.add("notifications, raw inserts with unnest", "/s", runs.raws);
    report.add("notifications, from events through a listener", "/s", runs.ours);
    report.add("notifications, ratio", "", runs.ratios);
    costs.report("notifications", report);
    Ok(())
}

async fn prepare(db: &PgPool) -> Outcome<()> {
    let recipients = "insert into pillarbox_notify.recipient
                      select 'RESTAURANT', aggregate, gen_random_uuid()
                      from generate_series(1, $1) as aggregate, generate_series(1, $2)";
    sqlx::query(recipients).bind(AGGREGATES).bind(RECIPIENTS).execute(db).await?;
    let in_app = "insert into pillarbox_notify.event_type (name, channels) values ('BENCH', '{in_app}')";
    sqlx::query(in_app).execute(db).await?;
    sqlx::query("analyze pillarbox_notify.recipient").execute(db).await?;
    Ok(())
}

/// Posts events and waits for their notifications. Returns the notifications per second.
async fn ours(db: &PgPool, events: i64) -> Outcome<f64> {
    let before = delivered(db).await?;
    let mut tx = db.begin().await?;
    let post = "select count(pillarbox.notify('BENCH', 'RESTAURANT', n % $2 + 1, json_build_object('order', n)))
                from generate_series(1, $1) as n";
    sqlx::query(post).bind(events).bind(AGGREGATES).execute(&mut *tx).await?;
    let began = Instant::now();
    tx.commit().await?;
    while delivered(db).await? < before + events * RECIPIENTS {
        if began.elapsed() > DEADLINE {
            return Err(format!("only {} notifications arrived", delivered(db).await? - before).into());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok((events * RECIPIENTS) as f64 / began.elapsed().as_secs_f64())
}

/// The number of notifications in all inboxes.
async fn delivered(db: &PgPool) -> Outcome<i64> {
    let query = "select coalesce(sum(last_seq), 0)::bigint from pillarbox_notify.inbox";
    Ok(sqlx::query_scalar(query).fetch_one(db).await?)
}

/// Inserts the same rows: events, counts of inboxes, and notifications, in a transaction for each batch.
async fn raw(db: &PgPool, events: i64) -> Outcome<f64> {
    let recipients: Vec<(i64, Uuid)> =
        sqlx::query_as("select aggregate_id, user_id from pillarbox_notify.recipient order by aggregate_id, user_id")
            .fetch_all(db)
            .await?;
    let of = |aggregate: i64| {
        let first = ((aggregate - 1) * RECIPIENTS) as usize;
        recipients[first..first + RECIPIENTS as usize].iter().map(|(_, user)| *user)
    };
    let seqs: Vec<(Uuid, i64)> =
        sqlx::query_as("select user_id, last_seq from pillarbox_notify.inbox").fetch_all(db).await?;
    let mut last: std::collections::HashMap<Uuid, i64> = seqs.into_iter().collect();
    let began = Instant::now();
    for start in (0..events).step_by(BATCH as usize) {
        let numbers: Vec<i64> = (start..(start + BATCH).min(events)).collect();
        let ids: Vec<Uuid> = numbers.iter().map(|_| Uuid::now_v7()).collect();
        let mut rows: (Vec<Uuid>, Vec<Uuid>, Vec<i64>) = Default::default();
        for (number, id) in numbers.iter().zip(&ids) {
            for user in of(number % AGGREGATES + 1) {
                let seq = last.entry(user).or_default();
                *seq += 1;
                rows.0.push(*id);
                rows.1.push(user);
                rows.2.push(*seq);
            }
        }
        insert(db, &numbers, &ids, &rows).await?;
    }
    Ok((events * RECIPIENTS) as f64 / began.elapsed().as_secs_f64())
}

async fn insert(
    db: &PgPool,
    numbers: &[i64],
    ids: &[Uuid],
    (events, users, seqs): &(Vec<Uuid>, Vec<Uuid>, Vec<i64>),
) -> Outcome<()> {
    let mut tx = db.begin().await?;
    sqlx::query(
        "insert into pillarbox_notify.business_event (id, event_type, aggregate_type, aggregate_id, payload, at)
         select id, 'BENCH', 'RESTAURANT', n % $3 + 1, json_build_object('order', n), now()
         from unnest($1::bigint[], $2::uuid[]) as event (n, id)",
    )
    .bind(numbers)
    .bind(ids)
    .bind(AGGREGATES)
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "insert into pillarbox_notify.inbox as inbox (user_id, last_seq, unread)
         select user_id, max(seq), count(*) from unnest($1::uuid[], $2::bigint[]) as new (user_id, seq)
         group by user_id order by user_id
         on conflict (user_id) do update set last_seq = excluded.last_seq, unread = inbox.unread + excluded.unread",
    )
    .bind(users)
    .bind(seqs)
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "insert into pillarbox_notify.notification (event_id, user_id, channel, status, seq, created_at)
         select event_id, user_id, 'in_app', 'delivered', seq, now()
         from unnest($1::uuid[], $2::uuid[], $3::bigint[]) as new (event_id, user_id, seq)",
    )
    .bind(events)
    .bind(users)
    .bind(seqs)
    .execute(&mut *tx)
    .await?;
    Ok(tx.commit().await?)
}
