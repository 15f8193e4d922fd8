//! Pages by opaque cursors.
//!
//! A cursor holds the position behind the last row of a page and the filters it was made with. It is signed: a caller
//! can neither read a meaning into it nor make one up, and one used with other filters is refused.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::response::{IntoResponse, Response};
use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use bytes::Bytes;
use hmac::{Hmac, Mac};
use http::request::Parts;
use http::{HeaderValue, Uri, header};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::{IntoParams, ToSchema};

use crate::extract::{Json, parse_query, query_problem};
use crate::problem::Problem;

pub const LIMIT_DEFAULT: u32 = 20;
pub const LIMIT_MAX: u32 = 100;

const VERSION: u8 = 1;
const SCOPE_BYTES: usize = 8;
const MAC_BYTES: usize = 16;

/// Makes cursors with the first key, opens those of any: a cursor outlives a change of the secret key.
#[derive(Clone)]
pub struct CursorKey(Arc<[[u8; 32]]>);

/// The query of a list: `limit` and `cursor`, which every list has, and its own filters. It extracts all of them, and
/// as `params(Listing<Filters>)` describes all of them; `F` may deny unknown fields.
#[derive(Debug)]
pub struct Listing<F> {
    pub filters: F,
    pub limit: u32,
    pub cursor: Option<String>,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it only describes what `Listing` reads")]
struct PageParams {
    /// How many items a page has.
    #[param(default = 20, minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// One page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Pass it as `cursor` to get the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

impl<F: DeserializeOwned> Listing<F> {
    fn parse(query: &str) -> Result<Listing<F>, Problem> {
        let (mut limit, mut cursor) = (None, None);
        // Serde's own way, a flattened struct, reads no numbers from a query and lets unknown fields pass.
        let mut filters = form_urlencoded::Serializer::new(String::new());
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let slot = match &*name {
                "limit" => &mut limit,
                "cursor" => &mut cursor,
                _ => {
                    filters.append_pair(&name, &value);
                    continue;
                }
            };
            if slot.replace(value.into_owned()).is_some() {
                return Err(query_problem(&format!("/{name}"), "is there twice"));
            }
        }
        let limit = match limit.map(|text| text.parse()) {
            None => LIMIT_DEFAULT,
            Some(Ok(limit @ 1..=LIMIT_MAX)) => limit,
            Some(_) => return Err(query_problem("/limit", format!("takes a number from 1 to {LIMIT_MAX}"))),
        };
        Ok(Listing { filters: parse_query(&filters.finish())?, limit, cursor })
    }
}

/// Of a list that takes a limit and a cursor alone.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct NoFilters {}

impl<S: Send + Sync, F: DeserializeOwned> FromRequestParts<S> for Listing<F> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Listing<F>, Problem> {
        Listing::parse(parts.uri.query().unwrap_or_default())
    }
}

impl<F: IntoParams> IntoParams for Listing<F> {
    fn into_params(place: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        [F::into_params(&place), PageParams::into_params(&place)].concat()
    }
}

impl CursorKey {
    /// The current key first; there is at least one.
    pub fn new(keys: Vec<[u8; 32]>) -> CursorKey {
        CursorKey(keys.into())
    }

    /// The cursor for `position`, good only for lists of the same `scope` (route and filters).
    pub fn seal<P: Serialize>(&self, scope: &str, position: &P) -> String {
        // Positions are plain structs of ids and times, which always serialise.
        let position = serde_json::to_vec(position).unwrap_or_default();
        let mut sealed = vec![VERSION];
        sealed.extend(scope_digest(scope));
        sealed.extend(position);
        let mac = mac(&self.0[0], &sealed);
        sealed.extend(mac);
        BASE64_URL_SAFE_NO_PAD.encode(sealed)
    }

    pub fn open<P: DeserializeOwned>(&self, scope: &str, cursor: &str) -> Result<P, Problem> {
        let forged =
            || query_problem("/cursor", "is not one of ours: pass `next_cursor` of the page before, unchanged");
        let sealed = BASE64_URL_SAFE_NO_PAD.decode(cursor).map_err(|_| forged())?;
        if sealed.len() < 1 + SCOPE_BYTES + MAC_BYTES || sealed[0] != VERSION {
            return Err(forged());
        }
        let (content, given) = sealed.split_at(sealed.len() - MAC_BYTES);
        let made_with = |key| bool::from(subtle::ConstantTimeEq::ct_eq(mac(key, content).as_slice(), given));
        if !self.0.iter().any(made_with) {
            return Err(forged());
        }
        if content[1..=SCOPE_BYTES] != scope_digest(scope) {
            return Err(query_problem("/cursor", "belongs to a list with other filters: start again without it"));
        }
        serde_json::from_slice(&content[1 + SCOPE_BYTES..]).map_err(|_| forged())
    }
}

impl<T> Page<T> {
    /// Cuts `rows`, read with a limit of one more than `limit`, to a page; `position` names a row's place.
    pub fn cut<P: Serialize>(
        mut rows: Vec<T>,
        limit: u32,
        key: &CursorKey,
        scope: &str,
        position: impl Fn(&T) -> P,
    ) -> Page<T> {
        let more = rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let next_cursor = rows.last().filter(|_| more).map(|last| key.seal(scope, &position(last)));
        Page { items: rows, next_cursor }
    }

    pub fn map<U>(self, each: impl FnMut(T) -> U) -> Page<U> {
        Page { items: self.items.into_iter().map(each).collect(), next_cursor: self.next_cursor }
    }
}

impl<T: Serialize> IntoResponse for Page<T> {
    fn into_response(self) -> Response {
        let next = self.next_cursor.clone().map(NextCursor);
        let mut response = Json(self).into_response();
        if let Some(next) = next {
            response.extensions_mut().insert(next);
        }
        response
    }
}

/// A page that was made before, as it travels.
#[derive(Debug, Clone)]
pub struct ReadyPage {
    pub body: Bytes,
    pub next_cursor: Option<String>,
}

impl<T: Serialize> From<&Page<T>> for ReadyPage {
    fn from(page: &Page<T>) -> ReadyPage {
        // Items are structs of plain values, which always serialise.
        let body = serde_json::to_vec(page).unwrap_or_default();
        ReadyPage { body: body.into(), next_cursor: page.next_cursor.clone() }
    }
}

impl IntoResponse for ReadyPage {
    fn into_response(self) -> Response {
        let content_type = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let mut response = (content_type, self.body).into_response();
        if let Some(next) = self.next_cursor.map(NextCursor) {
            response.extensions_mut().insert(next);
        }
        response
    }
}

/// Travels on the response to the outer layer, which knows the request's address and so can write the `Link` header.
#[derive(Debug, Clone)]
struct NextCursor(String);

/// `Link: <...>; rel="next"` for a response that is a page with one behind it: the same address, with its cursor.
pub(crate) fn link_next(uri: &Uri, response: &mut Response) {
    let Some(NextCursor(cursor)) = response.extensions_mut().remove() else { return };
    let kept = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).filter(|(name, _)| name != "cursor");
    let query =
        form_urlencoded::Serializer::new(String::new()).extend_pairs(kept).append_pair("cursor", &cursor).finish();
    if let Ok(link) = format!("<{}?{query}>; rel=\"next\"", uri.path()).parse() {
        response.headers_mut().insert(header::LINK, link);
    }
}

fn mac(key: &[u8; 32], content: &[u8]) -> [u8; MAC_BYTES] {
    let mut out = [0; MAC_BYTES];
    // HMAC takes a key of any length.
    if let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) {
        mac.update(content);
        out.copy_from_slice(&mac.finalize().into_bytes()[..MAC_BYTES]);
    }
    out
}

fn scope_digest(scope: &str) -> [u8; SCOPE_BYTES] {
    let mut out = [0; SCOPE_BYTES];
    out.copy_from_slice(&Sha256::digest(scope.as_bytes())[..SCOPE_BYTES]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    fn key() -> CursorKey {
        CursorKey::new(vec![[7; 32]])
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Filters {
        city: Option<String>,
        seats: Option<u32>,
    }

    #[test]
    fn a_listing_takes_the_page_and_leaves_the_filters() {
        let listing = Listing::<Filters>::parse("cursor=abc&city=S%C3%A3o+%26&limit=7&seats=3").unwrap();
        assert_eq!((listing.limit, listing.cursor.as_deref()), (7, Some("abc")));
        assert_eq!(listing.filters, Filters { city: Some("São &".to_owned()), seats: Some(3) });
        let listing = Listing::<Filters>::parse("").unwrap();
        assert_eq!((listing.limit, listing.cursor), (LIMIT_DEFAULT, None));
    }

    #[test]
    fn a_listing_refuses_what_it_does_not_know_what_is_there_twice_and_limits_out_of_bounds() {
        for (query, pointer) in [
            ("limit=0", "/limit"),
            ("limit=101", "/limit"),
            ("limit=ten", "/limit"),
            ("limit=", "/limit"),
            ("limit=1&limit=1", "/limit"),
            ("cursor=a&cursor=b", "/cursor"),
            ("seats=many", "/seats"),
            ("city=a%00b", ""),
        ] {
            let problem = Listing::<Filters>::parse(query).unwrap_err();
            assert_eq!((problem.code(), problem.errors()[0].pointer.as_str()), ("malformed-query", pointer), "{query}");
        }
        for query in ["colour=red", "city=a&city=b"] {
            assert_eq!(Listing::<Filters>::parse(query).unwrap_err().code(), "malformed-query", "{query}");
        }
    }

    #[test]
    fn a_cursor_outlives_a_change_of_the_key() {
        let (old, both) = (key(), CursorKey::new(vec![[8; 32], [7; 32]]));
        let cursor = old.seal("s", &42);
        assert_eq!(both.open::<i32>("s", &cursor).unwrap(), 42);
        assert!(old.open::<i32>("s", &both.seal("s", &42)).is_err(), "new ones are sealed with the current key");
    }

    #[test]
    fn a_cursor_opens_where_it_was_made() {
        let cursor = key().seal("events?city=Oslo", &(42, "id"));
        assert_eq!(key().open::<(i32, String)>("events?city=Oslo", &cursor).unwrap(), (42, "id".to_owned()));
    }

    #[test]
    fn other_filters_other_keys_and_every_changed_bit_are_refused() {
        let cursor = key().seal("events?city=Oslo", &42);
        assert!(key().open::<i32>("events?city=Rome", &cursor).is_err());
        assert!(CursorKey::new(vec![[8; 32]]).open::<i32>("events?city=Oslo", &cursor).is_err());
        let sealed = BASE64_URL_SAFE_NO_PAD.decode(&cursor).unwrap();
        for bit in 0..sealed.len() * 8 {
            let mut forged = sealed.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            let forged = BASE64_URL_SAFE_NO_PAD.encode(forged);
            assert!(key().open::<i32>("events?city=Oslo", &forged).is_err(), "bit {bit}");
        }
        assert!(key().open::<i32>("events?city=Oslo", "").is_err());
    }

    #[test]
    fn the_link_keeps_the_filters() {
        let mut response = Page { items: vec![1], next_cursor: Some("abc".to_owned()) }.into_response();
        link_next(&"/things?cursor=old&city=S%C3%A3o&limit=1".parse().unwrap(), &mut response);
        assert_eq!(response.headers()[header::LINK], "</things?city=S%C3%A3o&limit=1&cursor=abc>; rel=\"next\"");
    }

    #[test]
    fn a_page_has_a_cursor_only_if_there_is_more() {
        let page = Page::cut(vec![1, 2, 3], 2, &key(), "s", |row| *row);
        assert_eq!(page.items, [1, 2]);
        assert_eq!(key().open::<i32>("s", &page.next_cursor.unwrap()).unwrap(), 2);
        assert!(Page::cut(vec![1, 2], 2, &key(), "s", |row| *row).next_cursor.is_none());
    }
}
