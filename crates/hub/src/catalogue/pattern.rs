//! Regular expressions of schemas: the part of ECMA-262 that means the same in every engine, translated for the two engines
//! that apply it, Rust's and PostgreSQL's.
//!
//! Accepted are literals, `.`, classes such as `[a-z0-9_-]`, `\d \w \s` and their negations, groups, alternatives, anchors, and
//! the quantifiers `* + ? {n} {n,} {n,m}`. What the engines interpret differently, or not at all, is refused: look-around,
//! back-references, word boundaries, lazy quantifiers, named groups and Unicode properties. Both translations list the
//! characters of every class, because `\w` or `.` depend on the engine and its locale.

use std::fmt::Write;

/// Characters of a pattern.
const CHARS_MAX: usize = 500;
/// Atoms of a pattern, with the repetitions written out: both engines compile that many states.
const ATOMS_MAX: usize = 1_000;
/// The largest number of a quantifier that PostgreSQL accepts.
const REPEAT_MAX: usize = 255;
const GROUPS_DEEP_MAX: usize = 10;

/// What `\s` matches in ECMA-262.
const SPACES: [(u32, u32); 10] = [
    (0x09, 0x0d),
    (0x20, 0x20),
    (0xa0, 0xa0),
    (0x1680, 0x1680),
    (0x2000, 0x200a),
    (0x2028, 0x2029),
    (0x202f, 0x202f),
    (0x205f, 0x205f),
    (0x3000, 0x3000),
    (0xfeff, 0xfeff),
];
const DIGITS: [(u32, u32); 1] = [(0x30, 0x39)];
const WORD: [(u32, u32); 4] = [(0x30, 0x39), (0x41, 0x5a), (0x5f, 0x5f), (0x61, 0x7a)];
/// What `.` does not match in ECMA-262.
const LINE_ENDS: [(u32, u32); 3] = [(0x0a, 0x0a), (0x0d, 0x0d), (0x2028, 0x2029)];

/// A pattern in the syntax of both engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub(crate) rust: String,
    pub(crate) sql: String,
    /// Characters and classes, with repetitions written out.
    pub(crate) atoms: usize,
}

/// Translates a pattern. Fails with what is accepted.
pub(crate) fn translate(pattern: &str) -> Result<Pattern, String> {
    let chars: Vec<char> = pattern.chars().collect();
    if chars.len() > CHARS_MAX {
        return Err(format!("must be a pattern of at most {CHARS_MAX} characters"));
    }
    // An empty pattern matches every text, but PostgreSQL has no syntax for it in a group.
    if chars.is_empty() {
        return Err("must not be an empty pattern: omit it, every text would match".to_owned());
    }
    let mut parser = Parser { chars: &chars, at: 0, depth: 0, rust: String::new(), sql: String::new() };
    let atoms = parser.alternatives()?;
    match parser.peek() {
        Some(found) => Err(parser.unexpected(found)),
        None if atoms > ATOMS_MAX => Err(too_large()),
        None => Ok(Pattern { rust: parser.rust, sql: parser.sql, atoms }),
    }
}

fn too_large() -> String {
    format!("must be a pattern of at most {ATOMS_MAX} characters and classes, with its repetitions written out")
}

/// A set of characters.
#[derive(Default)]
struct CharSet {
    ranges: Vec<(u32, u32)>,
    is_negated: bool,
}

struct Parser<'p> {
    chars: &'p [char],
    at: usize,
    depth: usize,
    rust: String,
    sql: String,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek();
        self.at += 1;
        next
    }

    fn next_is(&mut self, wanted: char) -> bool {
        let is_next = self.peek() == Some(wanted);
        self.at += usize::from(is_next);
        is_next
    }

    fn emit(&mut self, text: &str) {
        self.rust.push_str(text);
        self.sql.push_str(text);
    }

    fn unexpected(&self, found: char) -> String {
        format!(
            "must be a pattern of literals, classes, groups, alternatives, `^`, `$` and the quantifiers `* + ? {{n,m}}`; `{found}` \
             is not accepted as character {} of it; escape it if it is meant literally",
            self.at + 1
        )
    }

    /// Each of these functions returns the number of atoms, with repetitions written out.
    fn alternatives(&mut self) -> Result<usize, String> {
        let mut atoms = self.sequence()?;
        while self.next_is('|') {
            self.emit("|");
            atoms += self.sequence()?;
        }
        Ok(atoms)
    }

    fn sequence(&mut self) -> Result<usize, String> {
        let (mut atoms, mut is_empty) = (0_usize, true);
        while let Some(next) = self.peek()
            && next != '|'
            && next != ')'
        {
            is_empty = false;
            atoms = atoms.saturating_add(self.piece()?);
            if atoms > ATOMS_MAX {
                return Err(too_large());
            }
        }
        match is_empty {
            true => Err("must not have an empty alternative or group: use `?` for an optional part".to_owned()),
            false => Ok(atoms),
        }
    }

    fn piece(&mut self) -> Result<usize, String> {
        let first = self.peek().unwrap_or_default();
        if first == '^' || first == '$' {
            self.at += 1;
            self.emit(&first.to_string());
            return match self.peek() {
                Some(found @ ('*' | '+' | '?' | '{')) => Err(self.unexpected(found)),
                _ => Ok(1),
            };
        }
        let atoms = self.atom()?;
        let times = self.quantifier()?;
        Ok(atoms.saturating_mul(times))
    }

    fn atom(&mut self) -> Result<usize, String> {
        let first = self.next().unwrap_or_default();
        match first {
            '(' => return self.group(),
            '[' => {
                let set = self.class()?;
                self.emit_set(&set);
            }
            '.' => self.emit_set(&CharSet { ranges: LINE_ENDS.to_vec(), is_negated: true }),
            '\\' => {
                let set = self.escape(false)?;
                self.emit_set(&set);
            }
            ']' | '}' | '{' | '*' | '+' | '?' | '\0' => {
                self.at -= 1;
                return Err(self.unexpected(first));
            }
            literal => self.emit_set(&CharSet::of(literal)),
        }
        Ok(1)
    }

    fn group(&mut self) -> Result<usize, String> {
        self.depth += 1;
        if self.depth > GROUPS_DEEP_MAX {
            return Err(format!("must be a pattern with groups at most {GROUPS_DEEP_MAX} deep"));
        }
        if self.next_is('?') && !self.next_is(':') {
            return Err("must be a pattern without look-around, named groups and options: only `(?:...)` is accepted"
                .to_owned());
        }
        self.emit("(?:");
        let atoms = self.alternatives()?;
        if !self.next_is(')') {
            return Err("must be a pattern in which every group is closed".to_owned());
        }
        self.emit(")");
        self.depth -= 1;
        Ok(atoms)
    }

    /// Returns how often the atom is repeated, at least.
    fn quantifier(&mut self) -> Result<usize, String> {
        let times = match self.peek() {
            Some(simple @ ('*' | '+' | '?')) => {
                self.at += 1;
                self.emit(&simple.to_string());
                1
            }
            Some('{') => {
                self.at += 1;
                self.counted()?
            }
            _ => return Ok(1),
        };
        match self.peek() {
            Some(found @ ('*' | '+' | '?' | '{')) => Err(self.unexpected(found)),
            _ => Ok(times),
        }
    }

    fn counted(&mut self) -> Result<usize, String> {
        let invalid = || {
            format!("must be a pattern whose quantifiers are `{{n}}`, `{{n,}}` or `{{n,m}}`, from 0 to {REPEAT_MAX}")
        };
        let min = self.number().ok_or_else(invalid)?;
        let (text, max) = match self.next_is(',') {
            false => (format!("{{{min}}}"), Some(min)),
            true => match self.number() {
                None => (format!("{{{min},}}"), None),
                Some(max) => (format!("{{{min},{max}}}"), Some(max)),
            },
        };
        let is_valid = min <= REPEAT_MAX && max.is_none_or(|max| (min.max(1)..=REPEAT_MAX).contains(&max));
        if !self.next_is('}') || !is_valid {
            return Err(invalid());
        }
        self.emit(&text);
        Ok(max.unwrap_or(min).max(1))
    }

    fn number(&mut self) -> Option<usize> {
        let start = self.at;
        while self.peek().is_some_and(|digit| digit.is_ascii_digit()) {
            self.at += 1;
        }
        let digits: String = self.chars[start..self.at].iter().collect();
        digits.parse().ok()
    }

    fn class(&mut self) -> Result<CharSet, String> {
        let unclosed = || "must be a pattern in which every class is closed".to_owned();
        let mut set = CharSet { is_negated: self.next_is('^'), ..CharSet::default() };
        loop {
            let first = match self.next().ok_or_else(unclosed)? {
                ']' if set.ranges.is_empty() => return Err("must not have an empty class".to_owned()),
                ']' => return Ok(set.merged()),
                '\\' => self.escape(true)?,
                '[' => {
                    self.at -= 1;
                    return Err(self.unexpected('['));
                }
                literal => CharSet::of(literal),
            };
            let is_range = self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|next| *next != ']');
            if !is_range {
                set.ranges.extend(first.ranges);
                continue;
            }
            self.at += 1;
            let last = match self.next().ok_or_else(unclosed)? {
                '\\' => self.escape(true)?,
                literal => CharSet::of(literal),
            };
            match (first.ranges.as_slice(), last.ranges.as_slice()) {
                ([(from, same)], [(to, same_to)]) if from == same && to == same_to && from <= to => {
                    set.ranges.push((*from, *to))
                }
                _ => return Err("must be a pattern whose ranges go from a lower to a higher character".to_owned()),
            }
        }
    }

    /// The characters of an escape, whose backslash was read.
    fn escape(&mut self, in_class: bool) -> Result<CharSet, String> {
        let escaped = self.next().unwrap_or_default();
        let listed = |ranges: &[(u32, u32)], is_negated| Ok(CharSet { ranges: ranges.to_vec(), is_negated });
        match escaped {
            'd' => listed(&DIGITS, false),
            'w' => listed(&WORD, false),
            's' => listed(&SPACES, false),
            'D' if !in_class => listed(&DIGITS, true),
            'W' if !in_class => listed(&WORD, true),
            'S' if !in_class => listed(&SPACES, true),
            't' => Ok(CharSet::of('\t')),
            'n' => Ok(CharSet::of('\n')),
            'r' => Ok(CharSet::of('\r')),
            'f' => Ok(CharSet::of('\u{c}')),
            'v' => Ok(CharSet::of('\u{b}')),
            'u' => self.code_point(),
            punctuation if punctuation.is_ascii_punctuation() => Ok(CharSet::of(punctuation)),
            _ => {
                self.at -= 1;
                Err(format!(
                    "must not contain the escape `\\{escaped}`: accepted are \\d \\w \\s \\D \\W \\S (the last three outside of a class), \\t \\n \\r \\f \\v, \\uXXXX and escaped punctuation"
                ))
            }
        }
    }

    /// `\uXXXX`, of which the `u` was read.
    fn code_point(&mut self) -> Result<CharSet, String> {
        let digits: String = self.chars.iter().skip(self.at).take(4).collect();
        self.at += 4;
        let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 4);
        let found = code.and_then(char::from_u32).filter(|found| *found != '\0');
        found.map(CharSet::of).ok_or_else(|| "must be a pattern whose \\uXXXX are characters other than NUL".to_owned())
    }

    fn emit_set(&mut self, set: &CharSet) {
        if let ([(from, to)], false) = (set.ranges.as_slice(), set.is_negated)
            && from == to
        {
            push_rust(&mut self.rust, *from);
            push_sql(&mut self.sql, *from);
            return;
        }
        self.emit(if set.is_negated { "[^" } else { "[" });
        for (from, to) in &set.ranges {
            push_rust(&mut self.rust, *from);
            push_sql(&mut self.sql, *from);
            if from < to {
                self.emit("-");
                push_rust(&mut self.rust, *to);
                push_sql(&mut self.sql, *to);
            }
        }
        self.emit("]");
    }
}

impl CharSet {
    fn of(literal: char) -> CharSet {
        CharSet { ranges: vec![(literal.into(), literal.into())], is_negated: false }
    }

    /// Sorts the ranges and joins those that overlap or touch.
    fn merged(mut self) -> CharSet {
        self.ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::new();
        for (from, to) in self.ranges {
            match merged.last_mut() {
                Some(last) if from <= last.1.saturating_add(1) => last.1 = last.1.max(to),
                _ => merged.push((from, to)),
            }
        }
        CharSet { ranges: merged, is_negated: self.is_negated }
    }
}

fn push_rust(text: &mut String, code: u32) {
    let Some(literal) = char::from_u32(code) else { return };
    // Not all punctuation: `\<` is no literal.
    if matches!(literal, '\\' | '.' | '+' | '*' | '?' | '(' | ')' | '|' | '[' | ']' | '{' | '}' | '^' | '$' | '-') {
        text.push('\\');
    }
    text.push(literal);
}

fn push_sql(text: &mut String, code: u32) {
    match char::from_u32(code) {
        Some(plain) if plain.is_ascii_alphanumeric() => text.push(plain),
        _ if code <= 0xffff => {
            let _ = write!(text, "\\u{code:04X}");
        }
        _ => {
            let _ = write!(text, "\\U{code:08X}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_written_out_for_both_engines() {
        let translated = |pattern| translate(pattern).unwrap();
        assert_eq!(translated(r"^\d{2,}$").rust, "^[0-9]{2,}$");
        assert_eq!(translated(r"^ab?$").sql, "^ab?$");
        assert_eq!(translated(r"a-b|(c)").rust, r"a\-b|(?:c)");
        assert_eq!(translated(r"a-b").sql, r"a\u002Db");
        assert_eq!(translated(r"[z\da-c-]").rust, r"[\-0-9a-cz]");
        assert_eq!(translated("[^é]").sql, r"[^\u00E9]");
        assert_eq!(translated("😀").sql, r"\U0001F600");
        assert_eq!(translated(r"\u0041").rust, "A");
    }

    #[test]
    fn what_engines_interpret_differently_is_refused() {
        for refused in [
            "",
            "(",
            ")",
            "[",
            "[]",
            "a**",
            "a*?",
            "^*",
            "a{2",
            "a{3,2}",
            "a{256}",
            "(?=a)",
            "(?<n>a)",
            "(?i)a",
            r"\b",
            r"\1",
            r"\p{L}",
            r"[\D]",
            "[[:alpha:]]",
            "[z-a]",
            "a||b",
            "()",
            "{",
            "}",
            "]",
            "*",
            r"\",
            r"\u00",
            r"\u0000",
            r"\ud800",
            "a\0",
        ] {
            assert!(translate(refused).is_err(), "{refused}");
        }
        assert!(translate(&"a".repeat(501)).is_err());
        assert!(translate("((a{30}){30}){30}").is_err());
        assert!(translate(&format!("{}a{}", "(".repeat(11), ")".repeat(11))).is_err());
    }
}
