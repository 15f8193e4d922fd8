//! Limits on the size of structs, functions and test files.

/// A larger struct is split into parts.
const FIELDS_MAX: usize = 12;
/// Structs that are larger, by path and name. They await a split; none is added.
pub(crate) const LARGE_STRUCTS: [(&str, &str); 14] = [
    ("crates/hub/src/dead_letters/store.rs", "DeadLetter"),
    ("crates/hub/src/deliveries/recipient.rs", "Recipient"),
    ("crates/hub/src/dispatch/mod.rs", "Dispatcher"),
    ("crates/hub/src/dispatch/subscriber_queue.rs", "SubscriberQueue"),
    ("crates/hub/src/event_types/schema.rs", "Node"),
    ("crates/hub/src/fanout/mod.rs", "FanOut"),
    ("crates/hub/src/lib.rs", "Hub"),
    ("crates/joins/src/domain.rs", "HistoryEntry"),
    ("crates/notify/src/domain.rs", "ClaimedMail"),
    ("crates/notify/src/domain.rs", "NewMail"),
    ("crates/notify/src/store.rs", "MailRecord"),
    ("crates/pillarbox/src/consumers/outcomes.rs", "Outcomes"),
    ("crates/pillarbox/src/consumers/shard_worker.rs", "ShardWorker"),
    ("crates/service/src/lib.rs", "ServiceContext"),
];
/// A longer function is split into steps.
const LINES_OF_A_FUNCTION_MAX: usize = 60;
/// A longer test file is split by topic.
const LINES_OF_A_TEST_FILE_MAX: usize = 400;

/// A type with one of these derives mirrors a format, whose number of fields is not a matter of style.
const WIRE_DERIVES: [&str; 3] = ["Serialize", "Deserialize", "ToSchema"];

/// The structs with too many fields, except settings and wire types, and the exceptions that are no longer needed.
pub(crate) fn large_structs(path: &str, text: &str) -> Vec<String> {
    let found = structs_above(FIELDS_MAX, path, text);
    let is_exception = |name: &str| LARGE_STRUCTS.contains(&(path, name));
    let exceptions = LARGE_STRUCTS.iter().filter(|(file, _)| *file == path);
    let unneeded = exceptions.filter(|(_, name)| found.iter().all(|(large, _)| large != name));
    let unneeded = unneeded.map(|(_, name)| format!("struct `{name}` is not an exception any more"));
    let large = found.iter().filter(|(name, _)| !is_exception(name));
    let large = large.map(|(name, fields)| format!("struct `{name}` has {fields} fields (at most {FIELDS_MAX})"));
    large.chain(unneeded).collect()
}

/// The structs with more than `max` fields, and how many they have.
fn structs_above(max: usize, path: &str, text: &str) -> Vec<(String, usize)> {
    if path.contains("settings") {
        return Vec::new();
    }
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = struct_with_fields(line) else { continue };
        let is_wire = attributes_before(&lines, at).any(|line| WIRE_DERIVES.iter().any(|derive| line.contains(derive)));
        let fields = block(&lines, at).iter().filter(|field| is_field(line, field)).count();
        if fields > max && !is_wire && !name.ends_with("Settings") {
            found.push((name.to_owned(), fields));
        }
    }
    found
}

/// The functions with too many lines. Tests are exempt: a test tells one story.
pub(crate) fn long_functions(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let lines: Vec<&str> = text.lines().collect();
    let functions = lines.iter().enumerate().filter_map(|(at, line)| Some((at, function_name(line)?)));
    let too_long = functions.filter_map(|(at, name)| {
        let length = block(&lines, at).len() + 2;
        let is_long = length > LINES_OF_A_FUNCTION_MAX;
        is_long.then(|| format!("fn `{name}` has {length} lines (at most {LINES_OF_A_FUNCTION_MAX})"))
    });
    too_long.collect()
}

pub(crate) fn long_test_files(text: &str) -> Vec<String> {
    let lines = text.lines().count();
    let is_long = lines > LINES_OF_A_TEST_FILE_MAX;
    is_long.then(|| format!("{lines} lines (at most {LINES_OF_A_TEST_FILE_MAX})")).into_iter().collect()
}

/// The name of the struct that a line starts, if the struct has named fields.
fn struct_with_fields(line: &str) -> Option<&str> {
    let rest = without_modifiers(line).strip_prefix("struct ")?;
    line.ends_with('{').then(|| identifier(rest))
}

/// The name of the function that a line starts.
fn function_name(line: &str) -> Option<&str> {
    without_modifiers(line).strip_prefix("fn ").map(identifier)
}

fn without_modifiers(line: &str) -> &str {
    let mut rest = line.trim_start();
    if let Some(public) = rest.strip_prefix("pub") {
        rest = public.strip_prefix('(').and_then(|scope| scope.split_once(')')).map_or(public, |(_, rest)| rest);
        rest = rest.trim_start();
    }
    while let Some(shorter) = ["async ", "const ", "unsafe "].iter().find_map(|modifier| rest.strip_prefix(modifier)) {
        rest = shorter;
    }
    rest
}

fn identifier(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The lines between the line that starts an item and the brace that ends it, as rustfmt lays them out. It is empty for
/// an item on one line and for a declaration without a body.
fn block<'t>(lines: &'t [&'t str], start: usize) -> &'t [&'t str] {
    let brace = format!("{}}}", " ".repeat(indent(lines[start])));
    let rest = &lines[start + 1..];
    let is_outside = |line: &&str| !line.is_empty() && indent(line) <= indent(lines[start]);
    let signature_end = rest.iter().find(|line| is_outside(line)).copied().unwrap_or_default();
    let is_one_line = lines[start].ends_with(['}', ';']);
    if is_one_line || signature_end.ends_with(';') {
        return &[];
    }
    let end = rest.iter().position(|line| *line == brace).unwrap_or(0);
    &rest[..end]
}

fn attributes_before<'t>(lines: &'t [&'t str], at: usize) -> impl Iterator<Item = &'t str> {
    let above = lines[..at].iter().rev().map(|line| line.trim_start());
    above.take_while(|line| !line.is_empty() && !line.ends_with('}') && !line.ends_with(';'))
}

fn is_field(start: &str, line: &str) -> bool {
    let rest = without_modifiers(line).trim_start_matches("r#");
    let name = identifier(rest);
    indent(line) == indent(start) + 4 && !name.is_empty() && rest[name.len()..].starts_with(':')
}

mod samples {
    use super::*;

    fn a_struct(attributes: &str, name: &str, fields: usize) -> String {
        let fields: String = (0..fields).map(|n| format!("    /// A field.\n    pub(crate) f{n}: u8,\n")).collect();
        format!("{attributes}\npub struct {name} {{\n{fields}}}\n")
    }

    fn a_function(start: &str, lines: usize) -> String {
        format!("{start}\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    #[test]
    fn a_large_struct_is_found_unless_it_is_a_wire_type_or_settings() {
        let path = "crates/a/src/state.rs";
        assert_eq!(large_structs(path, &a_struct("#[derive(Debug)]", "State", 12)), [""; 0]);
        assert_eq!(large_structs(path, &a_struct("#[derive(Debug)]", "State", 13)).len(), 1);
        assert_eq!(large_structs(path, &a_struct("#[derive(Debug, Serialize)]", "View", 16)), [""; 0]);
        assert_eq!(large_structs(path, &a_struct("#[derive(\n    Debug,\n    ToSchema\n)]", "View", 16)), [""; 0]);
        assert_eq!(large_structs(path, &a_struct("#[derive(Debug)]", "HubSettings", 16)), [""; 0]);
        assert_eq!(large_structs("crates/a/src/settings.rs", &a_struct("", "All", 16)), [""; 0]);
        let (path, name) = LARGE_STRUCTS[0];
        assert_eq!(large_structs(path, &a_struct("", name, 13)), [""; 0], "an exception");
        assert_eq!(large_structs(path, &a_struct("", name, 12)).len(), 1, "an exception that is not needed");
    }

    #[test]
    fn a_long_function_is_found_unless_it_is_a_test() {
        for start in ["fn f() {", "pub async fn f() {", "pub(crate) const fn f(\n    a: u8,\n) {"] {
            assert_eq!(long_functions(&a_function(start, 40)), [""; 0], "{start}");
            assert_eq!(long_functions(&a_function(start, 61)).len(), 1, "{start}");
        }
        let declared = "trait T {\n    fn f();\n    fn g(\n        a: u8,\n    ) -> u8;\n";
        assert_eq!(long_functions(&format!("{declared}{}}}\n", "    // more\n".repeat(60))), [""; 0]);
        assert_eq!(long_functions(&format!("#[cfg(test)]\nmod tests {{}}\n{}", a_function("fn f() {", 61))), [""; 0]);
    }

    #[test]
    fn a_long_test_file_is_found() {
        assert_eq!(long_test_files(&"\n".repeat(400)), [""; 0]);
        assert_eq!(long_test_files(&"\n".repeat(401)).len(), 1);
    }
}
