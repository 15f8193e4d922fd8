//! Names use the vocabulary of the glossary: no word of the banned list names a file, a Rust item, a table or a column. Retired
//! words are used nowhere: not in fields, variants, error texts, comments and pages either.

/// Words that say too little or have a technical word of their own (docs/glossary.md defines the words to use).
const BANNED: &str = "moment moments place places keep keeps kept keeping look looks looking looked take takes taking \
    taken takeover settle settles settled settling settlement leave leaves leaving forget forgets forgotten forgetting \
    doubt doubts doubtful careful home hold holds held own told tell tells news wish wishes wished desk desks plant \
    plants aside hungry heard hear touched deaths death gone meant said asked ask asking unsent unopened mend mends \
    mended house room rooms door doors mail mails came feed feeds people world folk bury buried obey nudge beat beats \
    rhythm";

/// Words that no source and no page contains. A native speaker names the actor, and says when something happens.
const RETIRED: &str = "nobody whoever somebody meanwhile";
/// Words that name nothing and are in no text of the program.
const RETIRED_IN_CODE: &str = "trouble guilty blamed";

/// A word that is allowed in some files or names, because it is the technical term there.
struct Exception {
    word: &'static str,
    /// The exception applies to paths and to names that contain this text.
    within: &'static str,
    reason: &'static str,
}

const EXCEPTIONS: &[Exception] = &[
    Exception { word: "feed", within: "crates/events/", reason: "the public list of events is called the feed" },
    Exception { word: "feeds", within: "crates/events/", reason: "as above" },
    Exception { word: "feed", within: "tests/it/events", reason: "tests of the events feed" },
    Exception { word: "feeds", within: "tests/it/events", reason: "tests of the events feed" },
    Exception { word: "feed", within: "events_feed", reason: "tests of the events feed" },
    Exception { word: "feed", within: "crates/bench/src/", reason: "the benchmark of the events feed" },
    Exception { word: "mail", within: "crates/notify/", reason: "e-mails, as in the setting `mail` and the route" },
    Exception { word: "mails", within: "crates/notify/", reason: "as above" },
    Exception { word: "mail", within: "_notify.sql", reason: "the table of e-mails" },
    Exception { word: "mail", within: "tests/it/mail", reason: "tests of e-mails" },
    Exception { word: "mails", within: "tests/it/mail", reason: "as above" },
    Exception { word: "mail", within: "tests/it/main.rs", reason: "as above" },
    Exception { word: "hold", within: "retention_hold", reason: "a retention hold is the established term" },
    Exception { word: "gone", within: "crates/hub/", reason: "HTTP status 410 Gone" },
    Exception { word: "gone", within: "tests/it/hub", reason: "HTTP status 410 Gone" },
];

const ITEMS: [&str; 9] = ["fn", "struct", "enum", "trait", "type", "mod", "const", "static", "union"];
const SQL_OBJECTS: [&str; 6] = ["table", "view", "function", "index", "sequence", "trigger"];
const SQL_TYPES: [&str; 12] = [
    "text",
    "bigint",
    "integer",
    "smallint",
    "uuid",
    "timestamptz",
    "boolean",
    "json",
    "jsonb",
    "pg_snapshot",
    "oid",
    "bytea",
];

/// The names in a file that contain a banned word. `path` decides about the kind of file and the exceptions.
pub(crate) fn banned_names(path: &str, text: &str) -> Vec<String> {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = file.split('.').next().unwrap_or(file);
    let mut names = vec![format!("file {stem}")];
    if path.ends_with(".sql") {
        names.extend(text.lines().filter_map(sql_name));
    } else {
        names.extend(rust_names(text));
    }
    let mut violations = Vec::new();
    for name in names {
        let (kind, identifier) = name.split_once(' ').unwrap_or(("", &name));
        for word in words(identifier).filter(|word| is_banned(path, identifier, word)) {
            violations.push(format!("`{kind} {identifier}` uses the banned word `{word}`"));
        }
    }
    violations
}

/// The lines of a source or a page that contain a retired word, wherever: in a name, a text, a comment or a sentence.
pub(crate) fn retired_words(path: &str, text: &str) -> Vec<String> {
    let is_in = |list: &str, word: &str| list.split_whitespace().any(|retired| retired == word);
    let may_contain = |line: &str| {
        let line = line.to_ascii_lowercase();
        [RETIRED, RETIRED_IN_CODE].iter().any(|list| list.split(' ').any(|retired| line.contains(retired)))
    };
    let mut violations = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| may_contain(line)) {
        let code = if path.ends_with(".rs") { without_comment(line) } else { "" };
        let anywhere = words(line).filter(|word| is_in(RETIRED, word));
        let in_code = words(code).filter(|word| is_in(RETIRED_IN_CODE, word));
        violations.extend(anywhere.chain(in_code).map(|word| format!("line {number} uses the retired word `{word}`")));
    }
    violations
}

/// Returns a line without its comment.
fn without_comment(line: &str) -> &str {
    if line.trim_start().starts_with("//") { "" } else { line.split(" // ").next().unwrap_or(line) }
}

fn is_banned(path: &str, name: &str, word: &str) -> bool {
    let applies = |within: &str| path.contains(within) || name.contains(within);
    let is_exception = |exception: &Exception| exception.word == word && applies(exception.within);
    BANNED.split_whitespace().any(|banned| banned == word) && !EXCEPTIONS.iter().any(is_exception)
}

/// The items that a Rust file defines, as `kind name`.
fn rust_names(text: &str) -> Vec<String> {
    let tokens = crate::paths::tokens(text);
    let is_name = |token: &str| token.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let definitions = tokens.windows(2).filter(|pair| ITEMS.contains(&pair[0].as_str()) && is_name(&pair[1]));
    // `const fn` and `*const u8` define nothing at the first word.
    let is_item = |name: &str| !["fn", "unsafe", "async", "mut"].contains(&name);
    definitions.filter(|pair| is_item(&pair[1])).map(|pair| format!("{} {}", pair[0], pair[1])).collect()
}

/// The object or column that a line of a migration defines, as `kind name`.
fn sql_name(line: &str) -> Option<String> {
    let mut tokens = line.split_whitespace().filter(|token| {
        !["or", "replace", "unique", "unlogged", "if", "not", "exists", "concurrently"].contains(token)
    });
    let first = tokens.next()?;
    let second = tokens.next()?;
    let of = |text: &str| text.split(['(', ',', ';']).next().unwrap_or_default().to_owned();
    if first == "create" && SQL_OBJECTS.contains(&second) {
        return Some(format!("{second} {}", of(tokens.next()?)));
    }
    let (column, kind) = match (first, second) {
        ("add", "column") => (tokens.next()?, tokens.next()?),
        ("rename", "column") => return Some(format!("column {}", of(tokens.nth(2)?))),
        _ if line.starts_with("    ") => (first, second),
        _ => return None,
    };
    let kind = kind.trim_end_matches([',', ';']).trim_end_matches("[]");
    let is_identifier = column.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    (is_identifier && SQL_TYPES.contains(&kind)).then(|| format!("column {column}"))
}

/// The lower-case words of a snake_case, CamelCase or dotted name.
fn words(name: &str) -> impl Iterator<Item = String> {
    let mut words = vec![String::new()];
    let mut previous_is_lower = false;
    for c in name.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && previous_is_lower) {
            words.push(String::new());
        }
        if c.is_alphanumeric() {
            words.last_mut().unwrap().extend(c.to_lowercase());
        }
        previous_is_lower = c.is_lowercase() || c.is_numeric();
    }
    words.into_iter().filter(|word| !word.is_empty())
}

mod samples {
    use super::*;

    #[test]
    fn names_of_the_glossary_pass() {
        for (path, text) in [
            ("crates/a/src/log.rs", "pub struct ShardWorker; fn save_position() {} mod household {} // fn keep()"),
            ("crates/a/src/log.rs", "fn f() { \"struct Moment\"; moment.keep(); Place::new() }"),
            ("crates/events/src/feed.rs", "pub struct Feed;"),
            ("tests/it/main.rs", "mod events_feed;"),
            ("migrations/1.sql", "create table pillarbox.log (\n    at timestamptz not null,\n    -- keep\n);"),
        ] {
            assert_eq!(banned_names(path, text), [""; 0], "{path}: {text}");
        }
    }

    #[test]
    fn every_kind_of_banned_name_is_found() {
        for (path, text) in [
            ("crates/a/src/moment.rs", ""),
            ("crates/a/src/log.rs", "pub(crate) async fn take_up() {}"),
            ("crates/a/src/log.rs", "struct LogPlace { x: u8 }"),
            ("crates/a/src/log.rs", "pub enum Kept {}"),
            ("crates/a/src/log.rs", "const LOOK_PAUSE: u8 = 1;"),
            ("crates/a/src/log.rs", "const fn held() {}"),
            ("crates/a/src/log.rs", "mod desk;"),
            ("crates/a/src/log.rs", "trait Keeps {} type Hold = u8; static OWN: u8 = 1;"),
            ("crates/hub/src/queue.rs", "struct Feed;"),
            ("migrations/1.sql", "create table if not exists pillarbox.home (id int);"),
            ("migrations/1.sql", "create or replace function pillarbox.place() returns int"),
            ("migrations/1.sql", "create unique index told on pillarbox.log (at);"),
            ("migrations/1.sql", "create table t (\n    wants text[],\n    leaves text[]\n);"),
            ("migrations/1.sql", "alter table t\n    add column kept bigint;"),
            ("migrations/1.sql", "alter table t\n    rename column a to place;"),
        ] {
            assert!(!banned_names(path, text).is_empty(), "{path}: {text}");
        }
    }

    #[test]
    fn a_retired_word_is_found_wherever_it_is() {
        let path = "crates/a/src/log.rs";
        for text in [
            "struct State {\n    nobody: bool,\n}",
            "enum State {\n    Nobody,\n}",
            "#[error(\"somebody else has changed it\")]",
            "Problem::conflict(\"busy\", \"it was changed meanwhile\")",
            "// Whoever reads this.",
            "/// Nobody reads this.",
            "let guilty = 1;",
            "enum Trouble {}",
            "#[error(\"the message that is blamed\")] // why",
        ] {
            assert_eq!(retired_words(path, text).len(), 1, "{text}");
        }
        assert_eq!(retired_words("docs/a.md", "one\nIf nobody reads it").len(), 1);
        for text in ["// It causes no trouble.", "struct Troubleshooting;", "let bodies = 1; // no trouble"] {
            assert_eq!(retired_words(path, text), [""; 0], "{text}");
        }
        assert_eq!(retired_words("docs/a.md", "Trouble with a queue"), [""; 0]);
    }

    #[test]
    fn an_exception_names_a_banned_word_and_a_reason() {
        for exception in EXCEPTIONS {
            assert!(BANNED.split_whitespace().any(|word| word == exception.word), "{}", exception.word);
            assert!(!exception.reason.is_empty(), "{}", exception.word);
        }
    }
}
