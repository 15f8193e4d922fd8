//! The public feed of published events, and city suggestions.

use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use http_kit::extract::{Query, query_problem};
use http_kit::page::{Listing, Page, PageScope, ReadyPage};
use http_kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Events;
use crate::fields::{CATEGORY_CHARS_MAX, CITY_CHARS_MAX, normalized};
use crate::flow::feed as flow;
use crate::flow::feed::{PageRequest, Sort};
use crate::store::feed::FeedFilter;
use crate::view::{Cities, EventSummary};

const SEARCH_CHARS_MAX: usize = 200;
const CITIES_DEFAULT: u32 = 10;
const CITIES_MAX: u32 = 50;

pub(super) fn router() -> OpenApiRouter<Arc<Events>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(cities))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FeedQuery {
    /// Accents and case are ignored.
    #[param(max_length = 100)]
    city: Option<String>,
    /// Accents and case are ignored.
    #[param(max_length = 50)]
    category: Option<String>,
    /// Only events that start at this time or later. Default: now; with `trending`, all events that have not ended.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// Only events that start before this time.
    #[serde(default, deserialize_with = "http_kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Words of the title or the description; the last one also matches longer words: `ferr` finds Ferrara. `relevance` ranks
    /// the next 1,000 matching events by start time.
    #[param(pattern = r"\S", max_length = 200)]
    q: Option<String>,
    /// `relevance` requires `q` and is the default with it; `latest` is the default without `q`; `trending` cannot be
    /// combined with `q`.
    #[param(inline)]
    sort: Option<Sort>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CityQuery {
    /// The beginning of the city's name. Accents and case are ignored.
    #[param(max_length = 100)]
    q: Option<String>,
    #[param(minimum = 1, maximum = 50, default = 10)]
    limit: Option<u32>,
}

/// List upcoming published events
///
/// Following `next_cursor` shows each event once, also while users join; new trending scores do not reorder a list that
/// has been started. The participant counts of a page may be up to 15 s old; everything else is current. A `trending`
/// page with a narrow time range may have few or no items and still a `next_cursor`; continue until there is none.
///
/// A search may take a second. One that takes longer, such as a phrase of common words that no event contains, is refused; a city,
/// a category or a time range makes it faster.
#[utoipa::path(get, path = "/event/v1/events", operation_id = "listGatherings", tag = "events", params(Listing<FeedQuery>),
    security((), ("bearer" = [])),
    responses((status = 200, body = Page<EventSummary>),
        (status = 410, description = "The list that this cursor belongs to has expired; start again without a cursor"),
        (status = 422, description = "The search takes too long: it needs rarer words or further filters")))]
async fn list(
    State(events): State<Arc<Events>>,
    Listing { filters, limit, cursor }: Listing<FeedQuery>,
) -> Result<ReadyPage, Problem> {
    let (filter, sort) = filters.check()?;
    let scope = PageScope::of_owner(&events.cursor_key, "events feed", "public", &(sort, &filter));
    flow::page(&events, filter, sort, PageRequest { scope, cursor, limit }).await
}

/// Suggest cities that have published events
///
/// The cities with the most events come first.
#[utoipa::path(get, path = "/event/v1/meta/cities", operation_id = "listGatheringCities", tag = "events", params(CityQuery), security((), ("bearer" = [])),
    responses((status = 200, body = Cities)))]
async fn cities(State(events): State<Arc<Events>>, Query(query): Query<CityQuery>) -> Result<ReadyPage, Problem> {
    let limit = query.limit.unwrap_or(CITIES_DEFAULT);
    if !(1..=CITIES_MAX).contains(&limit) {
        return Err(query_problem("/limit", format!("must be a number from 1 to {CITIES_MAX}")));
    }
    let typed = query.q.unwrap_or_default();
    check_length(&typed, "/q", CITY_CHARS_MAX)?;
    flow::suggest_cities(&events, &typed, limit).await
}

impl FeedQuery {
    /// Checks the parameters. Fails with the first invalid one.
    fn check(self) -> Result<(FeedFilter, Sort), Problem> {
        let name = |text: Option<String>, pointer: &str, chars_max| {
            let Some(text) = text else { return Ok(None) };
            check_length(&text, pointer, chars_max)?;
            Ok::<_, Problem>(Some(normalized(&text)))
        };
        let city = name(self.city, "/city", CITY_CHARS_MAX)?;
        let category = name(self.category, "/category", CATEGORY_CHARS_MAX)?;
        if let Some(search) = &self.q {
            check_length(search, "/q", SEARCH_CHARS_MAX)?;
            if search.trim().is_empty() {
                return Err(query_problem("/q", "must contain at least one word"));
            }
        }
        if let (Some(from), Some(to)) = (self.from, self.to)
            && to <= from
        {
            return Err(query_problem("/to", "must be after from"));
        }
        let sort = match (self.sort, &self.q) {
            (None, None) | (Some(Sort::Latest), _) => Sort::Latest,
            (None | Some(Sort::Relevance), Some(_)) => Sort::Relevance,
            (Some(Sort::Trending), None) => Sort::Trending,
            (Some(Sort::Trending), Some(_)) => {
                return Err(query_problem("/sort", "must be latest or relevance if q is given"));
            }
            (Some(Sort::Relevance), None) => {
                return Err(query_problem("/sort", "can be relevance only if q is given; use latest or trending"));
            }
        };
        Ok((FeedFilter { city, category, from: self.from, to: self.to, search: self.q }, sort))
    }
}

fn check_length(text: &str, pointer: &str, chars_max: usize) -> Result<(), Problem> {
    if text.chars().count() <= chars_max {
        Ok(())
    } else {
        Err(query_problem(pointer, format!("must have at most {chars_max} characters")))
    }
}
