//! The rules of the house that a compiler does not hold.
//!
//! Each rule is a function from text to what breaks it, and is tested twice: on samples, good and bad, which prove that
//! the rule can fail; and here, on the repository.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod dependencies;
mod domain;
mod migration;
mod paths;
mod sql;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

#[test]
fn dependencies_point_one_way() {
    assert_none(dependencies::against_the_direction(&metadata()));
}

#[test]
fn kit_and_contracts_know_no_server_and_only_the_relay_opens_a_broker_connection() {
    assert_none(dependencies::on_servers(&metadata()));
}

#[test]
fn a_migration_touches_one_schema() {
    let migrations = texts("migrations", ".sql");
    assert!(!migrations.is_empty());
    assert_none(each(&migrations, migration::outside_its_schema));
}

#[test]
fn a_domain_decides_and_does_nothing() {
    let mut domains = texts("crates", ".rs");
    let is_domain = |path: &str| path.ends_with("/domain.rs") || path.contains("/domain/");
    domains.retain(|(path, _)| path.contains("/src/") && is_domain(path));
    // There may be none yet: that the rule works, its samples show.
    assert_none(each(&domains, domain::does_something));
}

#[test]
fn sql_lives_in_store_alone() {
    // The rooms of `mailbox` and the embedded server are stores by nature.
    let stores = ["/store.rs", "/store/", "/mailbox/src/", "/platform/src/embedded", "/testkit/", "/tests/", "/bench/"];
    let mut sources = texts("crates", ".rs");
    sources.retain(|(path, _)| !stores.iter().any(|store| path.contains(store)));
    assert!(!sources.is_empty());
    assert_none(each(&sources, sql::outside_a_store));
}

#[test]
fn no_test_is_ignored() {
    assert_none(each(&texts("crates", ".rs"), ignored_tests));
}

/// A test that does not run proves nothing.
fn ignored_tests(text: &str) -> Vec<String> {
    let attribute = ["#[", "ignore"].concat();
    text.lines().filter(|line| line.contains(&attribute)).map(str::to_owned).collect()
}

#[test]
fn an_ignored_test_is_seen() {
    let sample = ["#[test]\n#[", "ignore = \"slow\"]\nfn a() {}"].concat();
    assert_eq!(ignored_tests(&sample).len(), 1);
    assert_none(ignored_tests("#[test]\nfn a() {}"));
}

fn assert_none(violations: Vec<String>) {
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

/// Every violation of a rule, with the file it stands in.
fn each(texts: &[(String, String)], rule: impl Fn(&str) -> Vec<String>) -> Vec<String> {
    let in_file = |(path, text): &(String, String)| -> Vec<String> {
        rule(text).into_iter().map(|violation| format!("{path}: {violation}")).collect()
    };
    texts.iter().flat_map(in_file).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Path in the repository and text of every file under `folder` whose path ends so.
fn texts(folder: &str, ending: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() && !name.ends_with("/target") {
                folders.push(path);
            } else if name.ends_with(ending) {
                found.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

/// What cargo itself makes of our manifests, in whatever way they are written.
fn metadata() -> Value {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--format-version", "1", "--offline"]).current_dir(root());
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}
