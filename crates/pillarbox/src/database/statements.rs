//! Splits SQL into its statements.

use std::iter::Peekable;
use std::str::CharIndices;

/// Splits SQL into its statements, without comments. Text in quotes and bodies between `$tag$` are not split. What is not
/// closed reaches to the end, and PostgreSQL reports it.
pub(super) fn statements(sql: &str) -> Vec<String> {
    let (mut statements, mut current) = (Vec::new(), String::new());
    let mut scanner = Scanner { sql, chars: sql.char_indices().peekable() };
    while let Some(part) = scanner.next_part(current.chars().next_back()) {
        match part {
            Part::Code(text) => current.push_str(text),
            // A comment separates words.
            Part::Comment => current.push(' '),
            Part::End => statements.push(std::mem::take(&mut current)),
        }
    }
    statements.push(current);
    statements.retain(|statement| !statement.trim().is_empty());
    statements
}

enum Part<'a> {
    Code(&'a str),
    Comment,
    /// The end of a statement.
    End,
}

struct Scanner<'a> {
    sql: &'a str,
    chars: Peekable<CharIndices<'a>>,
}

impl<'a> Scanner<'a> {
    /// Returns the next part: a quoted text, a body, a comment, or one other character. `before` is the character before it.
    fn next_part(&mut self, before: Option<char>) -> Option<Part<'a>> {
        let (start, c) = self.chars.next()?;
        let rest = &self.sql[start..];
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
        let length = match c {
            ';' => return Some(Part::End),
            '-' if rest.starts_with("--") => {
                self.skip_to(start + rest.find('\n').unwrap_or(rest.len()));
                return Some(Part::Comment);
            }
            '/' if rest.starts_with("/*") => {
                self.skip_to(start + comment_length(rest));
                return Some(Part::Comment);
            }
            '\'' => quoted_length(rest, '\'', matches!(before, Some('e' | 'E')) && self.is_prefix(start)),
            '"' => quoted_length(rest, '"', false),
            // Within a word, `$` is a part of the word.
            '$' if !before.is_some_and(is_word) => body_length(rest),
            c => c.len_utf8(),
        };
        self.skip_to(start + length);
        Some(Part::Code(&rest[..length]))
    }

    /// Whether the letter before the quote at `start` is the prefix of an escape string, and not the end of a word.
    fn is_prefix(&self, start: usize) -> bool {
        let mut before = self.sql[..start].chars().rev().skip(1);
        !before.next().is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$')
    }

    fn skip_to(&mut self, end: usize) {
        while self.chars.next_if(|(at, _)| *at < end).is_some() {}
    }
}

/// The length of a text in quotes. A doubled quote is a part of it, and so is one after a backslash in an escape string.
fn quoted_length(text: &str, quote: char, has_escapes: bool) -> usize {
    let mut chars = text.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' if has_escapes => drop(chars.next()),
            c if c == quote && chars.next_if(|(_, next)| *next == quote).is_none() => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The length of a body between two equal `$tag$`; 1 if the text does not begin with one.
fn body_length(text: &str) -> usize {
    let is_tag = |tag: &str| {
        let begins_with_digit = tag.starts_with(|c: char| c.is_ascii_digit());
        !begins_with_digit && tag.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    let Some(tag) = text[1..].split_once('$').map(|(tag, _)| tag).filter(|tag| is_tag(tag)) else { return 1 };
    let delimiter = &text[..tag.len() + 2];
    let body = &text[delimiter.len()..];
    body.find(delimiter).map_or(text.len(), |end| delimiter.len() * 2 + end)
}

/// The length of a comment in `/* */`. PostgreSQL nests them.
fn comment_length(text: &str) -> usize {
    let (mut depth, mut at) = (0_u32, 0);
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(sql: &str) -> Vec<String> {
        let words = |one: &String| one.split_whitespace().collect::<Vec<_>>().join(" ");
        statements(sql).iter().map(words).collect()
    }

    #[test]
    fn a_migration_is_split_into_statements() {
        let sql = "-- no-transaction\n-- a; b\ndrop index a; -- now;\ncreate index a\n    on t (x);\n\n\
                   do $$\nbegin\n    analyze t;\nend\n$$;\nselect 1";
        let expected = ["drop index a", "create index a on t (x)", "do $$ begin analyze t; end $$", "select 1"];
        assert_eq!(split(sql), expected);
    }

    #[test]
    fn quotes_tags_and_comments_are_not_split() {
        for (sql, expected) in [
            ("select ';', 'it''s; -- no comment'; b", &["select ';', 'it''s; -- no comment'", "b"][..]),
            (r"select e'a\'; b', E'\\'; c", &[r"select e'a\'; b', E'\\'", "c"]),
            (r"select 'a\'; b", &[r"select 'a\'", "b"]),
            (r"select name'x\'; b", &[r"select name'x\'", "b"]),
            ("create table \"a;\"\"b\" (x int); c", &["create table \"a;\"\"b\" (x int)", "c"]),
            ("do $x$ begin; $$ ; $$ $y$;$y$ end $x$; b", &["do $x$ begin; $$ ; $$ $y$;$y$ end $x$", "b"]),
            ("select '$$'; b; select '$$'", &["select '$$'", "b", "select '$$'"]),
            ("do $$ it's; one -- end\n $$; b", &["do $$ it's; one -- end $$", "b"]),
            ("select a$b$c; d$e", &["select a$b$c", "d$e"]),
            ("select $1; b", &["select $1", "b"]),
            ("a /* ; /* ; */ ' */; b--;'\n;c", &["a", "b", "c"]),
            ("select 'ä;ö'; ü", &["select 'ä;ö'", "ü"]),
            ("select 'open; b", &["select 'open; b"]),
            (";; ;", &[]),
        ] {
            assert_eq!(split(sql), expected, "{sql}");
        }
    }
}
