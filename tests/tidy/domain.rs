//! A `domain.rs` contains values and rules: no clock, no I/O, no async code.

use crate::paths::{paths, tokens};

const MAY_USE: [&str; 17] = [
    "std",
    "core",
    "crate",
    "super",
    "self",
    "chrono",
    "chrono_tz",
    "contracts",
    "http_kit",
    "runtime",
    "serde",
    "serde_json",
    "sha2",
    "strum",
    "thiserror",
    "utoipa",
    "uuid",
];

const MAY_NOT_USE: [&str; 13] = [
    "runtime::batch",
    "runtime::clock",
    "http_kit::serve",
    "http_kit::web",
    "runtime::worker",
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::time::SystemTime",
    "std::time::Instant",
    "std::env",
    "std::io",
];

/// Plain values of the library, which is the log and its database, and sqlx's derives, which decode the columns of a row.
const ALSO_ALLOWED: [&str; 4] =
    ["pillarbox::database::Incarnation", "pillarbox::log::Tenant", "sqlx::FromRow", "sqlx::Type"];

const PRINTING: [&str; 5] = ["print", "println", "eprint", "eprintln", "dbg"];

pub(crate) fn impure_code(text: &str) -> Vec<String> {
    // Unit tests are exempt. They are at the end of the file: clippy refuses items after them.
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let mut violations = Vec::new();
    for path in paths(text) {
        let root = path.split("::").next().unwrap();
        let is_refused = |refused: &&str| path == **refused || path.starts_with(&format!("{refused}::"));
        if !MAY_USE.contains(&root) && !ALSO_ALLOWED.contains(&path.as_str()) {
            violations.push(format!("a domain must not use `{root}` (`{path}`)"));
        } else if MAY_NOT_USE.iter().any(is_refused) || path == "std::*" || path == "std::time::*" {
            violations.push(format!("a domain must not use `{path}`"));
        } else if path.ends_with("::now") {
            violations.push(format!("a domain must receive the time as a parameter (`{path}`)"));
        }
    }
    let tokens = tokens(text);
    if tokens.iter().any(|token| token == "async" || token == "await") {
        violations.push("a domain must not be async".to_owned());
    }
    if tokens.windows(2).any(|pair| PRINTING.contains(&pair[0].as_str()) && pair[1] == "!") {
        violations.push("a domain must not print".to_owned());
    }
    violations
}

mod samples {
    use super::*;

    #[test]
    fn values_and_rules_pass() {
        let good = "
            //! Uses no sqlx::query and no async.
            use std::collections::BTreeMap;
            use std::time::Duration;
            use chrono::{DateTime, Utc};
            use serde::Serialize;
            use pillarbox::log::Tenant;
            use super::Event;
            #[derive(Debug, sqlx::FromRow)]
            pub struct Stored { pub id: i64 }
            #[derive(Debug, thiserror::Error)]
            #[error(\"std::fs in a string\")]
            pub struct Refused;
            #[derive(sqlx::FromRow)]
            pub struct Stored { #[sqlx(rename = \"at\")] since: DateTime<Utc> }
            mod status { pub fn of(x: u32) -> u32 { u32::max(x, 1) } }
            pub fn late(now: DateTime<Utc>, at: DateTime<Utc>) -> bool { status::of(1) > 0 && now > at }
            #[cfg(test)]\nmod tests { use tokio::time; }";
        assert_eq!(impure_code(good), [""; 0]);
    }

    #[test]
    fn side_effects_are_refused() {
        for bad in [
            "use sqlx::PgPool;",
            "pub use sqlx::PgPool;",
            "use pillarbox::log::{Tenant, post};",
            "pub(crate) use {chrono::Utc, runtime::clock::Clock};",
            "use std::{collections::BTreeMap, fs};",
            "use std::fs as files;",
            "use std::*;",
            "use std::time::{Duration, Instant};",
            "use std::time; fn f() { time::SystemTime::now(); }",
            "fn f() { std::env::var(\"HOME\"); }",
            "fn f() { ::std::thread::sleep(x); }",
            "fn f(stream: std::net::TcpStream) {}",
            "fn f() -> std::io::Result<()> { Ok(()) }",
            "fn f() { tokio::spawn(x); }",
            "fn f() { std::process::exit(1) }",
            "use chrono::Utc; fn f() { Utc::now(); }",
            "fn f() { chrono::Local::now(); }",
            "async fn f() {}",
            "fn f() { async move { 1 }; }",
            "fn f() { println!(\"x\") }",
        ] {
            assert!(!impure_code(bad).is_empty(), "{bad}");
        }
    }
}
