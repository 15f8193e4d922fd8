//! Extracts the paths that a Rust source uses: imported or written out, under any alias.
//!
//! It reads tokens and no grammar, which is sufficient for code that compiles.

use std::collections::HashMap;

/// Splits a source into words, `::`, arrows and single characters. It drops comments and the content of literals.
pub(crate) fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let starts = |at: usize, with: &str| with.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    let find = |from: usize, end: &str| (from..chars.len()).find(|&at| starts(at, end)).unwrap_or(chars.len());
    let (mut found, mut at) = (Vec::new(), 0);
    while at < chars.len() {
        let hashes = (at + 1..chars.len()).take_while(|&i| chars[i] == '#').count();
        if starts(at, "//") {
            at = find(at, "\n");
        } else if starts(at, "/*") {
            at = find(at, "*/") + 2;
        } else if chars[at] == 'r' && chars.get(at + 1 + hashes) == Some(&'"') {
            let end = format!("\"{}", "#".repeat(hashes));
            at = find(at + 2 + hashes, &end) + end.len();
            found.push("\"\"".to_owned());
        } else if chars[at] == '"' {
            at += 1;
            while at < chars.len() && chars[at] != '"' {
                at += if chars[at] == '\\' { 2 } else { 1 };
            }
            at += 1;
            found.push("\"\"".to_owned());
        } else if chars[at] == '\'' && chars.get(at + 1) == Some(&'\\') {
            at = find(at + 3, "'") + 1;
        } else if chars[at] == '\'' && chars.get(at + 2) == Some(&'\'') {
            at += 3;
        } else if is_word(chars[at]) {
            let word: String = chars[at..].iter().take_while(|c| is_word(**c)).collect();
            at += word.chars().count();
            found.push(word);
        } else if let Some(pair) = ["::", "->", "=>"].into_iter().find(|pair| starts(at, pair)) {
            at += 2;
            found.push(pair.to_owned());
        } else {
            if !chars[at].is_whitespace() {
                found.push(chars[at].to_string());
            }
            at += 1;
        }
    }
    found
}

/// Returns every path that starts at a crate, as `crate::module::name`. It omits paths that start at a local module, type
/// or generic.
pub(crate) fn paths(text: &str) -> Vec<String> {
    let tokens = tokens(text);
    let imports = imports(&tokens);
    let aliases: HashMap<&str, &str> = imports.iter().map(|(alias, path)| (alias.as_str(), path.as_str())).collect();
    let mut found: Vec<String> = imports.iter().map(|(_, path)| path.clone()).collect();
    for at in 0..tokens.len() {
        let before = if at == 0 { "" } else { tokens[at - 1].as_str() };
        let is_root = !["::", ".", "'"].contains(&before) || (before == "::" && !follows_a_name(&tokens, at));
        if !is_root || !is_name(&tokens[at]) || tokens.get(at + 1).is_none_or(|next| next != "::") {
            continue;
        }
        let written = written_path(&tokens[at..]);
        let (root, rest) = written.split_once("::").unwrap_or((&written, ""));
        match aliases.get(root) {
            Some(path) => found.push(format!("{path}::{rest}").trim_end_matches("::").to_owned()),
            // `size_of::<T>`: a function, not a crate.
            None if rest.is_empty() => {}
            None if is_local(&tokens, root) => {}
            None => found.push(written),
        }
    }
    found.sort();
    found.dedup(); // an import is also found as a written path
    found
}

/// Returns the alias and the full path of everything that a `use` or an `extern crate` imports.
fn imports(tokens: &[String]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for at in 0..tokens.len() {
        let tree = match tokens[at].as_str() {
            "use" => at + 1,
            "crate" if at > 0 && tokens[at - 1] == "extern" => at + 1,
            _ => continue,
        };
        // `impl Trait + use<'a>` is not an import.
        if tokens.get(tree).is_some_and(|token| token != "<") {
            import_tree(tokens, tree, "", &mut found);
        }
    }
    found
}

/// Reads one tree up to the `;`, `,` or `}` after it, and returns the index of that token.
fn import_tree(tokens: &[String], mut at: usize, prefix: &str, found: &mut Vec<(String, String)>) -> usize {
    let (mut path, mut alias) = (prefix.to_owned(), None);
    while at < tokens.len() {
        match tokens[at].as_str() {
            ";" | "," | "}" => break,
            "{" => {
                while tokens.get(at).is_some_and(|token| token != "}") {
                    at = import_tree(tokens, at + 1, &path, found);
                }
                return at + 1;
            }
            "as" => {
                alias = tokens.get(at + 1).cloned();
                at += 1;
            }
            "::" => {}
            "self" if !path.is_empty() => {}
            segment if path.is_empty() => path = segment.to_owned(),
            segment => path = format!("{path}::{segment}"),
        }
        at += 1;
    }
    if path != prefix || tokens[at - 1] == "self" || alias.is_some() {
        let name = path.rsplit("::").next().unwrap_or_default().to_owned();
        found.push((alias.unwrap_or(name), path));
    }
    at
}

/// Returns the names from here on that are joined by `::`.
fn written_path(tokens: &[String]) -> String {
    let names = tokens.chunks(2).take_while(|pair| is_name(&pair[0]));
    let joined = names.scan(true, |more, pair| {
        let name = more.then(|| pair[0].clone());
        *more = pair.get(1).is_some_and(|next| next == "::");
        name
    });
    joined.collect::<Vec<_>>().join("::")
}

/// A leading `::` starts a path; one after a name or a `>` continues a path.
fn follows_a_name(tokens: &[String], at: usize) -> bool {
    at >= 2 && (is_name(&tokens[at - 2]) || tokens[at - 2] == ">")
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Types start with a capital letter, local modules are declared in the file, and primitives belong to no crate.
fn is_local(tokens: &[String], root: &str) -> bool {
    const PRIMITIVES: [&str; 17] = [
        "bool", "char", "f32", "f64", "i8", "i16", "i32", "i64", "i128", "isize", "str", "u8", "u16", "u32", "u64",
        "u128", "usize",
    ];
    root.starts_with(char::is_uppercase)
        || PRIMITIVES.contains(&root)
        || tokens.windows(2).any(|pair| pair[0] == "mod" && pair[1] == root)
}

mod samples {
    use super::*;

    #[test]
    fn paths_are_found_however_they_are_written() {
        for (source, expected) in [
            ("use a::b;", "a::b"),
            ("pub use a::b;", "a::b"),
            ("pub(crate) use ::a::b as c;", "a::b"),
            ("use {x::y, a::{c, b::{self, d}}};", "a::b"),
            ("use a::{b::*};", "a::b::*"),
            ("extern crate a;", "a"),
            ("fn f() { a::b::c(1) }", "a::b::c"),
            ("fn f() -> ::a::b { x }", "a::b"),
            ("use a as z; fn f() { z::b() }", "a::b"),
            ("use a::{self as z}; fn f() { z::b() }", "a::b"),
            ("use a::B; fn f() { B::now() }", "a::B::now"),
            ("#[derive(Debug, a::B)] struct S;", "a::B"),
            ("fn f() { let x = '\"'; a::b!(\"\") }", "a::b"),
            ("fn f<'a>(x: &'a str) { let y = r#\"\"//\"#; a::b() }", "a::b"),
        ] {
            assert!(paths(source).iter().any(|path| path == expected), "{source}: {:?}", paths(source));
        }
    }

    #[test]
    fn other_paths_are_not_found() {
        for source in [
            "// a::b",
            "/* a::b */",
            "fn f() { \"a::b\" }",
            "fn f() { r#\"a::b\"# }",
            "fn f() { x.iter().collect::<Vec<_>>() }",
            "fn f() { size_of::<u8>() + u32::MAX + Own::a::b }",
            "mod m {} fn f() { m::g() }",
            "fn f() { <T as Own>::a::b }",
        ] {
            assert_eq!(paths(source), [""; 0], "{source}");
        }
    }
}
