//! A migration names its schema in its first line and uses no other schema. A migration after the first one of its schema only
//! expands, so that the previous program runs on the new schema, unless it says why it may contract.

use sha2::{Digest, Sha256};

/// Objects that are created, altered or dropped by name. An index and a trigger belong to the schema of their table, so
/// for them the table after `on` is checked.
const KINDS: [&str; 8] = ["table", "view", "function", "procedure", "type", "sequence", "domain", "aggregate"];
/// Words that may appear between the verb and the kind of object, or between the kind and the name.
const FILLERS: [&str; 11] =
    ["or", "replace", "unlogged", "materialized", "recursive", "constraint", "unique", "if", "not", "exists", "only"];

/// The first line of a migration that is executed one statement at a time, without a transaction.
const NO_TRANSACTION: &str = "-- no-transaction";

pub(crate) fn outside_its_schema(text: &str) -> Vec<String> {
    let first = text.lines().find(|line| *line != NO_TRANSACTION);
    let Some(declared) = first.and_then(|line| line.strip_prefix("-- schema: ")) else {
        return vec![format!("the first line, or the one after `{NO_TRANSACTION}`, must be `-- schema: NAME`")];
    };
    let words = words(text);
    let mut violations = Vec::new();
    for (at, word) in words.iter().enumerate() {
        let schema = match word.split_once('.') {
            Some((schema, _)) => schema,
            None if at > 0 && words[at - 1] == "schema" => word,
            None => continue,
        };
        if (schema.starts_with("pillarbox") || schema == "public") && schema != declared.trim() {
            violations.push(format!("uses schema `{schema}`, but declares `{declared}`"));
        }
    }
    for statement in words.split(|word| word == ";") {
        violations.extend(named_without_schema(statement).map(|name| format!("`{name}` has no schema")));
    }
    violations
}

/// A migration may contract if a comment says which version stopped using what it removes.
const CONTRACTION: &str = "-- contracts: ";
/// What the previous program might not survive.
const CONTRACTING: [&[&str]; 9] = [
    &["drop", "table"],
    &["drop", "column"],
    &["drop", "view"],
    &["drop", "schema"],
    &["drop", "sequence"],
    &["drop", "default"],
    &["rename", "to"],
    &["rename", "column"],
    &["set", "not", "null"],
];

/// The statements of a migration that change what the previous program uses. `path` is that of its file: the first migration
/// creates its schema, so there is nothing to contract.
pub(crate) fn contractions(path: &str, text: &str) -> Vec<String> {
    if path.contains("/0001_") || text.lines().any(|line| line.starts_with(CONTRACTION)) {
        return Vec::new();
    }
    let words = words(text);
    let found = CONTRACTING.iter().filter(|words_of| words.windows(words_of.len()).any(|window| window == **words_of));
    let advice = "the previous program may need it; expand first, or explain it in a line that starts with";
    found.map(|words| format!("`{}`: {advice} `{CONTRACTION}`", words.join(" "))).collect()
}

/// The indexes that a migration builds while all writes to their table wait: those of a table that it has not created
/// itself, unless they are built concurrently. That is not possible in a transaction.
pub(crate) fn blocking_indexes(text: &str) -> Vec<String> {
    let words = words(text);
    let statements: Vec<&[String]> = words.split(|word| word == ";").collect();
    let table_of = |statement: &[String], verb: &str, kind: &str| {
        let mut rest = statement.iter().map(String::as_str).filter(|word| !FILLERS.contains(word));
        (rest.next() == Some(verb) && rest.next() == Some(kind)).then(|| rest.next().unwrap_or_default().to_owned())
    };
    let created: Vec<String> = statements.iter().filter_map(|one| table_of(one, "create", "table")).collect();
    let mut violations = Vec::new();
    for (at, statement) in statements.iter().enumerate() {
        let has = |wanted: &str| statement.iter().any(|word| word == wanted);
        let builds_constraint = has("unique") || (has("primary") && has("key"));
        if table_of(statement, "alter", "table").is_some_and(|table| builds_constraint && !created.contains(&table)) {
            violations.push(format!("`{}` builds an index while writes wait", statement.join(" ")));
        }
        let Some(index) = table_of(statement, "create", "index") else { continue };
        let mut after_on = statement.iter().map(String::as_str).skip_while(|word| *word != "on").skip(1);
        let table = after_on.find(|word| *word != "only").unwrap_or_default();
        let name = if index == "concurrently" { name_after(statement, "concurrently") } else { index.clone() };
        let is_dropped_before = at > 0
            && statements[at - 1].starts_with(&["drop", "index", "concurrently", "if", "exists"].map(str::to_owned))
            && statements[at - 1].last().is_some_and(|dropped| dropped.ends_with(&format!(".{name}")));
        match (text.starts_with(NO_TRANSACTION), index == "concurrently") {
            _ if created.iter().any(|created| created == table) => {}
            (true, true) if is_dropped_before => {}
            (true, true) => violations.push(format!("`{name}`: drop an index of an interrupted build before it")),
            _ => violations.push(format!(
                "`{name}` is built while writes to `{table}` wait: use `create index concurrently`, in a file that begins \
                 with `{NO_TRANSACTION}`"
            )),
        }
    }
    violations
}

/// The first word after `word` that is no filler.
fn name_after(statement: &[String], word: &str) -> String {
    let mut rest = statement.iter().skip_while(|one| *one != word).skip(1);
    rest.find(|one| !FILLERS.contains(&one.as_str())).cloned().unwrap_or_default()
}

/// The names in a statement that depend on the search path.
fn named_without_schema(statement: &[String]) -> impl Iterator<Item = &str> {
    (0..statement.len()).filter_map(move |at| {
        let rest = || statement[at + 1..].iter().map(String::as_str).filter(|word| !FILLERS.contains(word));
        let name = match statement[at].as_str() {
            "create" | "alter" | "drop" => match rest().next()? {
                kind if KINDS.contains(&kind) => rest().nth(1)?,
                "index" | "trigger" if statement[at] == "create" => rest().skip_while(|word| *word != "on").nth(1)?,
                _ => return None,
            },
            "references" => rest().next()?,
            "execute" if matches!(rest().next(), Some("function" | "procedure")) => rest().nth(1)?,
            _ => return None,
        };
        (!name.contains('.')).then_some(name)
    })
}

/// Returns lower-case words (with their dots) and `;`, without comments and quotes.
fn words(text: &str) -> Vec<String> {
    let uncommented: Vec<&str> = text.lines().map(|line| line.split("--").next().unwrap()).collect();
    let spaced = uncommented.join("\n").to_lowercase().replace('"', "").replace(';', " ; ");
    let is_part = |c: char| c.is_alphanumeric() || "_.;".contains(c);
    spaced.split(|c: char| !is_part(c)).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Released migrations that differ from their SHA-256 in `released`, lines as `sha256sum` prints them, and released migrations
/// that do not exist: databases have applied what was released, and refuse another text.
pub(crate) fn changed_after_release(released: &str, migrations: &[(String, String)]) -> Vec<String> {
    let digest = |text: &str| Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let violation = |(sum, path): (&str, &str)| match migrations.iter().find(|(existing, _)| existing == path) {
        Some((_, text)) if digest(text) == sum => None,
        Some(_) => Some(format!("{path} is released and must not change: write a new migration")),
        None => Some(format!("{path} is released and must not be removed")),
    };
    released.lines().filter_map(|line| line.split_once("  ")).filter_map(violation).collect()
}

/// Migrations that no database gets: a crate's list must name its files in their order, and they are numbered from 1 without a
/// gap. `migrations` and `sources` are the paths and texts of all crates.
pub(crate) fn unlisted(migrations: &[(String, String)], sources: &[(String, String)]) -> Vec<String> {
    let mut folders: Vec<&str> =
        migrations.iter().filter_map(|(path, _)| path.rsplit_once('/')).map(|(folder, _)| folder).collect();
    folders.dedup();
    let mut violations = Vec::new();
    for folder in folders {
        let files: Vec<&str> =
            migrations.iter().filter_map(|(path, _)| path.strip_prefix(&format!("{folder}/"))).collect();
        let gap = (1..).zip(&files).find(|(number, file)| !file.starts_with(&format!("{number:04}_")));
        violations.extend(gap.map(|(number, file)| format!("{folder}/{file}: the next number is {number:04}")));
        let in_crate = format!("{}src/", folder.trim_end_matches("migrations"));
        let texts = sources.iter().filter(|(path, _)| path.starts_with(&in_crate)).map(|(_, text)| text);
        let listed: Vec<&str> = texts.flat_map(|text| included(text)).collect();
        if listed != files {
            violations.push(format!("{folder} has {files:?}, but its crate lists {listed:?}"));
        }
    }
    violations
}

/// The names of the migrations that a source includes.
fn included(source: &str) -> impl Iterator<Item = &str> {
    source
        .split("include_str!(\"")
        .skip(1)
        .filter_map(|rest| rest.split_once('"')?.0.rsplit_once("migrations/"))
        .map(|(_, name)| name)
}

mod samples {
    use super::*;

    fn files(files: &[(&str, &str)]) -> Vec<(String, String)> {
        files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn a_changed_or_removed_migration_is_found() {
        let sum = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";
        let released = format!("{sum}  crates/a/migrations/0001_a.sql\n{sum}  crates/b/migrations/0001_b.sql\n");
        let (a, b) = ("crates/a/migrations/0001_a.sql", "crates/b/migrations/0001_b.sql");
        let found = |migrations: &[(&str, &str)]| changed_after_release(&released, &files(migrations));
        assert_eq!(found(&[(a, "foo"), (b, "foo"), ("crates/b/migrations/0002_c.sql", "bar")]), [""; 0]);
        assert_eq!(found(&[(a, "foo "), (b, "foo")]).len(), 1);
        assert_eq!(found(&[(a, "foo")]).len(), 1);
    }

    #[test]
    fn a_migration_that_its_crate_does_not_list_is_found() {
        let (one, two) = (("crates/a/migrations/0001_a.sql", ""), ("crates/a/migrations/0002_b.sql", ""));
        let listing = |text| files(&[("crates/a/src/lib.rs", text), ("crates/b/src/lib.rs", "")]);
        let both = listing(r#"include_str!("../migrations/0001_a.sql"), include_str!("../migrations/0002_b.sql")"#);
        assert_eq!(unlisted(&files(&[one, two]), &both), [""; 0]);
        assert_eq!(unlisted(&files(&[one]), &both).len(), 1, "it does not exist");
        assert_eq!(unlisted(&files(&[one, two]), &listing(r#"include_str!("../migrations/0001_a.sql")"#)).len(), 1);
        let swapped = r#"include_str!("../migrations/0002_b.sql"), include_str!("../migrations/0001_a.sql")"#;
        assert_eq!(unlisted(&files(&[one, two]), &listing(swapped)).len(), 1);
        assert_eq!(unlisted(&files(&[two]), &listing(r#"include_str!("../migrations/0002_b.sql")"#)).len(), 1, "a gap");
    }

    const FIRST_LINE: &str = "-- schema: pillarbox_a\n";

    #[test]
    fn a_migration_within_its_schema_passes() {
        for good in [
            "create schema pillarbox_a;",
            "create table pillarbox_a.t (id int primary key, other int references pillarbox_a.o, at timestamptz);",
            "create table if not exists pillarbox_a.t (public boolean); -- not public.t",
            "create unique index t_at on pillarbox_a.t (at desc);",
            "create index concurrently if not exists t_at on only pillarbox_a.t (at);",
            "create or replace function pillarbox_a.f() returns trigger language plpgsql as $$ begin return new; end $$;",
            "create trigger t_f after insert or update on pillarbox_a.t for each row execute function pillarbox_a.f();",
            "create type pillarbox_a.status as enum ('draft');",
            "create temporary table scratch (id int);",
            "alter table only pillarbox_a.t add column x int;",
            "insert into pillarbox_a.t select o.id from pillarbox_a.o o;",
        ] {
            assert_eq!(outside_its_schema(&format!("{FIRST_LINE}{good}")), [""; 0], "{good}");
        }
    }

    #[test]
    fn a_migration_that_contracts_needs_a_reason() {
        let add = "alter table pillarbox_a.t add column x int not null default 0;";
        assert_eq!(contractions("crates/a/migrations/0002_a.sql", add), [""; 0]);
        for contraction in [
            "alter table pillarbox_a.t drop column x;",
            "ALTER TABLE pillarbox_a.t RENAME TO pillarbox_a.u;",
            "alter table pillarbox_a.t rename column x to y;",
            "alter table pillarbox_a.t alter column x set not null;",
            "drop table pillarbox_a.t;",
        ] {
            assert!(!contractions("crates/a/migrations/0002_a.sql", contraction).is_empty(), "{contraction}");
            assert_eq!(contractions("crates/a/migrations/0001_a.sql", contraction), [""; 0], "it creates the schema");
            let explained = format!("-- contracts: unused since 0.3\n{contraction}");
            assert_eq!(contractions("crates/a/migrations/0002_a.sql", &explained), [""; 0]);
        }
    }

    #[test]
    fn an_index_of_an_existing_table_is_built_concurrently() {
        let drop = "drop index concurrently if exists pillarbox_a.t_at;";
        let concurrently = "create index concurrently t_at on pillarbox_a.t (at);";
        let own = "create table pillarbox_a.t (at int); create index t_at on pillarbox_a.t (at);";
        let without_transaction = format!("{NO_TRANSACTION}\n{FIRST_LINE}{drop} {concurrently}");
        for good in [own, &without_transaction, "alter table pillarbox_a.t add column x int;"] {
            assert_eq!(blocking_indexes(good), [""; 0], "{good}");
        }
        for bad in [
            "create index t_at on pillarbox_a.t (at);",
            "create unique index if not exists t_at on only pillarbox_a.t (at);",
            "create table pillarbox_a.o (at int); create index t_at on pillarbox_a.t (at);",
            "alter table pillarbox_a.t add column x int unique;",
            "alter table only pillarbox_a.t add constraint t_x primary key (x);",
            concurrently,
            &format!("{NO_TRANSACTION}\n{FIRST_LINE}{concurrently}"),
            &format!("{NO_TRANSACTION}\n{FIRST_LINE}create index t_at on pillarbox_a.t (at);"),
        ] {
            assert_eq!(blocking_indexes(bad).len(), 1, "{bad}");
        }
        assert_eq!(outside_its_schema(&without_transaction), [""; 0]);
    }

    #[test]
    fn a_migration_outside_its_schema_is_refused() {
        assert!(!outside_its_schema("create schema pillarbox_a;").is_empty(), "no first line");
        for bad in [
            "create schema pillarbox_b;",
            "create table pillarbox_b.t (id int);",
            "insert into pillarbox_a.t select id from pillarbox_b.t;",
            "create table public.t (id int);",
            "CREATE TABLE \"public\".t (id int);",
            "create table t (id int);",
            "create unlogged table if not exists t (id int);",
            "create or replace view v as select 1;",
            "create materialized view v as select 1;",
            "create function f() returns int language sql as 'select 1';",
            "create type status as enum ('draft');",
            "create sequence s;",
            "create index t_at on t (at);",
            "create trigger f after insert on t for each row execute function pillarbox_a.f();",
            "create trigger f after insert on pillarbox_a.t for each row execute function f();",
            "create table pillarbox_a.t (id int references o);",
            "alter table t add column x int;",
            "drop table if exists t;",
        ] {
            assert!(!outside_its_schema(&format!("{FIRST_LINE}{bad}")).is_empty(), "{bad}");
        }
    }
}
