//! Pages of the feed.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, Postgres, QueryBuilder};
use uuid::Uuid;

use super::event::COLUMNS;
use super::trending::table_of;
use crate::domain::Event;
use crate::search::Prefix;

/// Maximum number of search matches that are ranked: the next ones by start time.
const MATCHES_MAX: i64 = 1_000;

/// Maximum number of scores that are scanned for a page. A narrow time range may skip most of them.
const SCORES_MAX: i64 = 10_000;

/// Selects published events; a None field matches all. Names are normalized.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FeedFilter {
    pub(crate) city: Option<String>,
    pub(crate) category: Option<String>,
    pub(crate) from: Option<DateTime<Utc>>,
    pub(crate) to: Option<DateTime<Utc>>,
    pub(crate) search: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FeedOrder {
    Latest,
    /// By the scores of this epoch, without events that have ended at `now`.
    Trending {
        epoch: i64,
        now: DateTime<Utc>,
    },
    /// The best match first.
    Relevance,
}

/// The sort key of a row. All orders are ascending in these fields; `rank` is 0 in an order without ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::FromRow)]
pub(crate) struct SortKey {
    pub(crate) rank: i32,
    pub(crate) start_time: DateTime<Utc>,
    #[sqlx(rename = "event_id")]
    pub(crate) id: Uuid,
}

/// An event in the feed.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct FeedRow {
    rank: i32,
    /// The start time by which the event is sorted. The event may have another one since it was scored.
    key_start_time: DateTime<Utc>,
    #[sqlx(flatten)]
    pub(crate) event: Event,
}

impl FeedRow {
    pub(crate) fn key(&self) -> SortKey {
        SortKey { rank: self.rank, start_time: self.key_start_time, id: self.event.id }
    }
}

/// The events after `after`, without their descriptions.
pub(crate) async fn page(
    db: &mut PgConnection,
    filter: &FeedFilter,
    order: FeedOrder,
    after: Option<SortKey>,
    limit: u32,
) -> sqlx::Result<Vec<FeedRow>> {
    // Not cached as a prepared statement, so that each query is planned for its values: the best plans for a rare and a
    // common word, or for a small and a large city, differ.
    statement("", filter, order, after, limit).build_query_as().persistent(false).fetch_all(db).await
}

/// Limits the time of each further statement of the transaction.
pub(crate) async fn limit_time(tx: &mut PgConnection, time_max: Duration) -> sqlx::Result<()> {
    let query = "select set_config('statement_timeout', $1, true)";
    sqlx::query(query).bind(time_max.as_millis().to_string()).execute(tx).await.map(drop)
}

/// The sort key of the last score that a trending page scans; None if the page scans to the end.
pub(crate) async fn last_scanned(
    db: &mut PgConnection,
    filter: &FeedFilter,
    epoch: i64,
    after: Option<SortKey>,
) -> sqlx::Result<Option<SortKey>> {
    let mut query = QueryBuilder::new("");
    push_scores(&mut query, filter, epoch, after);
    query.push(format!(" offset {} limit 1", SCORES_MAX - 1));
    query.build_query_as().persistent(false).fetch_optional(db).await
}

/// PostgreSQL's plan for a page. It is built here, for a test, so that the test explains the same statement that
/// requests run.
pub(crate) async fn plan(
    db: &mut PgConnection,
    filter: &FeedFilter,
    order: FeedOrder,
    after: Option<SortKey>,
    limit: u32,
) -> sqlx::Result<String> {
    let mut explain = statement("explain ", filter, order, after, limit);
    let lines: Vec<String> = explain.build_query_scalar().fetch_all(db).await?;
    Ok(lines.join("\n"))
}

fn statement(
    prefix: &'static str,
    filter: &FeedFilter,
    order: FeedOrder,
    after: Option<SortKey>,
    limit: u32,
) -> QueryBuilder<Postgres> {
    let columns = COLUMNS.replace("event.description", "'' as description");
    let mut query = QueryBuilder::new(prefix);
    match order {
        FeedOrder::Latest => {
            query.push(format!(
                "select 0 as rank, start_time as key_start_time, {columns} from pillarbox_events.event
                 where status = 'published'"
            ));
            if let Some(search) = &filter.search {
                query.push(" and ");
                push_match(&mut query, search);
            }
            push_filters(&mut query, filter, "event", after.is_none());
            push_after(&mut query, "(start_time, id) > (", after, false);
            query.push(" order by start_time, id limit ");
        }
        FeedOrder::Trending { epoch, now } => {
            query.push(format!("select scored.rank, scored.start_time as key_start_time, {columns} from ("));
            push_scores(&mut query, filter, epoch, after);
            query.push(format!(
                " limit {SCORES_MAX}) scored join pillarbox_events.event on event.id = scored.event_id
                 where event.status = 'published' and event.end_time > "
            ));
            query.push_bind(now);
            push_times(&mut query, filter, "scored", true);
            // An event that has moved to another city or category since it was scored no longer matches.
            push_filters(&mut query, filter, "event", true);
            query.push(" order by scored.rank, scored.start_time, scored.event_id limit ");
        }
        FeedOrder::Relevance => push_ranked(&mut query, filter, &columns, after),
    }
    query.push_bind(i64::from(limit));
    query
}

/// The best matches among the next [`MATCHES_MAX`] events that match the search.
fn push_ranked(query: &mut QueryBuilder<Postgres>, filter: &FeedFilter, columns: &str, after: Option<SortKey>) {
    let search = filter.search.as_deref().unwrap_or_default();
    // The words of the title count twice: as stems, and as they are spelled, where a prefix finds them.
    query.push(
        "with matched as materialized (
             select -round(1000000 * ts_rank(search
                        || setweight(to_tsvector('pg_catalog.simple', title), 'A'), ",
    );
    push_words(query, search);
    query.push("))::integer as rank, start_time, id from pillarbox_events.event where status = 'published' and ");
    push_match(query, search);
    push_filters(query, filter, "event", true);
    query.push(format!(
        " order by start_time, id limit {MATCHES_MAX})
         select matched.rank, matched.start_time as key_start_time, {columns} from matched
         join pillarbox_events.event on event.id = matched.id where true"
    ));
    push_after(query, "(matched.rank, matched.start_time, matched.id) > (", after, true);
    query.push(" order by matched.rank, matched.start_time, matched.id limit ");
}

/// The condition that an event matches a search. PostgreSQL evaluates the functions of the constants once, and the
/// conditions use the indexes on the stems of all words and on the words of titles.
fn push_match(query: &mut QueryBuilder<Postgres>, search: &str) {
    query.push("(search @@ ");
    push_words(query, search);
    if let Some(prefix) = Prefix::of(search) {
        query.push(" or (to_tsvector('pg_catalog.simple', title) @@ ");
        push_prefix(query, prefix.word);
        if !prefix.before.is_empty() {
            query.push(" and (numnode(");
            push_parsed(query, prefix.before);
            query.push(") = 0 or search @@ ");
            push_parsed(query, prefix.before);
            query.push(")");
        }
        query.push(")");
    }
    query.push(")");
}

/// The words of a search as a `tsquery`. Its last word also matches longer words.
fn push_words(query: &mut QueryBuilder<Postgres>, search: &str) {
    query.push("(");
    push_parsed(query, search);
    if let Some(prefix) = Prefix::of(search) {
        query.push(" || (");
        if !prefix.before.is_empty() {
            push_parsed(query, prefix.before);
            query.push(" && ");
        }
        push_prefix(query, prefix.word);
        query.push(")");
    }
    query.push(")");
}

/// A search without prefixes. It supports phrases, `or` and `-`; PostgreSQL finds no error in any text.
fn push_parsed(query: &mut QueryBuilder<Postgres>, search: &str) {
    query.push("websearch_to_tsquery('pg_catalog.english', ").push_bind(search.to_owned()).push(")");
}

/// Words that begin with `word`, which has letters and digits only. A word that is too common to be indexed, such as `the`,
/// cannot be searched for by its beginning: the query is empty, as the parsed search is.
fn push_prefix(query: &mut QueryBuilder<Postgres>, word: &str) {
    query.push("case when numnode(");
    push_parsed(query, word);
    query
        .push(") > 0 then to_tsquery('pg_catalog.simple', ")
        .push_bind(format!("{word}:*"))
        .push(") else ''::tsquery end");
}

/// The scores of an epoch after `after`, in order.
fn push_scores(query: &mut QueryBuilder<Postgres>, filter: &FeedFilter, epoch: i64, after: Option<SortKey>) {
    query.push(format!("select rank, start_time, event_id from {} score where true", table_of(epoch)));
    push_names(query, filter, "score");
    push_after(query, "(rank, start_time, event_id) > (", after, true);
    query.push(" order by rank, start_time, event_id");
}

/// `with_from` is false if the position of the page already implies the lower bound.
fn push_filters(query: &mut QueryBuilder<Postgres>, filter: &FeedFilter, table: &str, with_from: bool) {
    push_names(query, filter, table);
    push_times(query, filter, table, with_from);
}

fn push_names(query: &mut QueryBuilder<Postgres>, filter: &FeedFilter, table: &str) {
    if let Some(city) = &filter.city {
        query.push(format!(" and {table}.city_norm = ")).push_bind(city);
    }
    if let Some(category) = &filter.category {
        query.push(format!(" and {table}.category_norm = ")).push_bind(category);
    }
}

fn push_times(query: &mut QueryBuilder<Postgres>, filter: &FeedFilter, table: &str, with_from: bool) {
    if let Some(from) = filter.from.filter(|_| with_from) {
        query.push(format!(" and {table}.start_time >= ")).push_bind(from);
    }
    if let Some(to) = filter.to {
        query.push(format!(" and {table}.start_time < ")).push_bind(to);
    }
}

fn push_after(query: &mut QueryBuilder<Postgres>, comparison: &str, after: Option<SortKey>, ranked: bool) {
    let Some(after) = after else { return };
    query.push(" and ").push(comparison);
    if ranked {
        query.push_bind(after.rank).push(", ");
    }
    query.push_bind(after.start_time).push(", ").push_bind(after.id).push(")");
}
