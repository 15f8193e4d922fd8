//! The files of the web console, and which of them answers a request.

use std::collections::BTreeMap;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, header};
use sha2::{Digest, Sha256};

/// Names and contents of the files in `console/dist` at the time of the build. Empty: the console was not built.
pub(super) const EMBEDDED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/console_files.rs"));

/// Vite puts a hash of the content into the names of the files in this folder.
const HASHED_FOLDER: &str = "assets/";
/// Compressed copies have this ending. The build creates one for each text.
const COMPRESSED: &str = ".gz";
const FOREVER: HeaderValue = HeaderValue::from_static("public, max-age=31536000, immutable");
const ALWAYS_VALIDATE: HeaderValue = HeaderValue::from_static("no-cache");

/// The files by name.
pub(super) struct Files(BTreeMap<&'static str, File>);

#[derive(Debug)]
pub(super) struct File {
    plain: Variant,
    compressed: Option<Variant>,
    content_type: HeaderValue,
    cache_control: HeaderValue,
}

/// One encoding of a file.
#[derive(Debug)]
pub(super) struct Variant {
    pub(super) bytes: Bytes,
    pub(super) etag: HeaderValue,
}

impl Files {
    pub(super) fn new(all: &[(&'static str, &'static [u8])]) -> Files {
        let variant = |bytes: &'static [u8]| {
            let etag = HeaderValue::from_str(&format!("\"{}\"", digest(bytes)));
            // A quoted hexadecimal number is a valid header.
            etag.ok().map(|etag| Variant { bytes: Bytes::from_static(bytes), etag })
        };
        let contents: BTreeMap<_, _> = all.iter().copied().collect();
        let is_copy = |name: &str| name.strip_suffix(COMPRESSED).is_some_and(|plain| contents.contains_key(plain));
        let originals = contents.iter().filter(|(name, _)| !is_copy(name));
        let file = |(name, bytes): (&&'static str, &&'static [u8])| {
            let compressed = contents.get(format!("{name}{COMPRESSED}").as_str());
            let file = File {
                plain: variant(bytes)?,
                compressed: compressed.and_then(|bytes| variant(bytes)),
                content_type: content_type(name),
                cache_control: if name.starts_with(HASHED_FOLDER) { FOREVER } else { ALWAYS_VALIDATE },
            };
            Some((*name, file))
        };
        Files(originals.filter_map(file).collect())
    }

    pub(super) fn find(&self, name: &str) -> Option<&File> {
        self.0.get(name)
    }
}

impl File {
    /// The variant that the client gets: the compressed one if there is one and the client accepts it.
    pub(super) fn variant(&self, request: &HeaderMap) -> (&Variant, HeaderMap) {
        let mut headers = HeaderMap::from_iter([
            (header::CONTENT_TYPE, self.content_type.clone()),
            (header::CACHE_CONTROL, self.cache_control.clone()),
        ]);
        if self.compressed.is_some() {
            headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
        }
        let variant = match &self.compressed {
            Some(compressed) if accepts_gzip(request) => {
                headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
                compressed
            }
            _ => &self.plain,
        };
        headers.insert(header::ETAG, variant.etag.clone());
        (variant, headers)
    }
}

/// Whether a client that has sent this header has the same content already.
pub(super) fn is_current(request: &HeaderMap, etag: &HeaderValue) -> bool {
    let given = request.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut tags = given.flat_map(|value| value.split(',')).map(|tag| tag.trim().trim_start_matches("W/"));
    tags.any(|tag| tag == "*" || tag.as_bytes() == etag.as_bytes())
}

/// Whether the request accepts gzip: it names it (or `*`) with a weight other than 0.
fn accepts_gzip(request: &HeaderMap) -> bool {
    let given = request.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let weight_of = |coding: &str| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, "q=1"));
        let weight = weight.trim().trim_start_matches("q=").parse::<f32>().unwrap_or(0.0);
        (name.trim().to_ascii_lowercase(), weight)
    };
    let codings: BTreeMap<String, f32> = given.flat_map(|value| value.split(',')).map(weight_of).collect();
    codings.get("gzip").or_else(|| codings.get("*")).is_some_and(|weight| *weight > 0.0)
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn content_type(name: &str) -> HeaderValue {
    let ending = name.rsplit('.').next().unwrap_or_default();
    HeaderValue::from_static(match ending {
        "html" => "text/html; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "json" | "map" => "application/json",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "ico" => "image/x-icon",
        "woff2" => "font/woff2",
        "txt" => "text/plain; charset=utf-8",
        "webmanifest" => "application/manifest+json",
        _ => "application/octet-stream",
    })
}
