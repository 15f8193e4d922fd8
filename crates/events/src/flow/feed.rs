//! Pages of the public feed, and city suggestions. Both are cached.

use std::time::Duration;

use chrono::{DateTime, Utc};
use http_kit::database::problem;
use http_kit::page::{Page, PageScope, ReadyPage};
use http_kit::problem::Problem;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use utoipa::ToSchema;

use crate::Events;
use crate::cache::CacheKey;
use crate::error::Error;
use crate::fields::normalized;
use crate::store::feed::{FeedFilter, FeedOrder, SortKey};
use crate::store::generation::Generations;
use crate::store::{cities, feed as store, trending};
use crate::view::{Cities, City, EventSummary};

const FEED_TTL: Duration = Duration::from_secs(15);
/// The longest time that a search may take. A phrase of common words that hardly any event contains has to be compared with each
/// event that has these words.
const SEARCH_TIME_MAX: Duration = Duration::from_secs(1);
const CITIES_TTL: Duration = Duration::from_secs(3_600);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = EventSort)]
pub(crate) enum Sort {
    /// By start time, the next event first.
    Latest,
    /// By score, the highest first. Scores are computed periodically from the number of participants.
    Trending,
    /// By the match with `q`, the best first.
    Relevance,
}

/// The page that a request asks for.
pub(crate) struct PageRequest<'a> {
    pub(crate) scope: PageScope<'a>,
    pub(crate) cursor: Option<String>,
    pub(crate) limit: u32,
}

/// The content of a cursor. The time and the epoch of the first page stay the same for all pages, so that later pages
/// continue the same list.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct FeedPosition {
    /// Events that start at this time or later are upcoming.
    now: DateTime<Utc>,
    epoch: Option<i64>,
    last: SortKey,
}

/// A serialized page of published events.
pub(crate) async fn page(
    events: &Events,
    filter: FeedFilter,
    sort: Sort,
    request: PageRequest<'_>,
) -> Result<ReadyPage, Problem> {
    let generation = generations(events).await?.feeds;
    // The key contains the whole request. The cursor is verified on a miss only: a cached page proves that it was
    // valid.
    let query = serde_json::to_string(&(sort, &filter, request.limit, &request.cursor));
    let query = query.map_err(|error| Problem::internal(&error))?;
    let key = CacheKey {
        key: format!("feed:public:{}:{query}", filter.city.as_deref().unwrap_or_default()),
        tag: generation.to_string(),
        ttl: FEED_TTL,
    };
    if let Some(entry) = events.cache.get(&key).await {
        return Ok(entry.page());
    }
    // Requests for the same page share one read. A caller waits for its own share before it joins the read, so that no caller
    // waits for the share of another.
    let _search = match &filter.search {
        Some(_) => Some(events.searches.enter().await.map_err(|_| Error::TooManySearches)?),
        None => None,
    };
    // After the place among the searches: one that waits for its place must not occupy a part of the share.
    let _share = events.feed_db.admit().await.map_err(|error| problem(&error))?;
    let entry = events.cache.make_once(&key, || async {
        let page = read(events, filter, sort, request).await?;
        Ok::<_, Problem>(events.cache.entry(key.tag.clone(), ReadyPage::from(&page)))
    });
    let entry = entry.await.map_err(|problem| (*problem).clone())?;
    Ok(entry.page())
}

/// The serialized suggestions for the beginning of a city's name.
pub(crate) async fn suggest_cities(events: &Events, typed: &str, limit: u32) -> Result<ReadyPage, Problem> {
    let prefix = normalized(typed);
    let generation = generations(events).await?.cities;
    let key =
        CacheKey { key: format!("cities:suggestions:{limit}:{prefix}"), tag: generation.to_string(), ttl: CITIES_TTL };
    if let Some(entry) = events.cache.get(&key).await {
        return Ok(entry.page());
    }
    let _share = events.feed_db.admit().await.map_err(|error| problem(&error))?;
    let entry = events.cache.make_once(&key, || async {
        let read = async { cities::with_prefix(&mut *events.feed_db.acquire().await?, &prefix, limit).await };
        let found = read.await.map_err(|error| problem(&error))?;
        let items = found.into_iter().map(|(city, events)| City { city, events }).collect();
        let body = serde_json::to_vec(&Cities { items }).map_err(|error| Problem::internal(&error))?;
        let page = ReadyPage { body: body.into(), next_cursor: None };
        Ok::<_, Problem>(events.cache.entry(key.tag.clone(), page))
    });
    let entry = entry.await.map_err(|problem| (*problem).clone())?;
    Ok(entry.page())
}

/// Every combination of filters that an index must serve, with PostgreSQL's plan for a page of it. For a test.
pub(crate) async fn plans(events: &Events) -> sqlx::Result<Vec<(String, String)>> {
    let (now, mut plans) = (events.clock.now(), Vec::new());
    let mut db = events.feed_db.acquire().await?;
    let epoch = trending::newest(&mut db).await?.map_or(0, |(epoch, _)| epoch);
    let after = SortKey { rank: -1, start_time: now, id: uuid::Uuid::nil() };
    for order in [FeedOrder::Latest, FeedOrder::Trending { epoch, now }] {
        for bits in 0..32_u8 {
            let has = |bit: u8| bits & (1 << bit) != 0;
            let filter = FeedFilter {
                city: has(0).then(|| "zurich".to_owned()),
                category: has(1).then(|| "tech".to_owned()),
                from: (has(2) || order == FeedOrder::Latest).then_some(now),
                to: has(3).then(|| now + chrono::TimeDelta::days(30)),
                search: None,
            };
            let after = has(4).then_some(after);
            let plan = store::plan(&mut db, &filter, order, after, 21).await?;
            plans.push((format!("{order:?} {filter:?} {after:?}"), plan));
        }
    }
    for (order, search) in
        [(FeedOrder::Latest, "ferr"), (FeedOrder::Relevance, "ferr"), (FeedOrder::Relevance, "a ferr")]
    {
        let filter = FeedFilter { search: Some(search.to_owned()), from: Some(now), ..FeedFilter::default() };
        let plan = store::plan(&mut db, &filter, order, None, 21).await?;
        plans.push((format!("search {order:?} {filter:?}"), plan));
    }
    Ok(plans)
}

async fn read(
    events: &Events,
    filter: FeedFilter,
    sort: Sort,
    PageRequest { scope, cursor, limit }: PageRequest<'_>,
) -> Result<Page<EventSummary>, Problem> {
    let position = scope.position(cursor.as_deref())?;
    let db = &events.feed_db;
    if filter.search.is_none() {
        let mut connection = db.acquire().await.map_err(Error::from)?;
        return Ok(read_after(&mut connection, events.clock.now(), filter, sort, &scope, position, limit).await?);
    }
    let mut tx = db.begin().await.map_err(Error::from)?;
    store::limit_time(&mut tx, SEARCH_TIME_MAX).await.map_err(Error::from)?;
    Ok(read_after(&mut tx, events.clock.now(), filter, sort, &scope, position, limit).await?)
}

async fn read_after(
    db: &mut PgConnection,
    now: DateTime<Utc>,
    mut filter: FeedFilter,
    sort: Sort,
    scope: &PageScope<'_>,
    position: Option<FeedPosition>,
    limit: u32,
) -> Result<Page<EventSummary>, Error> {
    let now = position.map_or(now, |position| position.now);
    let epoch = match (sort, position) {
        (Sort::Latest | Sort::Relevance, _) => None,
        (Sort::Trending, Some(FeedPosition { epoch: Some(epoch), .. })) if trending::exists(db, epoch).await? => {
            Some(epoch)
        }
        (Sort::Trending, Some(_)) => return Err(Error::CursorExpired),
        (Sort::Trending, None) => match trending::newest(db).await? {
            Some((epoch, _)) => Some(epoch),
            // Nothing has been scored yet.
            None => return Ok(Page { items: Vec::new(), next_cursor: None }),
        },
    };
    let order = match (sort, epoch) {
        (Sort::Trending, epoch) => FeedOrder::Trending { epoch: epoch.unwrap_or_default(), now },
        (Sort::Latest, _) => FeedOrder::Latest,
        (Sort::Relevance, _) => FeedOrder::Relevance,
    };
    if sort != Sort::Trending {
        filter.from = filter.from.or(Some(now));
    }
    let after = position.map(|position| position.last);
    let rows = store::page(db, &filter, order, after, limit + 1).await.map_err(|error| failure(&filter, error))?;
    let position_at = |last: SortKey| FeedPosition { now, epoch, last };
    let mut page = scope.cut(rows, limit, |row| position_at(row.key()));
    // A trending page that scanned its maximum of scores may be short although more scores follow.
    if let Some(epoch) = epoch.filter(|_| page.next_cursor.is_none()) {
        let last = store::last_scanned(db, &filter, epoch, after).await.map_err(|error| failure(&filter, error))?;
        page.next_cursor = last.map(|last| scope.cursor(&position_at(last)));
    }
    Ok(page.map(|row| EventSummary::from(row.event)))
}

fn failure(filter: &FeedFilter, error: sqlx::Error) -> Error {
    let code = error.as_database_error().and_then(|error| error.code());
    match code.as_deref().filter(|_| filter.search.is_some()) {
        // PostgreSQL parses a search with a stack of limited depth, and reports an internal error if it overflows.
        Some("XX000") => Error::Unsearchable,
        Some("57014") => Error::SearchTooBroad(SEARCH_TIME_MAX),
        _ => error.into(),
    }
}

async fn generations(events: &Events) -> Result<Generations, Problem> {
    events.generation_reader.submit(()).await.map_err(|error| Problem::of_batch(error, problem))
}
