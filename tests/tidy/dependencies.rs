//! The allowed dependencies between crates, checked on the output of `cargo metadata`. Dev-dependencies are exempt, since
//! they do not ship.

use std::collections::BTreeMap;

use serde_json::Value;

/// The workspace crates that each crate may use. Services never use each other.
const MAY_USE: &[(&str, &[&str])] = &[
    ("pillarbox-contracts", &[]),
    ("pillarbox-runtime", &[]),
    ("pillarbox-webhook-client", &[]),
    ("pillarbox", &["pillarbox-runtime"]),
    ("pillarbox-http-kit", &["pillarbox", "pillarbox-runtime"]),
    ("pillarbox-service", &["pillarbox", "pillarbox-http-kit", "pillarbox-runtime"]),
    ("pillarbox-events", SERVICE_MAY_USE),
    (
        "pillarbox-hub",
        &[
            "pillarbox",
            "pillarbox-contracts",
            "pillarbox-http-kit",
            "pillarbox-runtime",
            "pillarbox-service",
            "pillarbox-webhook-client",
        ],
    ),
    ("pillarbox-identity", SERVICE_MAY_USE),
    ("pillarbox-joins", SERVICE_MAY_USE),
    ("pillarbox-notify", SERVICE_MAY_USE),
    ("pillarbox-progress", SERVICE_MAY_USE),
    // The overview shows what the hub and the notify service have given up, and a change of a tenant reaches the hub.
    (
        "pillarbox-admin",
        &[
            "pillarbox",
            "pillarbox-contracts",
            "pillarbox-http-kit",
            "pillarbox-hub",
            "pillarbox-notify",
            "pillarbox-runtime",
            "pillarbox-service",
        ],
    ),
    // Clients of the HTTP API. `listen` verifies signatures.
    ("pillarbox-cli", &["pillarbox", "pillarbox-http-kit", "pillarbox-runtime", "pillarbox-webhook-client"]),
    ("pillarbox-relay", &["pillarbox", "pillarbox-contracts", "pillarbox-runtime"]),
    (
        "pillarbox-server",
        &[
            "pillarbox",
            "pillarbox-admin",
            "pillarbox-cli",
            "pillarbox-contracts",
            "pillarbox-events",
            "pillarbox-hub",
            "pillarbox-identity",
            "pillarbox-joins",
            "pillarbox-http-kit",
            "pillarbox-notify",
            "pillarbox-progress",
            "pillarbox-relay",
            "pillarbox-webhook-client",
            "pillarbox-runtime",
            "pillarbox-service",
        ],
    ),
    (
        "pillarbox-testkit",
        &[
            "pillarbox",
            "pillarbox-contracts",
            "pillarbox-events",
            "pillarbox-hub",
            "pillarbox-http-kit",
            "pillarbox-relay",
            "pillarbox-runtime",
            "pillarbox-server",
            "pillarbox-webhook-client",
        ],
    ),
    ("pillarbox-tests", &[]),
    ("pillarbox-bench", &["pillarbox", "pillarbox-contracts", "pillarbox-http-kit", "pillarbox-runtime"]),
];
const SERVICE_MAY_USE: &[&str] =
    &["pillarbox", "pillarbox-contracts", "pillarbox-http-kit", "pillarbox-runtime", "pillarbox-service"];

/// What the library must not use: another program that adds it has its own.
const NOT_IN_THE_LIBRARY: [&str; 8] =
    ["axum", "utoipa", "hyper", "opentelemetry", "jsonwebtoken", "figment", "clap", "metrics-exporter"];

/// `runtime` and `contracts` use no database, no broker and no cache; the commands of `cli` call the HTTP API.
const WITHOUT_SERVERS: [&str; 3] = ["pillarbox-cli", "pillarbox-contracts", "pillarbox-runtime"];
const SERVERS: [&str; 5] = ["sqlx", "postgres", "lapin", "amqp", "redis"];

/// The benchmark also measures the broker itself.
const MAY_USE_THE_BROKER: [&str; 2] = ["pillarbox-relay", "pillarbox-bench"];
const BROKERS: [&str; 2] = ["lapin", "amqp"];

pub(crate) fn disallowed_crates(metadata: &Value) -> Vec<String> {
    let rules: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
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
                || (krate == "pillarbox" && is_one_of(&NOT_IN_THE_LIBRARY, name))
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

/// The groups of `pillarbox`, each of which may use itself and those before it.
const LIBRARY_GROUPS: [&str; 4] = ["database", "log", "consumers", "operations"];

/// Uses of a later group in a file of `pillarbox`: `path` is the file in the repository.
pub(crate) fn against_the_group_order(path: &str, text: &str) -> Vec<String> {
    let group_of = |name: &str| LIBRARY_GROUPS.iter().position(|group| *group == name);
    let file = path.strip_prefix("crates/pillarbox/src/").unwrap_or_default();
    let Some(own) = group_of(file.split(['/', '.']).next().unwrap_or_default()) else { return Vec::new() };
    let used = text.split("crate::").skip(1).map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next());
    let later = used.flatten().filter(|name| group_of(name).is_some_and(|group| group > own));
    later.map(|name| format!("{path}: `{}` must not use `{name}`", LIBRARY_GROUPS[own])).collect()
}

mod samples {
    use super::*;

    #[test]
    fn a_group_of_the_library_uses_earlier_groups_only() {
        let path = "crates/pillarbox/src/log/reader.rs";
        assert_eq!(against_the_group_order(path, "use crate::database::Snapshot; use crate::log::Filter;"), [""; 0]);
        assert_eq!(against_the_group_order(path, "use crate::consumers::Runtime;").len(), 1);
        assert_eq!(
            against_the_group_order("crates/pillarbox/src/lib.rs", "pub use crate::operations::status;"),
            [""; 0]
        );
    }
    use serde_json::json;

    fn packages(packages: &[(&str, Value)]) -> Value {
        let package = |(name, dependencies): &(&str, Value)| json!({"name": name, "dependencies": dependencies});
        json!({"packages": packages.iter().map(package).collect::<Vec<_>>()})
    }

    #[test]
    fn every_kind_of_dependency_is_checked_except_dev() {
        let runtime = ("pillarbox-runtime", json!([]));
        let library = |dependency: Value| packages(&[runtime.clone(), ("pillarbox", json!([dependency]))]);
        assert!(disallowed_crates(&library(json!({"name": "pillarbox-runtime", "kind": null}))).is_empty());
        let violations = |dependency: Value| {
            let library = ("pillarbox", json!([]));
            disallowed_crates(&packages(&[("pillarbox-runtime", json!([dependency])), library])).len()
        };
        assert_eq!(violations(json!({"name": "pillarbox", "kind": null})), 1);
        assert_eq!(violations(json!({"name": "pillarbox", "kind": null, "rename": "serde"})), 1);
        assert_eq!(violations(json!({"name": "pillarbox", "kind": null, "target": "cfg(unix)"})), 1);
        assert_eq!(violations(json!({"name": "pillarbox", "kind": "build"})), 1);
        assert_eq!(violations(json!({"name": "pillarbox", "kind": "dev"})), 0);
        assert_eq!(disallowed_crates(&packages(&[("pillarbox-new", json!([]))])).len(), 1, "an unlisted crate");
    }

    #[test]
    fn servers_are_refused_in_crates_without_servers() {
        let uses =
            |krate: &str, name: &str| disallowed_servers(&packages(&[(krate, json!([{"name": name, "kind": null}]))]));
        assert!(uses("pillarbox-runtime", "serde").is_empty());
        assert!(uses("pillarbox", "sqlx").is_empty());
        assert_eq!(uses("pillarbox", "axum").len(), 1);
        assert!(uses("pillarbox-relay", "lapin").is_empty());
        for server in ["sqlx", "sqlx-core", "tokio-postgres", "lapin", "redis"] {
            assert_eq!(uses("pillarbox-runtime", server).len(), 1, "{server}");
            assert_eq!(uses("pillarbox-contracts", server).len(), 1, "{server}");
        }
        assert_eq!(uses("pillarbox-server", "lapin").len(), 1);
    }
}
