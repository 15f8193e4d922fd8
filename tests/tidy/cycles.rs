//! The top-level modules of a crate do not depend on each other in a circle.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::paths::paths;

/// The cycles among the top-level modules of one crate: one for each group of modules that depend on each other. `files` are its
/// sources, with paths below its `src`. The root of the crate is not a module: it may name all of them, and they may name its
/// items; a name that it re-exports counts as that of the module which defines it.
pub(crate) fn cycles(files: &[(String, String)]) -> Vec<String> {
    let files: Vec<(Vec<&str>, &str)> = files.iter().map(|(path, text)| (modules_of(path), text.as_str())).collect();
    let modules: BTreeSet<&str> = files.iter().filter_map(|(path, _)| path.first().copied()).collect();
    let root = files.iter().filter(|(path, _)| path.is_empty()).flat_map(|(_, text)| paths(text));
    let exported: BTreeMap<String, String> = root
        .filter_map(|path| {
            let names: Vec<&str> = path.split("::").skip_while(|name| matches!(*name, "crate" | "self")).collect();
            let (module, name) = (names.first()?, names.last()?);
            (names.len() > 1 && modules.contains(module)).then(|| (name.to_string(), module.to_string()))
        })
        .collect();
    let mut uses: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in &files {
        let Some(module) = path.first() else { continue };
        let names = paths(without_tests(text)).into_iter().filter_map(|used| name_in_root(&used, path.len()));
        let used = names.filter_map(|name| match modules.contains(name.as_str()) {
            true => Some(name),
            false => exported.get(&name).cloned(),
        });
        uses.entry(module).or_default().extend(used.filter(|used| used != module));
    }
    let (mut found, mut reported) = (Vec::new(), BTreeSet::new());
    for module in modules {
        let Some(cycle) = shortest_cycle(&uses, module) else { continue };
        if cycle.iter().all(|module| !reported.contains(module)) {
            found.push(format!("{} -> {module}", cycle.join(" -> ")));
        }
        reported.extend(cycle);
    }
    found
}

/// The path of a module in its crate. Empty for the root, and for a program beside the library.
fn modules_of(path: &str) -> Vec<&str> {
    let path = path.trim_end_matches(".rs").trim_end_matches("/mod");
    match path {
        "lib" | "main" => Vec::new(),
        _ if path.starts_with("bin/") => Vec::new(),
        _ => path.split('/').collect(),
    }
}

fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text)
}

/// The name of an item or module in the root that a path begins with, if it begins there. `depth` is that of the module with the
/// path.
fn name_in_root(path: &str, depth: usize) -> Option<String> {
    let names: Vec<&str> = path.split("::").collect();
    let ups = names.iter().take_while(|name| **name == "super").count();
    let at = if names[0] == "crate" { 1 } else { ups };
    let is_in_root = names[0] == "crate" || (ups > 0 && ups == depth);
    names.get(at).filter(|_| is_in_root).map(|name| name.to_string())
}

/// The modules of a shortest cycle through this one, which is the first. None if there is none.
fn shortest_cycle(uses: &BTreeMap<&str, BTreeSet<String>>, module: &str) -> Option<Vec<String>> {
    let (mut queue, mut seen) = (VecDeque::from([vec![module.to_owned()]]), BTreeSet::new());
    while let Some(way) = queue.pop_front() {
        for next in way.last().and_then(|last| uses.get(last.as_str())).into_iter().flatten() {
            if next == module {
                return Some(way);
            }
            if seen.insert(next.clone()) {
                queue.push_back([way.clone(), vec![next.clone()]].concat());
            }
        }
    }
    None
}

mod samples {
    use super::*;

    fn cycles_of(files: &[(&str, &str)]) -> Vec<String> {
        cycles(&files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect::<Vec<_>>())
    }

    #[test]
    fn modules_in_one_order_pass() {
        let good = [
            ("lib.rs", "mod a; mod b; mod c; pub use crate::c::C; pub struct Hub { c: C }"),
            ("a.rs", "use std::fmt; use crate::Hub; mod c {} use self::c::D;"),
            ("b/mod.rs", "mod inner; use crate::a::A; use super::a::B;"),
            ("b/inner.rs", "use super::X; use super::super::a; // use crate::c::C;"),
            ("c.rs", "use crate::{a::A, b}; fn f() { b::g() }\n#[cfg(test)]\nmod tests { use crate::z; }"),
            ("main.rs", "use crate::c::C;"),
        ];
        assert_eq!(cycles_of(&good), [""; 0]);
    }

    #[test]
    fn a_cycle_is_found_however_it_is_written() {
        for back in [
            "use crate::b::B;",
            "use crate::{x, b as z};",
            "use super::b::B;",
            "fn f() { crate::b::g() }",
            "fn f() { super::b::g() }",
            "use crate::B;",
            "use crate::Renamed;",
            "fn f() { crate::Renamed::new() }",
        ] {
            let root = ("lib.rs", "mod a; mod b; pub use self::b::B; pub(crate) use crate::b::inner::Renamed;");
            assert_eq!(cycles_of(&[root, ("a.rs", back), ("b/mod.rs", "use crate::a::A;")]), ["a -> b -> a"], "{back}");
        }
        let nested = [("a/deep.rs", "use super::super::b::B;"), ("b.rs", "use crate::a;"), ("c.rs", "use crate::a;")];
        assert_eq!(cycles_of(&nested), ["a -> b -> a"]);
        let three = [("a.rs", "use crate::b::B;"), ("b.rs", "use crate::c::C;"), ("c/d.rs", "use crate::a::A;")];
        assert_eq!(cycles_of(&three), ["a -> b -> c -> a"]);
    }
}
