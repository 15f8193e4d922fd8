//! Pages by opaque cursors.
//!
//! A cursor holds the position behind the last row of a page and the filters it was made with. It is signed: a caller
//! can neither read a meaning into it nor make one up, and one used with other filters is refused.

use axum::response::{IntoResponse, Response};
use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine};
use hmac::{Hmac, Mac};
use http::{Uri, header};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::{IntoParams, ToSchema};

use crate::extract::Json;
use crate::problem::{FieldError, Place, Problem};

pub const LIMIT_DEFAULT: u32 = 20;
pub const LIMIT_MAX: u32 = 100;

const VERSION: u8 = 1;
const SCOPE_BYTES: usize = 8;
const MAC_BYTES: usize = 16;

/// Makes and opens cursors.
#[derive(Clone)]
pub struct CursorKey([u8; 32]);

/// The part of a list's query that every list has; flatten it or take it beside the filters.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// How many items a page has: 1 to 100.
    #[param(default = 20, minimum = 1, maximum = 100)]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before.
    pub cursor: Option<String>,
}

/// One page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Pass it as `cursor` to get the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

impl PageQuery {
    pub fn limit(&self) -> Result<u32, Problem> {
        match self.limit {
            None => Ok(LIMIT_DEFAULT),
            Some(limit @ 1..=LIMIT_MAX) => Ok(limit),
            Some(_) => Err(refused("/limit", format!("takes a number from 1 to {LIMIT_MAX}"))),
        }
    }
}

impl CursorKey {
    pub fn new(key: [u8; 32]) -> CursorKey {
        CursorKey(key)
    }

    /// The cursor for `position`, good only for lists of the same `scope` (route and filters).
    pub fn seal<P: Serialize>(&self, scope: &str, position: &P) -> String {
        // Positions are plain structs of ids and times, which always serialise.
        let position = serde_json::to_vec(position).unwrap_or_default();
        let mut sealed = vec![VERSION];
        sealed.extend(scope_digest(scope));
        sealed.extend(position);
        let mac = self.mac(&sealed);
        sealed.extend(mac);
        BASE64_URL_SAFE_NO_PAD.encode(sealed)
    }

    pub fn open<P: DeserializeOwned>(&self, scope: &str, cursor: &str) -> Result<P, Problem> {
        let forged = || refused("/cursor", "is not one of ours: pass `next_cursor` of the page before, unchanged");
        let sealed = BASE64_URL_SAFE_NO_PAD.decode(cursor).map_err(|_| forged())?;
        if sealed.len() < 1 + SCOPE_BYTES + MAC_BYTES || sealed[0] != VERSION {
            return Err(forged());
        }
        let (content, mac) = sealed.split_at(sealed.len() - MAC_BYTES);
        if !bool::from(subtle::ConstantTimeEq::ct_eq(self.mac(content).as_slice(), mac)) {
            return Err(forged());
        }
        if content[1..=SCOPE_BYTES] != scope_digest(scope) {
            return Err(refused("/cursor", "belongs to a list with other filters: start again without it"));
        }
        serde_json::from_slice(&content[1 + SCOPE_BYTES..]).map_err(|_| forged())
    }

    fn mac(&self, content: &[u8]) -> [u8; MAC_BYTES] {
        let mut out = [0; MAC_BYTES];
        // HMAC takes a key of any length.
        if let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(&self.0) {
            mac.update(content);
            out.copy_from_slice(&mac.finalize().into_bytes()[..MAC_BYTES]);
        }
        out
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

fn scope_digest(scope: &str) -> [u8; SCOPE_BYTES] {
    let mut out = [0; SCOPE_BYTES];
    out.copy_from_slice(&Sha256::digest(scope.as_bytes())[..SCOPE_BYTES]);
    out
}

fn refused(pointer: &str, detail: impl std::fmt::Display) -> Problem {
    let name = pointer.trim_start_matches('/');
    Problem::bad_request("malformed-query", format!("{name} {detail}")).with_errors(vec![FieldError::at(
        Place::Query,
        pointer,
        detail,
    )])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> CursorKey {
        CursorKey::new([7; 32])
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
        assert!(CursorKey::new([8; 32]).open::<i32>("events?city=Oslo", &cursor).is_err());
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
