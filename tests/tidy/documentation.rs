//! The documentation: the walk of a webhook in docs/internals/webhooks.md is short and true, and paths exist.

use std::collections::BTreeSet;

const FUNCTIONS_MAX: usize = 40;
const FILES_MAX: usize = 22;

/// What is wrong with the walk in `page`. `read` returns the text of a file of the repository.
pub(crate) fn violations(page: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut violations = Vec::new();
    let (mut files, mut functions) = (BTreeSet::new(), 0);
    for (file, names) in steps(page) {
        let Some(text) = read(file) else {
            violations.push(format!("{file} does not exist"));
            continue;
        };
        files.insert(file);
        functions += names.len();
        let is_missing =
            |name: &&&str| !text.contains(&format!("fn {name}(")) && !text.contains(&format!("fn {name}<"));
        violations.extend(names.iter().filter(is_missing).map(|name| format!("{file} has no function `{name}`")));
    }
    if functions == 0 || functions > FUNCTIONS_MAX || files.len() > FILES_MAX {
        violations.push(format!("the walk has {functions} functions in {} files", files.len()));
    }
    violations
}

/// The file and the functions of each row of the table: `| step | file | functions |`.
fn steps(page: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    rows.filter_map(|row| {
        let mut cells = row.rsplitn(3, " | ");
        let (functions, file) = (cells.next()?, cells.next()?);
        let file = file.strip_prefix("`crates/").and_then(|_| file.strip_prefix('`')?.strip_suffix('`'))?;
        Some((file, functions.split(", ").map(function_name).collect()))
    })
}

/// The folders whose paths documentation may name.
const FOLDERS: [&str; 4] = ["crates/", "docs/", "scripts/", "tests/"];

/// The paths in backticks or links of `page` that do not exist. Placeholders such as `<name>` are ignored.
pub(crate) fn missing_paths(page: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let words = page.split(['`', '(', ')', ' ', '\n', '#']).map(|word| word.trim_end_matches([',', '.', ':']));
    let is_path =
        |word: &&str| FOLDERS.iter().any(|folder| word.starts_with(folder)) && !word.contains(['<', '*', '{']);
    words.filter(is_path).filter(|path| !exists(path)).map(|path| format!("{path} does not exist")).collect()
}

/// `run` of `` `Type::run` ``.
fn function_name(cell: &str) -> &str {
    let name = cell.trim_matches('`');
    name.rsplit_once("::").map_or(name, |(_, function)| function)
}

#[cfg(test)]
mod samples {
    use super::*;

    #[test]
    fn a_path_that_does_not_exist_is_found() {
        let page = "See `crates/a.rs`, [b](docs/b.md#c) and `crates/<name>/`.";
        assert_eq!(missing_paths(page, |path| path == "crates/a.rs"), ["docs/b.md does not exist"]);
        assert_eq!(missing_paths(page, |_| true), [""; 0]);
    }

    const PAGE: &str =
        "| step | file | functions |\n|---|---|---|\n| It starts. | `crates/a.rs` | `start`, `Type::run` |";

    #[test]
    fn a_walk_along_existing_functions_is_accepted() {
        assert_eq!(violations(PAGE, |_| Some("fn start() {} async fn run<T>(t: T) {}".to_owned())), [""; 0]);
    }

    #[test]
    fn a_missing_function_a_missing_file_and_a_long_walk_are_found() {
        assert_eq!(violations(PAGE, |_| Some("fn start() {}".to_owned())).len(), 1);
        assert!(!violations(PAGE, |_| None).is_empty());
        assert!(!violations("no table", |_| None).is_empty());
        let long: String = (0..50).map(|n| format!("| a | `crates/{n}.rs` | `start` |\n")).collect();
        assert_eq!(violations(&long, |_| Some("fn start() {}".to_owned())).len(), 1);
    }
}
