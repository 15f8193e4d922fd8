//! The allowed dependencies between crates, checked on the output of `cargo metadata`. Dev-dependencies are exempt, since
//! they do not ship.

use std::collections::BTreeMap;

use serde_json::Value;

/// The workspace crates that each crate may use. Services use `kit`, `contracts` and `mailbox`, and never each other.
const MAY_USE: [(&str, &[&str]); 13] = [
    ("pillarbox-contracts", &[]),
    ("pillarbox-kit", &[]),
    ("pillarbox-mailbox", &["pillarbox-contracts", "pillarbox-kit"]),
    ("pillarbox-events", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-hub", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-identity", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-joins", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-notify", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-progress", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-relay", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    (
        "pillarbox",
        &[
            "pillarbox-contracts",
            "pillarbox-events",
            "pillarbox-hub",
            "pillarbox-identity",
            "pillarbox-joins",
            "pillarbox-kit",
            "pillarbox-mailbox",
            "pillarbox-notify",
            "pillarbox-progress",
            "pillarbox-relay",
        ],
    ),
    (
        "pillarbox-testkit",
        &[
            "pillarbox-contracts",
            "pillarbox-events",
            "pillarbox-hub",
            "pillarbox-kit",
            "pillarbox-mailbox",
            "pillarbox-relay",
            "pillarbox",
        ],
    ),
    ("pillarbox-bench", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
];

/// `kit` and `contracts` use no database, no broker and no cache.
const WITHOUT_SERVERS: [&str; 2] = ["pillarbox-contracts", "pillarbox-kit"];
const SERVERS: [&str; 5] = ["sqlx", "postgres", "lapin", "amqp", "redis"];

/// The benchmark also measures the broker itself.
const MAY_USE_THE_BROKER: [&str; 2] = ["pillarbox-relay", "pillarbox-bench"];
const BROKERS: [&str; 2] = ["lapin", "amqp"];

pub(crate) fn disallowed_crates(metadata: &Value) -> Vec<String> {
    let rules = BTreeMap::from(MAY_USE);
    let used = dependencies(metadata);
    let unlisted = used.keys().filter(|krate| !rules.contains_key(**krate));
    let mut violations: Vec<_> = unlisted.map(|krate| format!("add `{krate}` to MAY_USE")).collect();
    for (krate, may) in &rules {
        let ours = used.get(krate).into_iter().flatten().filter(|name| used.contains_key(**name));
        violations
            .extend(ours.filter(|name| !may.contains(name)).map(|name| format!("`{krate}` must not use `{name}`")));
    }
    violations
}

pub(crate) fn disallowed_servers(metadata: &Value) -> Vec<String> {
    let is_one_of = |families: &[&str], name: &str| families.iter().any(|family| name.contains(family));
    let mut violations = Vec::new();
    for (krate, names) in dependencies(metadata) {
        let refused = names.into_iter().filter(|name| {
            (WITHOUT_SERVERS.contains(&krate) && is_one_of(&SERVERS, name))
                || (!MAY_USE_THE_BROKER.contains(&krate) && is_one_of(&BROKERS, name))
        });
        violations.extend(refused.map(|name| format!("`{krate}` must not use `{name}`")));
    }
    violations
}

/// Each crate and its dependencies, by the names of the packages even if a manifest renames them.
fn dependencies(metadata: &Value) -> BTreeMap<&str, Vec<&str>> {
    let packages = metadata["packages"].as_array().unwrap();
    packages
        .iter()
        .map(|package| {
            let all = package["dependencies"].as_array().unwrap().iter();
            let built_with = all.filter(|dependency| dependency["kind"] != "dev");
            let names = built_with.map(|dependency| dependency["name"].as_str().unwrap()).collect();
            (package["name"].as_str().unwrap(), names)
        })
        .collect()
}

/// The groups of `mailbox`, each of which may use itself and those before it.
const MAILBOX_GROUPS: [&str; 4] = ["database", "log", "consumers", "operations"];

/// Uses of a later group in a file of `mailbox`: `path` is the file in the repository.
pub(crate) fn against_the_group_order(path: &str, text: &str) -> Vec<String> {
    let group_of = |name: &str| MAILBOX_GROUPS.iter().position(|group| *group == name);
    let file = path.strip_prefix("crates/mailbox/src/").unwrap_or_default();
    let Some(own) = group_of(file.split(['/', '.']).next().unwrap_or_default()) else { return Vec::new() };
    let used = text.split("crate::").skip(1).map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next());
    let later = used.flatten().filter(|name| group_of(name).is_some_and(|group| group > own));
    later.map(|name| format!("{path}: `{}` must not use `{name}`", MAILBOX_GROUPS[own])).collect()
}

mod samples {
    use super::*;

    #[test]
    fn a_group_of_mailbox_uses_earlier_groups_only() {
        let path = "crates/mailbox/src/log/reader.rs";
        assert_eq!(against_the_group_order(path, "use crate::database::Snapshot; use crate::log::Filter;"), [""; 0]);
        assert_eq!(against_the_group_order(path, "use crate::consumers::Runtime;").len(), 1);
        assert_eq!(against_the_group_order("crates/mailbox/src/lib.rs", "pub use crate::operations::status;"), [""; 0]);
    }
    use serde_json::json;

    fn packages(packages: &[(&str, Value)]) -> Value {
        let package = |(name, dependencies): &(&str, Value)| json!({"name": name, "dependencies": dependencies});
        json!({"packages": packages.iter().map(package).collect::<Vec<_>>()})
    }

    #[test]
    fn every_kind_of_dependency_is_checked_except_dev() {
        let kit = ("pillarbox-kit", json!([]));
        let mailbox = |dependency: Value| packages(&[kit.clone(), ("pillarbox-mailbox", json!([dependency]))]);
        assert!(disallowed_crates(&mailbox(json!({"name": "pillarbox-kit", "kind": null}))).is_empty());
        let violations = |dependency: Value| {
            let mailbox = ("pillarbox-mailbox", json!([]));
            disallowed_crates(&packages(&[("pillarbox-kit", json!([dependency])), mailbox])).len()
        };
        assert_eq!(violations(json!({"name": "pillarbox-mailbox", "kind": null})), 1);
        assert_eq!(violations(json!({"name": "pillarbox-mailbox", "kind": null, "rename": "serde"})), 1);
        assert_eq!(violations(json!({"name": "pillarbox-mailbox", "kind": null, "target": "cfg(unix)"})), 1);
        assert_eq!(violations(json!({"name": "pillarbox-mailbox", "kind": "build"})), 1);
        assert_eq!(violations(json!({"name": "pillarbox-mailbox", "kind": "dev"})), 0);
        assert_eq!(disallowed_crates(&packages(&[("pillarbox-new", json!([]))])).len(), 1, "an unlisted crate");
    }

    #[test]
    fn servers_are_refused_in_crates_without_servers() {
        let uses =
            |krate: &str, name: &str| disallowed_servers(&packages(&[(krate, json!([{"name": name, "kind": null}]))]));
        assert!(uses("pillarbox-kit", "serde").is_empty());
        assert!(uses("pillarbox-mailbox", "sqlx").is_empty());
        assert!(uses("pillarbox-relay", "lapin").is_empty());
        for server in ["sqlx", "sqlx-core", "tokio-postgres", "lapin", "redis"] {
            assert_eq!(uses("pillarbox-kit", server).len(), 1, "{server}");
            assert_eq!(uses("pillarbox-contracts", server).len(), 1, "{server}");
        }
        assert_eq!(uses("pillarbox", "lapin").len(), 1);
    }
}
