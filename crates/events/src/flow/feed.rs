use std::time::Duration;

use chrono::{DateTime, Utc};
use kit::page::{Page, ReadyPage};
use kit::problem::Problem;
use mailbox::database::problem;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Events;
use crate::cache::Wanted;
use crate::error::Error;
use crate::fields::folded;
use crate::store::feed::{self as store, Order, Place, Which};
use crate::store::{cities, trending};
use crate::view::{Cities, City, EventSummary};

const FEED_TTL: Duration = Duration::from_secs(15);
const CITIES_TTL: Duration = Duration::from_secs(3_600);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = EventSort)]
pub(crate) enum Sort {
    /// What begins next first.
    Latest,
    /// What most people are going to first, by the scores of the last minutes.
    Trending,
    /// The best match of `q` first.
    Relevance,
}

/// Where a walk is: its start stays, so that time and new scores do not move what it walks along.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Position {
    /// From where on events are upcoming.
    now: DateTime<Utc>,
    epoch: Option<i64>,
    place: Place,
}

/// A page of published events, made ready.
pub(crate) async fn page(
    events: &Events,
    which: Which,
    sort: Sort,
    (cursor, limit): (Option<String>, u32),
) -> Result<ReadyPage, Problem> {
    let (generation, _) = generations(events).await?;
    // Cheap, since most questions were asked before: it names all that is asked for, and is looked into on a miss alone.
    let question = serde_json::to_string(&(sort, &which, limit, &cursor)).unwrap_or_default();
    let wanted = Wanted {
        key: format!("feed:public:{}:{question}", which.city.as_deref().unwrap_or_default()),
        tag: generation.to_string(),
        ttl: FEED_TTL,
    };
    let made = events.cache.get_or_make(&wanted, || async {
        let page = read(events, which, sort, (cursor, limit)).await?;
        Ok::<_, Problem>(events.cache.copy(wanted.tag.clone(), ReadyPage::from(&page)))
    });
    let copy = made.await.map_err(|problem| (*problem).clone())?;
    Ok(ReadyPage { body: copy.body.clone(), next_cursor: copy.next_cursor.clone() })
}

/// Cities that begin so, as they are typed; ready.
pub(crate) async fn suggest(events: &Events, typed: &str, limit: u32) -> Result<ReadyPage, Problem> {
    let prefix = folded(typed);
    let (_, generation) = generations(events).await?;
    let wanted =
        Wanted { key: format!("cities:suggestions:{limit}:{prefix}"), tag: generation.to_string(), ttl: CITIES_TTL };
    let made = events.cache.get_or_make(&wanted, || async {
        let look = async { cities::beginning_with(&mut *events.feed_db.acquire().await?, &prefix, limit).await };
        let found = look.await.map_err(|error| problem(&error))?;
        let items = found.into_iter().map(|(city, events)| City { city, events }).collect();
        let body = serde_json::to_vec(&Cities { items }).unwrap_or_default().into();
        Ok::<_, Problem>(events.cache.copy(wanted.tag.clone(), ReadyPage { body, next_cursor: None }))
    });
    let copy = made.await.map_err(|problem| (*problem).clone())?;
    Ok(ReadyPage { body: copy.body.clone(), next_cursor: None })
}

/// Every way to ask for a feed that an index serves, and how PostgreSQL would read a page of it.
pub(crate) async fn plans(events: &Events) -> sqlx::Result<Vec<(String, String)>> {
    let (now, mut plans) = (events.clock.now(), Vec::new());
    let mut db = events.feed_db.acquire().await?;
    let epoch = trending::newest(&mut db).await?.unwrap_or(0);
    let place = Place { rank: -1, start_time: now, id: uuid::Uuid::nil() };
    for order in [Order::Latest, Order::Trending { epoch, now }] {
        for bits in 0..32_u8 {
            let has = |bit: u8| bits & (1 << bit) != 0;
            let which = Which {
                city: has(0).then(|| "zurich".to_owned()),
                category: has(1).then(|| "tech".to_owned()),
                from: (has(2) || order == Order::Latest).then_some(now),
                to: has(3).then(|| now + chrono::TimeDelta::days(30)),
                search: None,
            };
            let page = (has(4).then_some(place), 21);
            let plan = store::plan(&mut db, &which, order, page).await?;
            plans.push((format!("{order:?} {which:?} {page:?}"), plan));
        }
    }
    Ok(plans)
}

async fn read(
    events: &Events,
    which: Which,
    sort: Sort,
    (cursor, limit): (Option<String>, u32),
) -> Result<Page<EventSummary>, Problem> {
    let scope = format!("events feed {sort:?} {which:?}");
    let position = cursor.map(|cursor| events.cursor_key.open(&scope, &cursor)).transpose()?;
    Ok(read_behind(events, which, sort, &scope, (position, limit)).await?)
}

async fn read_behind(
    events: &Events,
    mut which: Which,
    sort: Sort,
    scope: &str,
    (position, limit): (Option<Position>, u32),
) -> Result<Page<EventSummary>, Error> {
    let mut db = events.feed_db.acquire().await?;
    let now = position.map_or_else(|| events.clock.now(), |position| position.now);
    let epoch = match (sort, position) {
        (Sort::Latest | Sort::Relevance, _) => None,
        (Sort::Trending, Some(Position { epoch: Some(epoch), .. })) if trending::is_kept(&mut db, epoch).await? => {
            Some(epoch)
        }
        (Sort::Trending, Some(_)) => return Err(Error::CursorExpired),
        (Sort::Trending, None) => match trending::newest(&mut db).await? {
            Some(epoch) => Some(epoch),
            // Nothing was scored yet.
            None => return Ok(Page { items: Vec::new(), next_cursor: None }),
        },
    };
    let order = match (sort, epoch) {
        (Sort::Trending, epoch) => Order::Trending { epoch: epoch.unwrap_or_default(), now },
        (Sort::Latest, _) => Order::Latest,
        (Sort::Relevance, _) => Order::Relevance,
    };
    if sort != Sort::Trending {
        which.from = which.from.or(Some(now));
    }
    let after = position.map(|position| position.place);
    let rows = store::page(&mut db, &which, order, (after, limit + 1)).await.map_err(|error| {
        // PostgreSQL takes a search apart with a stack of its own, and says so when that is too small.
        let is_too_deep = error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("XX000"));
        if is_too_deep && which.search.is_some() { Error::Unsearchable } else { error.into() }
    })?;
    let at = |place: Place| Position { now, epoch, place };
    let mut page = Page::cut(rows, limit, &events.cursor_key, scope, |(place, _)| at(*place));
    if let Some(epoch) = epoch.filter(|_| page.next_cursor.is_none()) {
        let last = store::last_looked_at(&mut db, &which, epoch, after).await?;
        page.next_cursor = last.map(|place| events.cursor_key.seal(scope, &at(place)));
    }
    Ok(page.map(|(_, event)| EventSummary::from(event)))
}

async fn generations(events: &Events) -> Result<(i64, i64), Problem> {
    events.generations.submit(()).await.map_err(|refused| refused.into_problem(problem))
}
