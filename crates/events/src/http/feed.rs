use std::sync::Arc;

use axum::extract::State;
use chrono::{DateTime, Utc};
use kit::extract::{Query, query_problem};
use kit::page::{Listing, Page, ReadyPage};
use kit::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Events;
use crate::fields::{CATEGORY_CHARS_MAX, CITY_CHARS_MAX, folded};
use crate::flow::feed::{self as flow, Sort};
use crate::store::feed::Which;
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
struct FeedFilters {
    /// Accents and case do not matter.
    #[param(max_length = 100, example = "zurich")]
    city: Option<String>,
    /// Case does not matter.
    #[param(max_length = 50)]
    category: Option<String>,
    /// What begins then or later; absent: now, and with `trending` all that is not over.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    from: Option<DateTime<Utc>>,
    /// What begins before.
    #[serde(default, deserialize_with = "kit::instant::optional")]
    to: Option<DateTime<Utc>>,
    /// Words of the title or the description; `relevance` ranks the 1,000 events that match and begin next.
    #[param(min_length = 1, max_length = 200)]
    q: Option<String>,
    /// `relevance` is for `q`, and its default; `latest` is the default without it; `trending` takes no `q`.
    #[param(inline)]
    sort: Option<Sort>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CityQuery {
    /// What its name begins with; accents and case do not matter.
    #[param(max_length = 100, example = "zur")]
    q: Option<String>,
    #[param(minimum = 1, maximum = 50, default = 10)]
    limit: Option<u32>,
}

/// List published events, upcoming ones
///
/// A walk from page to page shows each event once, also while people join; new scores do not change an order that someone walks
/// along. A page may be 15 s old in what it says of participants, and in nothing else. A page of `trending` within a narrow time may have
/// few items, or none, and a `next_cursor`: go on until there is none.
#[utoipa::path(get, path = "/event/v1/events", tag = "events", params(Listing<FeedFilters>),
    responses((status = 200, body = Page<EventSummary>),
        (status = 410, description = "The order that this cursor walks along is not kept any more: start again")))]
async fn list(
    State(events): State<Arc<Events>>,
    Listing { filters, limit, cursor }: Listing<FeedFilters>,
) -> Result<ReadyPage, Problem> {
    let (which, sort) = filters.settle()?;
    flow::page(&events, which, sort, (cursor, limit)).await
}

/// Suggest cities that have published events, the most used first
#[utoipa::path(get, path = "/event/v1/meta/cities", tag = "events", params(CityQuery),
    responses((status = 200, body = Cities)))]
async fn cities(State(events): State<Arc<Events>>, Query(asked): Query<CityQuery>) -> Result<ReadyPage, Problem> {
    let limit = asked.limit.unwrap_or(CITIES_DEFAULT);
    if !(1..=CITIES_MAX).contains(&limit) {
        return Err(query_problem("/limit", format!("takes a number from 1 to {CITIES_MAX}")));
    }
    let typed = asked.q.unwrap_or_default();
    short(&typed, "/q", CITY_CHARS_MAX)?;
    flow::suggest(&events, &typed, limit).await
}

impl FeedFilters {
    fn settle(self) -> Result<(Which, Sort), Problem> {
        let name = |text: Option<String>, pointer: &str, chars_max| {
            let Some(text) = text else { return Ok(None) };
            short(&text, pointer, chars_max)?;
            Ok::<_, Problem>(Some(folded(&text)))
        };
        let city = name(self.city, "/city", CITY_CHARS_MAX)?;
        let category = name(self.category, "/category", CATEGORY_CHARS_MAX)?;
        if let Some(search) = &self.q {
            short(search, "/q", SEARCH_CHARS_MAX)?;
            if search.trim().is_empty() {
                return Err(query_problem("/q", "takes at least one word"));
            }
        }
        if let (Some(from), Some(to)) = (self.from, self.to)
            && to <= from
        {
            return Err(query_problem("/to", "takes a time after from"));
        }
        let sort = match (self.sort, &self.q) {
            (None, None) | (Some(Sort::Latest), _) => Sort::Latest,
            (None | Some(Sort::Relevance), Some(_)) => Sort::Relevance,
            (Some(Sort::Trending), None) => Sort::Trending,
            (Some(Sort::Trending), Some(_)) => {
                return Err(query_problem("/sort", "takes latest or relevance together with q"));
            }
            (Some(Sort::Relevance), None) => {
                return Err(query_problem("/sort", "takes relevance together with q, else latest or trending"));
            }
        };
        Ok((Which { city, category, from: self.from, to: self.to, search: self.q }, sort))
    }
}

fn short(text: &str, pointer: &str, chars_max: usize) -> Result<(), Problem> {
    match text.chars().count() <= chars_max {
        true => Ok(()),
        false => Err(query_problem(pointer, format!("takes up to {chars_max} characters"))),
    }
}
