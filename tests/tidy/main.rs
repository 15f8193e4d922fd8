//! Tidy tests: rules of the workspace that the compiler does not check.
//!
//! Each rule is a function from the text of a file to its violations. It is tested twice: on good and bad samples, which
//! prove that the rule can fail, and here on the repository.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod advisory_locks;
mod cycles;
mod dependencies;
mod documentation;
mod domain;
mod lock_file;
mod log_lines;
mod metric_help;
mod migration;
mod paths;
mod pools;
mod scripts;
mod shared_bodies;
mod size;
mod sql;
mod store;
mod threads;
mod wake;
mod words;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

#[test]
fn dependencies_point_one_way() {
    assert_none(dependencies::disallowed_crates(&metadata()));
}

#[test]
fn only_the_relay_uses_the_broker_and_runtime_uses_no_server() {
    assert_none(dependencies::disallowed_servers(&metadata()));
}

#[test]
fn the_lock_file_has_no_banned_crate_and_one_registry() {
    let read = |name: &str| fs::read_to_string(root().join(name)).unwrap();
    assert_none(lock_file::violations(&read("Cargo.lock"), &read("deny.toml")));
}

#[test]
fn scripts_name_no_host_to_download_from() {
    let scripts = [texts("scripts", ""), texts(".ci", "")].concat();
    assert!(scripts.iter().any(|(path, _)| path == "scripts/setup"));
    assert_none(each(&scripts, scripts::named_hosts));
}

#[test]
fn lists_of_packages_name_no_registry() {
    let mut lists = [texts("tests", "package-lock.json"), texts("tests", "requirements.txt")].concat();
    let console = "console/package-lock.json"; // Beside it are the packages themselves.
    lists.push((console.to_owned(), fs::read_to_string(root().join(console)).unwrap()));
    assert!(lists.len() > 4);
    assert_none(each(&lists, scripts::named_registries));
}

#[test]
fn a_migration_uses_one_schema() {
    let migrations = texts("crates", ".sql");
    assert!(!migrations.is_empty());
    assert_none(each(&migrations, migration::outside_its_schema));
}

#[test]
fn a_migration_lets_the_previous_program_run() {
    let found = |(path, text): &(String, String)| {
        migration::contractions(path, text).into_iter().map(|found| format!("{path}: {found}")).collect::<Vec<_>>()
    };
    assert_none(texts("crates", ".sql").iter().flat_map(found).collect());
}

#[test]
fn a_migration_builds_no_index_while_writes_wait() {
    assert_none(each(&texts("crates", ".sql"), migration::blocking_indexes));
}

#[test]
fn every_migration_is_listed_by_its_crate() {
    let mut migrations = texts("crates", ".sql");
    migrations.retain(|(path, _)| path.contains("/migrations/"));
    assert_none(migration::unlisted(&migrations, &texts("crates", ".rs")));
}

/// The list is empty until the first release: until then, migrations may change.
#[test]
fn a_released_migration_is_never_changed() {
    let released = include_str!("released_migrations.txt");
    assert_none(migration::changed_after_release(released, &texts("crates", ".sql")));
}

#[test]
fn a_domain_has_no_side_effects() {
    let mut domains = texts("crates", ".rs");
    let is_domain = |path: &str| path.ends_with("/domain.rs") || path.contains("/domain/");
    domains.retain(|(path, _)| path.contains("/src/") && is_domain(path));
    assert_none(each(&domains, domain::impure_code));
}

#[test]
fn sql_appears_in_stores_only() {
    // The modules of the library, the stored responses, and the embedded server are stores themselves.
    let stores = [
        "/store.rs",
        "/store/",
        "/pillarbox/",
        "/service/src/idempotency.rs",
        "/server/src/embedded",
        "/testkit/",
        "/tests/",
        "/bench/",
    ];
    let mut sources = texts("crates", ".rs");
    sources.retain(|(path, _)| !stores.iter().any(|store| path.contains(store)));
    assert!(!sources.is_empty());
    assert_none(each(&sources, sql::outside_a_store));
}

#[test]
fn no_work_depends_on_an_advisory_lock() {
    let mut files = texts("crates", ".rs");
    files.retain(|(path, _)| path.contains("/src/") && !path.starts_with("crates/testkit/"));
    files.extend(texts("crates", ".sql"));
    assert_none(files.iter().flat_map(|(path, text)| advisory_locks::violations(path, text)).collect());
}

#[test]
fn every_response_counts_in_the_memory_of_responses() {
    let mut sources = texts("crates", ".rs");
    sources.retain(|(path, _)| path.contains("/src/"));
    assert_none(sources.iter().flat_map(|(path, text)| shared_bodies::violations(path, text)).collect());
}

#[test]
fn work_that_occupies_a_thread_has_a_share() {
    let mut sources = texts("crates", ".rs");
    let is_measured = |path: &str| path.starts_with("crates/testkit/") || path.starts_with("crates/bench/");
    sources.retain(|(path, _)| path.contains("/src/") && !is_measured(path) && !is_test(path));
    assert_none(sources.iter().flat_map(|(path, text)| threads::violations(path, text)).collect());
}

#[test]
fn groups_of_the_library_depend_one_way() {
    let files = texts("crates/pillarbox/src", ".rs");
    assert!(!files.is_empty());
    assert_none(files.iter().flat_map(|(path, text)| dependencies::against_the_group_order(path, text)).collect());
}

#[test]
fn the_top_level_modules_of_a_crate_have_an_order() {
    let mut crates: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for (path, text) in texts("crates", ".rs") {
        let Some((name, file)) = path.strip_prefix("crates/").and_then(|path| path.split_once("/src/")) else {
            continue;
        };
        if !is_test(&path) {
            crates.entry(name.to_owned()).or_default().push((file.to_owned(), text));
        }
    }
    let violations = crates.iter().flat_map(|(name, files)| {
        cycles::cycles(files).into_iter().map(move |cycle| format!("crates/{name}: {cycle}"))
    });
    assert_none(violations.collect());
}

#[test]
fn paths_in_the_documentation_exist() {
    let internals = ["log", "process", "relay", "requests", "services", "webhooks"];
    let internals = internals.map(|name| format!("docs/internals/{name}.md"));
    let pages = ["README.md", "ARCHITECTURE.md", "docs/adding-a-service.md", "tests/README.md"].map(str::to_owned);
    for page in pages.iter().chain(&internals) {
        let text = fs::read_to_string(root().join(page)).unwrap();
        assert_none(documentation::missing_paths(&text, |path| root().join(path).exists()));
    }
}

#[test]
fn the_walk_of_a_webhook_is_short_and_true() {
    let read = |path: &str| fs::read_to_string(root().join(path)).ok();
    assert_none(documentation::violations(&read("docs/internals/webhooks.md").unwrap(), read));
}

#[test]
fn every_log_line_of_the_runbook_is_logged_and_read_by_a_test() {
    let runbook = fs::read_to_string(root().join("docs/runbook.md")).unwrap();
    assert!(log_lines::documented(&runbook).len() > 10);
    let joined = |texts: Vec<(String, String)>| texts.into_iter().map(|(_, text)| text).collect::<String>();
    let mut sources = texts("crates", ".rs");
    sources.retain(|(path, _)| !is_test(path));
    assert_none(log_lines::violations(&runbook, &joined(sources), &joined(texts("tests/it", ".rs"))));
}

#[test]
fn a_store_joins_the_transaction_of_its_caller() {
    let mut stores = rust_files();
    let is_store = |path: &str| path.ends_with("/store.rs") || path.contains("/store/");
    // The rule itself is in a file with this name.
    stores.retain(|(path, _)| is_store(path) && !path.starts_with("tests/tidy/"));
    assert!(!stores.is_empty());
    assert_none(each(&stores, store::opens_a_transaction));
}

#[test]
fn only_a_commit_wakes_the_readers_of_the_log() {
    let mut sources = rust_files();
    // `runtime` has the workers and their wake-ups, the library has the watcher. Tests write to a database without readers; only
    // the example service is code that others copy.
    let is_exempt =
        |path: &str| path.starts_with("crates/runtime/") || path.starts_with("crates/pillarbox/") || is_test(path);
    sources.retain(|(path, _)| path.contains("/example_service/") || !is_exempt(path));
    assert!(!sources.is_empty());
    assert_none(each(&sources, wake::wakes_readers));
}

#[test]
fn a_request_gets_no_connection_without_the_share_of_its_caller() {
    let sources = texts("crates", ".rs");
    assert!(!sources.is_empty());
    let violations = sources.iter().flat_map(|(path, text)| {
        pools::bare_pools(path, text).into_iter().map(move |violation| format!("{path}: {violation}"))
    });
    assert_none(violations.collect());
}

#[test]
fn every_metric_has_a_help_text_in_its_crate_and_the_name_of_the_product() {
    let mut sources = texts("crates", ".rs");
    sources.retain(|(path, _)| path.contains("/src/") && !is_test(path) && !path.starts_with("crates/bench/"));
    assert!(!sources.is_empty());
    assert_none(metric_help::undescribed(&sources));
    assert_none(metric_help::misnamed(&sources));
}

#[test]
fn names_use_no_banned_word() {
    let files = [rust_files(), texts("crates", ".sql")].concat();
    let violations = files.iter().flat_map(|(path, text)| {
        words::banned_names(path, text).into_iter().map(move |violation| format!("{path}: {violation}"))
    });
    assert_none(violations.collect());
}

#[test]
fn sources_and_pages_use_no_retired_word() {
    let pages = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"];
    let pages = pages.map(|page| (page.to_owned(), fs::read_to_string(root().join(page)).unwrap())).to_vec();
    let mut files = [rust_files(), pages, texts("docs", ".md"), texts("crates", ".md"), texts("tests", ".md")].concat();
    // The rule itself names the words.
    files.retain(|(path, _)| path != "tests/tidy/words.rs");
    let violations = files.iter().flat_map(|(path, text)| {
        words::retired_words(path, text).into_iter().map(move |violation| format!("{path}: {violation}"))
    });
    assert_none(violations.collect());
}

#[test]
fn structs_and_functions_have_a_limited_size() {
    let sources = rust_files();
    let structs = sources.iter().flat_map(|(path, text)| {
        size::large_structs(path, text).into_iter().map(move |violation| format!("{path}: {violation}"))
    });
    let mut violations: Vec<String> = structs.collect();
    let outside_tests: Vec<_> = sources.iter().filter(|(path, _)| !is_test(path)).cloned().collect();
    violations.extend(each(&outside_tests, size::long_functions));
    assert_none(violations);
}

#[test]
fn test_files_have_a_limited_size() {
    let mut tests = rust_files();
    tests.retain(|(path, _)| is_test(path));
    assert!(!tests.is_empty());
    assert_none(each(&tests, size::long_test_files));
}

#[test]
fn every_source_file_starts_with_its_responsibility() {
    assert_none(each(&rust_files(), without_module_doc));
}

/// A file must open with a `//!` line that says what it is responsible for.
fn without_module_doc(text: &str) -> Vec<String> {
    let has_doc = text.lines().next().and_then(|line| line.strip_prefix("//! ")).is_some_and(|doc| !doc.is_empty());
    (!has_doc).then(|| "the first line must be `//! ...`".to_owned()).into_iter().collect()
}

#[test]
fn a_file_without_module_doc_is_found() {
    assert_none(without_module_doc("//! Reads the log.\n\nuse std::fs;\n"));
    for bad in ["", "use std::fs;\n//! Reads the log.", "// Reads the log.", "//!", "\n//! Reads the log."] {
        assert_eq!(without_module_doc(bad).len(), 1, "{bad}");
    }
}

#[test]
fn no_test_is_ignored() {
    assert_none(each(&rust_files(), ignored_tests));
}

fn ignored_tests(text: &str) -> Vec<String> {
    let attribute = ["#[", "ignore"].concat();
    text.lines().filter(|line| line.contains(&attribute)).map(str::to_owned).collect()
}

#[test]
fn an_ignored_test_is_found() {
    let sample = ["#[test]\n#[", "ignore = \"slow\"]\nfn a() {}"].concat();
    assert_eq!(ignored_tests(&sample).len(), 1);
    assert_none(ignored_tests("#[test]\nfn a() {}"));
}

fn is_test(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs")
}

fn assert_none(violations: Vec<String>) {
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

/// Applies a rule to each file. Returns the violations with the paths of their files.
fn each(texts: &[(String, String)], rule: impl Fn(&str) -> Vec<String>) -> Vec<String> {
    let in_file = |(path, text): &(String, String)| -> Vec<String> {
        rule(text).into_iter().map(|violation| format!("{path}: {violation}")).collect()
    };
    texts.iter().flat_map(in_file).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// The sources of the workspace: the crates, and the integration tests.
fn rust_files() -> Vec<(String, String)> {
    ["crates", "tests/it", "tests/extended", "tests/tidy", "tests/example_service"]
        .map(|folder| texts(folder, ".rs"))
        .concat()
}

/// Returns the path (within the repository) and the text of every file under `folder` whose path has this ending.
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

/// The manifests of the workspace, as cargo reads them.
fn metadata() -> Value {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--format-version", "1", "--offline"]).current_dir(root());
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}
