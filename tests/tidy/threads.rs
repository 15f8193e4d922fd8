//! Work that occupies a thread runs where its share is known: in a `runtime::work_pool`, whose keys take turns. The blocking threads of
//! the runtime have no shares: a caller that fills them stops everything that needs one.

use crate::paths::tokens;

/// The files that may use a thread otherwise, for work that no request triggers.
const ALLOWED: [&str; 5] = [
    "crates/runtime/src/work_pool.rs",
    // The last spans, when the process ends.
    "crates/runtime/src/telemetry.rs",
    // The texts of the one batch of notifications that a process delivers at a time.
    "crates/notify/src/flow/delivery.rs",
    // The start and the stop of the embedded server.
    "crates/server/src/embedded.rs",
    "crates/server/src/embedded/server.rs",
];

pub(crate) fn violations(path: &str, text: &str) -> Vec<String> {
    if ALLOWED.contains(&path) {
        return Vec::new();
    }
    let tokens = tokens(text);
    let is_used = |names: &[&str]| {
        tokens.windows(names.len()).any(|window| window.iter().map(String::as_str).eq(names.iter().copied()))
    };
    let found = [
        &["spawn_blocking"][..],
        &["block_in_place"],
        &["thread", "::", "spawn"],
        &["thread", "::", "Builder"],
        &["thread", "::", "scope"],
        &["thread", "::", "{"],
        &["tokio", "::", "fs"],
        &["lookup_host"],
    ];
    let found = found.into_iter().filter(|names| is_used(names));
    found.map(|names| format!("{path}: `{}` has no shares: use `runtime::work_pool`", names.concat())).collect()
}

mod samples {
    use super::*;

    #[test]
    fn threads_without_shares_are_found() {
        for bad in [
            "async fn f() { tokio::task::spawn_blocking(|| {}).await }",
            "fn f() { std::thread::spawn(|| {}); }",
            "fn f() { thread::Builder::new().spawn(|| {}); }",
            "fn f() { tokio::task::block_in_place(|| {}) }",
            "use std::thread::{self, Builder};",
            "fn f() { std::thread::scope(|scope| {}); }",
            "async fn f() { tokio::fs::read(path).await }",
            "async fn f() { tokio::net::lookup_host(name).await }",
        ] {
            assert_eq!(violations("crates/hub/src/lib.rs", bad).len(), 1, "{bad}");
            assert!(violations("crates/runtime/src/work_pool.rs", bad).is_empty());
        }
        assert!(violations("crates/hub/src/lib.rs", "fn f() { tokio::spawn(g()); thread::current(); }").is_empty());
    }
}
