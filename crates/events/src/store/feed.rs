use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Postgres, QueryBuilder, Row};
use uuid::Uuid;

use super::event::{COLUMNS, event};
use super::trending::table_of;
use crate::domain::Event;

/// Of those that match a search so many are ranked: those that begin next, whatever the order of the rows.
const MATCHES_MAX: i64 = 1_000;

/// So many scores are looked at for a page: a range of time may pass over most of them.
const SCORES_MAX: i64 = 10_000;

/// Which of the published events; None is any. Names are folded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Which {
    pub(crate) city: Option<String>,
    pub(crate) category: Option<String>,
    pub(crate) from: Option<DateTime<Utc>>,
    pub(crate) to: Option<DateTime<Utc>>,
    pub(crate) search: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Latest,
    /// By the scores of this epoch; what is over by now is left out.
    Trending {
        epoch: i64,
        now: DateTime<Utc>,
    },
    /// The best match first.
    Relevance,
}

/// A row's place in its order, which ascends in all of these; `rank` is 0 where nothing is ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) rank: i32,
    pub(crate) start_time: DateTime<Utc>,
    pub(crate) id: Uuid,
}

/// Events without their descriptions, behind `after`.
pub(crate) async fn page(
    db: &mut PgConnection,
    which: &Which,
    order: Order,
    (after, limit): (Option<Place>, u32),
) -> sqlx::Result<Vec<(Place, Event)>> {
    // Planned for what is asked for: a rare word and a common one, a large city and a small one, are read in different ways.
    let rows = statement("", which, order, (after, limit)).build().persistent(false).fetch_all(db).await?;
    let found = |row: &PgRow| {
        let event = event(row)?;
        let place = Place { rank: row.try_get("rank")?, start_time: row.try_get("walked_start_time")?, id: event.id };
        Ok((place, event))
    };
    rows.iter().map(found).collect()
}

/// Where the scores that a trending page looks at end; None if that is the end of all.
pub(crate) async fn last_looked_at(
    db: &mut PgConnection,
    which: &Which,
    epoch: i64,
    after: Option<Place>,
) -> sqlx::Result<Option<Place>> {
    let mut query = QueryBuilder::new("");
    push_scores(&mut query, which, epoch, after);
    query.push(format!(" offset {} limit 1", SCORES_MAX - 1));
    let row = query.build().persistent(false).fetch_optional(db).await?;
    let place = |row: PgRow| {
        Ok(Place { rank: row.try_get("rank")?, start_time: row.try_get("start_time")?, id: row.try_get("event_id")? })
    };
    row.map(place).transpose()
}

/// How PostgreSQL would read such a page.
pub(crate) async fn plan(
    db: &mut PgConnection,
    which: &Which,
    order: Order,
    page: (Option<Place>, u32),
) -> sqlx::Result<String> {
    let mut explain = statement("explain ", which, order, page);
    let lines: Vec<String> = explain.build_query_scalar().fetch_all(db).await?;
    Ok(lines.join("\n"))
}

/// The sum of what grows when something about a feed has changed, and the same for cities.
pub(crate) async fn generations(db: &mut PgConnection) -> sqlx::Result<(i64, i64)> {
    sqlx::query_as(
        "select coalesce(sum(n) filter (where what = 'feeds'), 0)::bigint,
                coalesce(sum(n) filter (where what = 'cities'), 0)::bigint
         from pillarbox_events.generation",
    )
    .fetch_one(db)
    .await
}

/// Copies of feeds are wrong from this transaction on.
pub(crate) async fn outdate(db: &mut PgConnection, event_id: Uuid) -> sqlx::Result<()> {
    let shard = (event_id.as_u128() % 16) as i16;
    sqlx::query("update pillarbox_events.generation set n = n + 1 where what = 'feeds' and shard = $1")
        .bind(shard)
        .execute(db)
        .await
        .map(drop)
}

/// Copies of cities are wrong from this transaction on.
pub(crate) async fn outdate_cities(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::query("update pillarbox_events.generation set n = n + 1 where what = 'cities'").execute(db).await.map(drop)
}

fn statement(
    prefix: &'static str,
    which: &Which,
    order: Order,
    (after, limit): (Option<Place>, u32),
) -> QueryBuilder<Postgres> {
    let columns = COLUMNS.replace("event.description", "'' as description");
    let mut query = QueryBuilder::new(prefix);
    match order {
        Order::Latest => {
            query.push(format!(
                "select 0 as rank, start_time as walked_start_time, {columns} from pillarbox_events.event
                 where status = 'published'"
            ));
            if let Some(search) = &which.search {
                query.push(" and search @@ websearch_to_tsquery('pg_catalog.english', ").push_bind(search).push(")");
            }
            push_filters(&mut query, which, "event", after.is_none());
            push_after(&mut query, "(start_time, id) > (", after, false);
            query.push(" order by start_time, id limit ");
        }
        Order::Trending { epoch, now } => {
            query.push(format!("select scored.rank, scored.start_time as walked_start_time, {columns} from ("));
            push_scores(&mut query, which, epoch, after);
            query.push(format!(
                " limit {SCORES_MAX}) scored join pillarbox_events.event on event.id = scored.event_id
                 where event.status = 'published' and event.end_time > "
            ));
            query.push_bind(now);
            push_times(&mut query, which, "scored", true);
            // What moved away meanwhile is not there any more.
            push_filters(&mut query, which, "event", true);
            query.push(" order by scored.rank, scored.start_time, scored.event_id limit ");
        }
        Order::Relevance => {
            query.push("with asked as (select websearch_to_tsquery('pg_catalog.english', ");
            query.push_bind(which.search.as_deref().unwrap_or_default());
            query.push(
                ") as words), matched as materialized (
                     select -round(1000000 * ts_rank(search, asked.words))::integer as rank, start_time, id
                     from pillarbox_events.event, asked
                     where status = 'published' and search @@ asked.words",
            );
            push_filters(&mut query, which, "event", true);
            query.push(format!(
                " order by start_time, id limit {MATCHES_MAX})
                 select matched.rank, matched.start_time as walked_start_time, {columns} from matched
                 join pillarbox_events.event on event.id = matched.id where true"
            ));
            push_after(&mut query, "(matched.rank, matched.start_time, matched.id) > (", after, true);
            query.push(" order by matched.rank, matched.start_time, matched.id limit ");
        }
    }
    query.push_bind(i64::from(limit));
    query
}

/// An epoch's scores behind `after`, in their order.
fn push_scores(query: &mut QueryBuilder<Postgres>, which: &Which, epoch: i64, after: Option<Place>) {
    query.push(format!("select rank, start_time, event_id from {} place where true", table_of(epoch)));
    push_names(query, which, "place");
    push_after(query, "(rank, start_time, event_id) > (", after, true);
    query.push(" order by rank, start_time, event_id");
}

/// `with_from`: who is behind a later place needs no earliest.
fn push_filters(query: &mut QueryBuilder<Postgres>, which: &Which, table: &str, with_from: bool) {
    push_names(query, which, table);
    push_times(query, which, table, with_from);
}

fn push_names(query: &mut QueryBuilder<Postgres>, which: &Which, table: &str) {
    if let Some(city) = &which.city {
        query.push(format!(" and {table}.city_norm = ")).push_bind(city);
    }
    if let Some(category) = &which.category {
        query.push(format!(" and {table}.category_norm = ")).push_bind(category);
    }
}

fn push_times(query: &mut QueryBuilder<Postgres>, which: &Which, table: &str, with_from: bool) {
    if let Some(from) = which.from.filter(|_| with_from) {
        query.push(format!(" and {table}.start_time >= ")).push_bind(from);
    }
    if let Some(to) = which.to {
        query.push(format!(" and {table}.start_time < ")).push_bind(to);
    }
}

fn push_after(query: &mut QueryBuilder<Postgres>, is_behind: &str, after: Option<Place>, ranked: bool) {
    let Some(after) = after else { return };
    query.push(" and ").push(is_behind);
    if ranked {
        query.push_bind(after.rank).push(", ");
    }
    query.push_bind(after.start_time).push(", ").push_bind(after.id).push(")");
}
