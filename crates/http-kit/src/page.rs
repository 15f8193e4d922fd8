//! Pagination with opaque cursors.
//!
//! A cursor contains the position after the last row of a page and a digest of its [`PageScope`]: the list, its owner
//! and the filters of the request. It is signed, so a caller cannot construct one, and a cursor used with another
//! list, another owner or other filters is rejected.

use std::fmt::{Debug, Display};
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

use crate::extract::{Json, parse_query_with, query_problem};
use crate::problem::Problem;

/// Items per page if the request has no `limit`.
const LIMIT_DEFAULT: u32 = 20;
/// The largest accepted `limit`.
const LIMIT_MAX: u32 = 100;

/// A page of rows that may be large, such as messages, ends after the row with which it reaches this size. A query that loads such
/// rows stops there as well, after one more row: otherwise what it loads would not be bounded.
pub const PAGE_BYTES_MAX: usize = 1024 * 1024;

/// The version of the cursor's format.
const VERSION: u8 = 1;
const SCOPE_BYTES: usize = 8;
const MAC_BYTES: usize = 16;

/// Signs cursors with the first key and verifies them with any key, so that a cursor stays valid when the secret key
/// is replaced.
#[derive(Clone)]
pub struct CursorKey(Arc<[[u8; 32]]>);

/// The query of a list: `limit` and `cursor`, which every list has, and the filters `F`. `params(Listing<Filters>)`
/// describes all of them; `F` may deny unknown fields.
#[derive(Debug)]
pub struct Listing<F> {
    pub filters: F,
    pub limit: u32,
    pub cursor: Option<String>,
}

#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it only describes the parameters that `Listing` parses")]
struct PageParams {
    /// The number of items per page.
    #[param(default = 20, minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// The `next_cursor` of the previous page.
    #[param(pattern = "^[A-Za-z0-9_-]+$")]
    cursor: Option<String>,
}

/// One page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Pass it as `cursor` to get the next page. Absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

impl<F: DeserializeOwned> Listing<F> {
    fn parse(query: &str) -> Result<Listing<F>, Problem> {
        let (mut limit, mut cursor) = (None, None);
        // Not a flattened struct: serde would parse no numbers in it and accept unknown fields.
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
                return Err(query_problem(&format!("/{name}"), "must not be repeated"));
            }
        }
        let limit = match limit.map(|text| text.parse()) {
            None => LIMIT_DEFAULT,
            Some(Ok(limit @ 1..=LIMIT_MAX)) => limit,
            Some(_) => return Err(query_problem("/limit", format!("must be a number from 1 to {LIMIT_MAX}"))),
        };
        Ok(Listing { filters: parse_query_with(&filters.finish(), &["limit", "cursor"])?, limit, cursor })
    }
}

/// The filters of a list that has none.
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
    fn into_params(location: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        [F::into_params(&location), PageParams::into_params(&location)].concat()
    }
}

impl CursorKey {
    /// `keys` has at least one key; the first is the current one.
    pub fn new(keys: Vec<[u8; 32]>) -> CursorKey {
        CursorKey(keys.into())
    }

    fn sign<P: Serialize>(&self, scope: &str, position: &P) -> String {
        // Positions are plain structs of ids and times, which always serialize.
        let position = serde_json::to_vec(position).unwrap_or_default();
        let mut signed = vec![VERSION];
        signed.extend(scope_digest(scope));
        signed.extend(position);
        let mac = mac(&self.0[0], &signed);
        signed.extend(mac);
        BASE64_URL_SAFE_NO_PAD.encode(signed)
    }

    /// Returns the position in a cursor. Fails with 400 for a cursor that was not signed here, or for another scope.
    fn verify<P: DeserializeOwned>(&self, scope: &str, cursor: &str) -> Result<P, Problem> {
        let invalid =
            || query_problem("/cursor", "is not valid: pass the `next_cursor` of the previous page, unchanged");
        let signed = BASE64_URL_SAFE_NO_PAD.decode(cursor).map_err(|_| invalid())?;
        if signed.len() < 1 + SCOPE_BYTES + MAC_BYTES || signed[0] != VERSION {
            return Err(invalid());
        }
        let (content, signature) = signed.split_at(signed.len() - MAC_BYTES);
        let is_signed_with = |key| bool::from(subtle::ConstantTimeEq::ct_eq(mac(key, content).as_slice(), signature));
        if !self.0.iter().any(is_signed_with) {
            return Err(invalid());
        }
        if content[1..=SCOPE_BYTES] != scope_digest(scope) {
            return Err(query_problem(
                "/cursor",
                "belongs to another list or to other filters: start again without a cursor",
            ));
        }
        serde_json::from_slice(&content[1 + SCOPE_BYTES..]).map_err(|_| invalid())
    }
}

/// The scope of a list: its name, its owner and its filters. It signs and verifies the cursors of the list, and a
/// cursor of any other scope is rejected.
///
/// The scope contains the `Debug` text of the filters, so renaming their type or one of its fields invalidates the
/// existing cursors of the list.
pub struct PageScope<'a> {
    key: &'a CursorKey,
    scope: String,
}

impl<'a> PageScope<'a> {
    /// The scope of a list that contains the rows of one owner: a tenant, a user or an event. `list` is unique among
    /// the lists of all services.
    pub fn of_owner(
        key: &'a CursorKey,
        list: impl Display,
        owner: impl Display,
        filters: &impl Debug,
    ) -> PageScope<'a> {
        PageScope::global(key, format_args!("{list} {owner}"), filters)
    }

    /// The scope of a list that is the same for every caller who may read it.
    pub fn global(key: &'a CursorKey, list: impl Display, filters: &impl Debug) -> PageScope<'a> {
        PageScope { key, scope: format!("{list}?{filters:?}") }
    }

    /// Returns the position in the cursor of the request; None if the request has no cursor. Fails with 400 for a
    /// cursor that is not valid in this scope.
    pub fn position<P: DeserializeOwned>(&self, cursor: Option<&str>) -> Result<Option<P>, Problem> {
        cursor.map(|cursor| self.key.verify(&self.scope, cursor)).transpose()
    }

    /// Returns the cursor of a position.
    pub fn cursor<P: Serialize>(&self, position: &P) -> String {
        self.key.sign(&self.scope, position)
    }

    /// Cuts `rows`, which were loaded with a limit of one more than `limit`, to a page. `position` returns the
    /// position of a row, from which the next page continues.
    pub fn cut<T, P: Serialize>(&self, rows: Vec<T>, limit: u32, position: impl Fn(&T) -> P) -> Page<T> {
        self.cut_by_size(rows, limit, |_| 0, position)
    }

    /// Like [`PageScope::cut`], for rows that may be large: the page also ends with the row that reaches [`PAGE_BYTES_MAX`].
    /// `bytes` returns the approximate size of a row.
    pub fn cut_by_size<T, P: Serialize>(
        &self,
        mut rows: Vec<T>,
        limit: u32,
        bytes: impl Fn(&T) -> usize,
        position: impl Fn(&T) -> P,
    ) -> Page<T> {
        let mut page_bytes = 0;
        let is_on_page = |row: &&T| {
            let is_on_page = page_bytes < PAGE_BYTES_MAX;
            page_bytes += bytes(row);
            is_on_page
        };
        let count = rows.iter().take(limit as usize).take_while(is_on_page).count();
        let more = rows.len() > count;
        rows.truncate(count);
        let next_cursor = rows.last().filter(|_| more).map(|last| self.cursor(&position(last)));
        Page { items: rows, next_cursor }
    }
}

impl<T> Page<T> {
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

/// A serialized page, for example from a cache.
#[derive(Debug, Clone)]
pub struct ReadyPage {
    pub body: Bytes,
    pub next_cursor: Option<String>,
}

impl<T: Serialize> From<&Page<T>> for ReadyPage {
    fn from(page: &Page<T>) -> ReadyPage {
        // Items are structs of plain values, which always serialize.
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

/// An extension of the response. The outer layer, which knows the URI of the request, turns it into the `Link`
/// header.
#[derive(Debug, Clone)]
struct NextCursor(String);

/// Adds `Link: <...>; rel="next"` to the response if it is a page with a next one: the URI of the request with the
/// next cursor.
pub(crate) fn link_next(uri: &Uri, response: &mut Response) {
    let Some(NextCursor(cursor)) = response.extensions_mut().remove() else { return };
    let filters =
        form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).filter(|(name, _)| name != "cursor");
    let query =
        form_urlencoded::Serializer::new(String::new()).extend_pairs(filters).append_pair("cursor", &cursor).finish();
    if let Ok(link) = format!("<{}?{query}>; rel=\"next\"", uri.path()).parse() {
        response.headers_mut().insert(header::LINK, link);
    }
}

fn mac(key: &[u8; 32], content: &[u8]) -> [u8; MAC_BYTES] {
    let mut out = [0; MAC_BYTES];
    // HMAC accepts a key of any length.
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
    fn a_listing_separates_page_parameters_from_filters() {
        let listing = Listing::<Filters>::parse("cursor=abc&city=S%C3%A3o+%26&limit=7&seats=3").unwrap();
        assert_eq!((listing.limit, listing.cursor.as_deref()), (7, Some("abc")));
        assert_eq!(listing.filters, Filters { city: Some("São &".to_owned()), seats: Some(3) });
        let listing = Listing::<Filters>::parse("").unwrap();
        assert_eq!((listing.limit, listing.cursor), (LIMIT_DEFAULT, None));
    }

    #[test]
    fn unknown_repeated_and_invalid_parameters_are_rejected() {
        for (query, pointer) in [
            ("limit=0", "/limit"),
            ("limit=101", "/limit"),
            ("limit=ten", "/limit"),
            ("limit=", "/limit"),
            ("limit=1&limit=1", "/limit"),
            ("cursor=a&cursor=b", "/cursor"),
            ("seats=many", "/seats"),
            ("city=a%00b", "/city"),
        ] {
            let problem = Listing::<Filters>::parse(query).unwrap_err();
            assert_eq!((problem.code(), problem.errors()[0].pointer.as_str()), ("malformed-query", pointer), "{query}");
        }
        for query in ["colour=red", "city=a&city=b"] {
            assert_eq!(Listing::<Filters>::parse(query).unwrap_err().code(), "malformed-query", "{query}");
        }
    }

    #[test]
    fn a_cursor_stays_valid_when_the_key_is_replaced() {
        let (old, both) = (key(), CursorKey::new(vec![[8; 32], [7; 32]]));
        let cursor = old.sign("s", &42);
        assert_eq!(both.verify::<i32>("s", &cursor).unwrap(), 42);
        assert!(old.verify::<i32>("s", &both.sign("s", &42)).is_err(), "new cursors are signed with the current key");
    }

    #[test]
    fn a_cursor_is_valid_in_its_scope() {
        let cursor = key().sign("events?city=Oslo", &(42, "id"));
        assert_eq!(key().verify::<(i32, String)>("events?city=Oslo", &cursor).unwrap(), (42, "id".to_owned()));
    }

    #[test]
    fn other_filters_other_keys_and_modified_bits_are_rejected() {
        let cursor = key().sign("events?city=Oslo", &42);
        assert!(key().verify::<i32>("events?city=Rome", &cursor).is_err());
        assert!(CursorKey::new(vec![[8; 32]]).verify::<i32>("events?city=Oslo", &cursor).is_err());
        let signed = BASE64_URL_SAFE_NO_PAD.decode(&cursor).unwrap();
        for bit in 0..signed.len() * 8 {
            let mut forged = signed.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            let forged = BASE64_URL_SAFE_NO_PAD.encode(forged);
            assert!(key().verify::<i32>("events?city=Oslo", &forged).is_err(), "bit {bit}");
        }
        assert!(key().verify::<i32>("events?city=Oslo", "").is_err());
    }

    #[test]
    fn a_page_ends_at_its_limit_or_with_the_row_that_reaches_its_size() {
        let key = key();
        let scope = PageScope::global(&key, "messages", &());
        let cut = |sizes: &[usize], limit| scope.cut_by_size(sizes.to_vec(), limit, |bytes| *bytes, |bytes| *bytes);
        let half = PAGE_BYTES_MAX / 2;
        for (sizes, limit, count, has_more) in [
            (&[1, 1, 1][..], 2, 2, true),
            (&[1, 1], 2, 2, false),
            (&[half, half, half], 9, 2, true),
            (&[half, half], 9, 2, false),
            (&[10 * half, 1], 9, 1, true),
            (&[10 * half], 9, 1, false),
            (&[], 9, 0, false),
        ] {
            let page = cut(sizes, limit);
            assert_eq!((page.items.len(), page.next_cursor.is_some()), (count, has_more), "{sizes:?}");
        }
    }

    #[test]
    fn the_link_header_contains_the_filters() {
        let mut response = Page { items: vec![1], next_cursor: Some("abc".to_owned()) }.into_response();
        link_next(&"/things?cursor=old&city=S%C3%A3o&limit=1".parse().unwrap(), &mut response);
        assert_eq!(response.headers()[header::LINK], "</things?city=S%C3%A3o&limit=1&cursor=abc>; rel=\"next\"");
    }

    #[test]
    fn a_page_scope_binds_the_list_the_owner_and_the_filters() {
        let filters = |city: &str| Filters { city: Some(city.to_owned()), seats: None };
        let key = key();
        let scope = PageScope::of_owner(&key, "events", "acme", &filters("Oslo"));
        let cursor = scope.cursor(&42);
        assert_eq!(scope.position(Some(&cursor)).unwrap(), Some(42));
        assert_eq!(scope.position::<i32>(None).unwrap(), None);
        assert_eq!(
            key.verify::<i32>("events acme?Filters { city: Some(\"Oslo\"), seats: None }", &cursor).unwrap(),
            42,
            "cursors stay valid while this text stays the same"
        );
        for other in [
            PageScope::of_owner(&key, "joins", "acme", &filters("Oslo")),
            PageScope::of_owner(&key, "events", "globex", &filters("Oslo")),
            PageScope::of_owner(&key, "events", "acme", &filters("Rome")),
            PageScope::global(&key, "events", &filters("Oslo")),
        ] {
            let problem = other.position::<i32>(Some(&cursor)).unwrap_err();
            assert_eq!(problem.code(), "malformed-query", "{}", other.scope);
        }
    }

    #[test]
    fn only_a_page_with_a_next_one_has_a_cursor() {
        let key = key();
        let scope = PageScope::global(&key, "numbers", &());
        let page = scope.cut(vec![1, 2, 3], 2, |row| *row);
        assert_eq!(page.items, [1, 2]);
        assert_eq!(scope.position(page.next_cursor.as_deref()).unwrap(), Some(2));
        assert!(scope.cut(vec![1, 2], 2, |row| *row).next_cursor.is_none());
    }
}
