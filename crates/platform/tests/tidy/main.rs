//! The rules of the house that a compiler does not hold.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Which crates of ours each may use. Services see `kit`, `contracts` and `mailbox`, and never each other.
const MAY_USE: [(&str, &[&str]); 7] = [
    ("contracts", &[]),
    ("kit", &[]),
    ("mailbox", &["contracts", "kit"]),
    ("relay", &["contracts", "kit", "mailbox"]),
    ("platform", &["contracts", "kit", "mailbox", "relay"]),
    ("testkit", &["contracts", "kit", "mailbox", "relay", "pillarbox"]),
    ("bench", &["contracts", "kit"]),
];

/// What a `domain.rs` may import: values and rules, no clock, no I/O, no waiting.
const DOMAIN_MAY_IMPORT: [&str; 9] =
    ["std", "core", "crate", "super", "self", "chrono", "contracts", "serde", "thiserror"];

/// What `kit` and `contracts` must not name: they know no table and no broker.
const NO_SERVERS: [&str; 3] = ["sqlx", "lapin", "redis"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_str().unwrap().ends_with(ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The names under `[dependencies]` of a crate, but not its dev-dependencies.
fn dependencies(krate: &str) -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("crates").join(krate).join("Cargo.toml")).unwrap();
    let section = manifest.split("\n[").find(|section| section.starts_with("dependencies]")).unwrap_or_default();
    section
        .lines()
        .skip(1)
        .filter_map(|line| Some(line.split(['.', ' ', '=']).next()?.trim().to_owned()))
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn dependencies_point_one_way() {
    let rules: BTreeMap<&str, &[&str]> = MAY_USE.into_iter().collect();
    let ours: BTreeSet<&str> = rules.keys().copied().chain(["pillarbox"]).collect();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let krate = entry.unwrap().file_name().into_string().unwrap();
        let may = rules.get(krate.as_str()).unwrap_or_else(|| panic!("say in MAY_USE what `{krate}` may use"));
        for used in dependencies(&krate).iter().filter(|name| ours.contains(name.as_str())) {
            assert!(may.contains(&used.as_str()), "`{krate}` must not use `{used}`");
        }
    }
}

#[test]
fn kit_and_contracts_know_no_server() {
    for krate in ["kit", "contracts"] {
        let used = dependencies(krate);
        let servers: Vec<_> = NO_SERVERS.iter().filter(|name| used.contains(**name)).collect();
        assert!(servers.is_empty(), "`{krate}` must not use {servers:?}");
    }
}

#[test]
fn only_the_relay_opens_a_broker_connection() {
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let krate = entry.unwrap().file_name().into_string().unwrap();
        assert!(
            krate == "relay" || krate == "bench" || !dependencies(&krate).contains("lapin"),
            "`{krate}` must not use lapin"
        );
    }
}

#[test]
fn a_migration_touches_one_schema() {
    let migrations = files(&root().join("migrations"), ".sql");
    assert!(!migrations.is_empty());
    for file in migrations {
        let text = fs::read_to_string(&file).unwrap();
        let declared = text.lines().next().and_then(|line| line.strip_prefix("-- schema: "));
        let declared = declared.unwrap_or_else(|| panic!("{}: the first line is `-- schema: NAME`", file.display()));
        let code: String = text.lines().map(|line| line.split("--").next().unwrap()).collect::<Vec<_>>().join("\n");
        for (at, _) in code.match_indices("pillarbox") {
            let name: String = code[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            let is_schema = code[at + name.len()..].starts_with('.') || code[..at].trim_end().ends_with("schema");
            assert!(!is_schema || name == declared, "{}: names schema {name}, declares {declared}", file.display());
        }
    }
}

#[test]
fn a_domain_imports_no_io() {
    for file in files(&root().join("crates"), "/domain.rs") {
        let text = fs::read_to_string(&file).unwrap();
        assert!(!text.contains("async fn"), "{}: a domain does not wait", file.display());
        for line in text.lines().filter_map(|line| line.trim().strip_prefix("use ")) {
            let name = line.split([':', ';', ' ']).next().unwrap();
            assert!(DOMAIN_MAY_IMPORT.contains(&name), "{}: a domain does not import {name}", file.display());
        }
        assert!(!text.contains("Utc::now"), "{}: time comes in as a parameter", file.display());
    }
}

#[test]
fn sql_lives_in_store_alone() {
    // The rooms of `mailbox` and the embedded server are stores by nature.
    let allowed = |path: &str| {
        [
            "/store.rs",
            "/store/",
            "crates/mailbox/",
            "crates/platform/src/embedded",
            "crates/testkit/",
            "/tests/",
            "crates/bench/",
        ]
        .iter()
        .any(|part| path.contains(part))
    };
    for file in files(&root().join("crates"), ".rs") {
        let path = file.to_str().unwrap();
        let text = fs::read_to_string(&file).unwrap();
        if path.contains("/target/") || allowed(path) {
            continue;
        }
        assert!(!text.contains("sqlx::query"), "{path}: SQL lives in store.rs");
    }
}

#[test]
fn no_test_is_ignored() {
    let attribute = ["#[", "ignore"].concat();
    for file in files(&root().join("crates"), ".rs") {
        let text = fs::read_to_string(&file).unwrap();
        assert!(!text.contains(&attribute), "{}: a test that does not run proves nothing", file.display());
    }
}
