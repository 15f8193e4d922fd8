//! Who may depend on whom, in the words of `cargo metadata`. Dev-dependencies are free: they do not ship.

use std::collections::BTreeMap;

use serde_json::Value;

/// Which crates of ours each may use. Services see `kit`, `contracts` and `mailbox`, and never each other.
const MAY_USE: [(&str, &[&str]); 10] = [
    ("pillarbox-contracts", &[]),
    ("pillarbox-kit", &[]),
    ("pillarbox-mailbox", &["pillarbox-contracts", "pillarbox-kit"]),
    ("pillarbox-events", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-hub", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-joins", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    ("pillarbox-relay", &["pillarbox-contracts", "pillarbox-kit", "pillarbox-mailbox"]),
    (
        "pillarbox",
        &[
            "pillarbox-contracts",
            "pillarbox-events",
            "pillarbox-hub",
            "pillarbox-joins",
            "pillarbox-kit",
            "pillarbox-mailbox",
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

/// `kit` and `contracts` know no table, no broker and no cache.
const KNOW_NO_SERVER: [&str; 2] = ["pillarbox-contracts", "pillarbox-kit"];
const SERVERS: [&str; 5] = ["sqlx", "postgres", "lapin", "amqp", "redis"];

/// The benchmark measures the broker beside us.
const MAY_USE_THE_BROKER: [&str; 2] = ["pillarbox-relay", "pillarbox-bench"];
const BROKERS: [&str; 2] = ["lapin", "amqp"];

pub(crate) fn against_the_direction(metadata: &Value) -> Vec<String> {
    let rules = BTreeMap::from(MAY_USE);
    let used = dependencies(metadata);
    let unlisted = used.keys().filter(|krate| !rules.contains_key(**krate));
    let mut violations: Vec<_> = unlisted.map(|krate| format!("say in MAY_USE what `{krate}` may use")).collect();
    for (krate, may) in &rules {
        let ours = used.get(krate).into_iter().flatten().filter(|name| used.contains_key(**name));
        violations
            .extend(ours.filter(|name| !may.contains(name)).map(|name| format!("`{krate}` must not use `{name}`")));
    }
    violations
}

pub(crate) fn on_servers(metadata: &Value) -> Vec<String> {
    let is_one_of = |families: &[&str], name: &str| families.iter().any(|family| name.contains(family));
    let mut violations = Vec::new();
    for (krate, names) in dependencies(metadata) {
        let refused = names.into_iter().filter(|name| {
            (KNOW_NO_SERVER.contains(&krate) && is_one_of(&SERVERS, name))
                || (!MAY_USE_THE_BROKER.contains(&krate) && is_one_of(&BROKERS, name))
        });
        violations.extend(refused.map(|name| format!("`{krate}` must not use `{name}`")));
    }
    violations
}

/// Each crate and what it is built with, under the packages' own names, whatever a manifest renames them to.
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

mod samples {
    use super::*;
    use serde_json::json;

    fn packages(packages: &[(&str, Value)]) -> Value {
        let package = |(name, dependencies): &(&str, Value)| json!({"name": name, "dependencies": dependencies});
        json!({"packages": packages.iter().map(package).collect::<Vec<_>>()})
    }

    #[test]
    fn the_direction_is_held_for_every_kind_of_dependency_but_dev() {
        let kit = ("pillarbox-kit", json!([]));
        let mailbox = |dependency: Value| packages(&[kit.clone(), ("pillarbox-mailbox", json!([dependency]))]);
        assert!(against_the_direction(&mailbox(json!({"name": "pillarbox-kit", "kind": null}))).is_empty());
        let upwards = |dependency: Value| {
            let mailbox = ("pillarbox-mailbox", json!([]));
            against_the_direction(&packages(&[("pillarbox-kit", json!([dependency])), mailbox])).len()
        };
        assert_eq!(upwards(json!({"name": "pillarbox-mailbox", "kind": null})), 1);
        assert_eq!(upwards(json!({"name": "pillarbox-mailbox", "kind": null, "rename": "serde"})), 1);
        assert_eq!(upwards(json!({"name": "pillarbox-mailbox", "kind": null, "target": "cfg(unix)"})), 1);
        assert_eq!(upwards(json!({"name": "pillarbox-mailbox", "kind": "build"})), 1);
        assert_eq!(upwards(json!({"name": "pillarbox-mailbox", "kind": "dev"})), 0);
        assert_eq!(against_the_direction(&packages(&[("pillarbox-new", json!([]))])).len(), 1, "an unlisted crate");
    }

    #[test]
    fn servers_are_refused_where_they_are_not_known() {
        let uses = |krate: &str, name: &str| on_servers(&packages(&[(krate, json!([{"name": name, "kind": null}]))]));
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
