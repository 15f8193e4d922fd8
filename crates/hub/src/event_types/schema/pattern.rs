//! Regular expressions of schemas: the part of ECMA-262 that means the same in every engine, and how it is matched.
//!
//! Accepted are literals, `.`, classes such as `[a-z0-9_-]`, `\d \w \s` and their negations, groups, alternatives, anchors, and
//! the quantifiers `* + ? {n} {n,} {n,m}`. What engines interpret differently, or not at all, is refused: look-around,
//! back-references, word boundaries, lazy quantifiers, named groups and Unicode properties. The characters of every class are
//! written out, because `\w` or `.` depend on the engine.
//!
//! A pattern is matched by an automaton whose memory is known, in time that is at most its states times the text, and that is
//! what a match is charged for. The engines that are faster on average keep caches for each pattern and thread, whose memory
//! a tenant with many patterns would multiply.

use std::cell::RefCell;

use regex_automata::nfa::thompson::backtrack::{self, BoundedBacktracker};
use regex_automata::nfa::thompson::pikevm::{self, PikeVM};
use regex_automata::nfa::thompson::{Compiler, Config, NFA, WhichCaptures};
use regex_automata::{Anchored, Input};

use super::steps::{Exhausted, Steps};

/// Characters of a pattern.
const CHARS_MAX: usize = 500;
/// Atoms of a pattern, with the repetitions written out.
const ATOMS_MAX: usize = 1_000;
/// The largest number of a quantifier.
const REPEAT_MAX: usize = 1_000;
const GROUPS_DEEP_MAX: usize = 10;
/// Bytes of a compiled pattern.
const COMPILED_BYTES_MAX: usize = 128 * 1024;
/// Visits of a state at a position of the text that take as long as a step.
const VISITS_PER_STEP: u64 = 4;

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

/// A compiled pattern.
pub(crate) struct Pattern {
    text: String,
    states: u64,
    backtracker: BoundedBacktracker,
    /// For texts that are too long for the other one.
    pike: PikeVM,
    bytes: usize,
}

/// What the engines need during a match. They are kept by thread instead of by pattern.
struct Scratch {
    backtracker: backtrack::Cache,
    pike: pikevm::Cache,
}

thread_local! {
    static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
}

/// Releases what this thread keeps for the next match.
pub(crate) fn release_scratch() {
    SCRATCH.with_borrow_mut(|scratch| *scratch = None);
}

impl Pattern {
    /// Compiles a pattern.
    pub(crate) fn new(text: &str) -> Result<Pattern, InvalidPattern> {
        let config = Config::new().which_captures(WhichCaptures::None).nfa_size_limit(Some(COMPILED_BYTES_MAX));
        let nfa =
            Compiler::new().configure(config).build(&translate(text)?).map_err(|_| InvalidPattern::TooManyBytes)?;
        let (states, bytes) = (nfa.states().len() as u64, nfa.memory_usage());
        let (backtracker, pike) = engines(nfa).map_err(|_| InvalidPattern::TooManyBytes)?;
        let bytes = bytes + text.len() + size_of::<Pattern>();
        Ok(Pattern { text: text.to_owned(), states, backtracker, pike, bytes })
    }

    /// As it was given.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// What a match costs for each character.
    pub(crate) fn cost(&self) -> u64 {
        (self.states / VISITS_PER_STEP).max(1)
    }

    /// The memory that the compiled pattern occupies.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a part of the text matches. Fails without looking at the text if there are too few steps left.
    pub(crate) fn is_match(&self, text: &str, steps: &mut Steps) -> Result<bool, Exhausted> {
        steps.spend(1 + self.states.saturating_mul(text.len() as u64 + 1) / VISITS_PER_STEP)?;
        let input = Input::new(text).anchored(Anchored::No).earliest(true);
        Ok(SCRATCH.with_borrow_mut(|scratch| {
            let Scratch { backtracker, pike } = scratch.get_or_insert_with(|| Scratch {
                backtracker: self.backtracker.create_cache(),
                pike: self.pike.create_cache(),
            });
            if text.len() <= self.backtracker.max_haystack_len() {
                backtracker.reset(&self.backtracker);
                // Fails only if the text is longer than that.
                return self
                    .backtracker
                    .try_search_slots(backtracker, &input, &mut [])
                    .is_ok_and(|found| found.is_some());
            }
            pike.reset(&self.pike);
            self.pike.search_slots(pike, &input, &mut []).is_some()
        }))
    }
}

impl std::fmt::Debug for Pattern {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Pattern").field(&self.text).finish()
    }
}

/// Both engines share the automaton.
fn engines(nfa: NFA) -> Result<(BoundedBacktracker, PikeVM), Box<dyn std::error::Error>> {
    Ok((BoundedBacktracker::new_from_nfa(nfa.clone())?, PikeVM::new_from_nfa(nfa)?))
}

/// Why a pattern is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvalidPattern {
    #[error(
        "must be a pattern that needs at most {COMPILED_BYTES_MAX} bytes when it is compiled: use fewer repetitions of classes \
         such as `\\W`, `.` or `[^a]`, which contain characters beyond ASCII"
    )]
    TooManyBytes,
    #[error("must be a pattern of at most {CHARS_MAX} characters")]
    TooLong,
    #[error("must be a pattern of at most {ATOMS_MAX} characters and classes, with its repetitions written out")]
    TooManyAtoms,
    /// `at`: the number of the character, from 1.
    #[error(
        "must be a pattern of literals, classes, groups, alternatives, `^`, `$` and the quantifiers `* + ? {{n,m}}`; `{found}` is \
         not accepted as character {at} of it; escape it if it is meant literally"
    )]
    Unexpected { found: char, at: usize },
    #[error("must not have an empty alternative or group: use `?` for an optional part")]
    EmptyPart,
    #[error("must be a pattern with groups at most {GROUPS_DEEP_MAX} deep")]
    TooDeep,
    #[error("must be a pattern without look-around, named groups and options: only `(?:...)` is accepted")]
    SpecialGroup,
    #[error("must be a pattern in which every group is closed")]
    OpenGroup,
    #[error("must be a pattern whose quantifiers are `{{n}}`, `{{n,}}` or `{{n,m}}`, from 0 to {REPEAT_MAX}")]
    Quantifier,
    #[error("must be a pattern in which every class is closed")]
    OpenClass,
    #[error("must not have an empty class")]
    EmptyClass,
    #[error("must be a pattern whose ranges go from a lower to a higher character")]
    Range,
    #[error(
        "must not contain the escape `\\{0}`: accepted are \\d \\w \\s \\D \\W \\S (the last three outside of a class), \\t \\n \\r \\f \\v, \\uXXXX and escaped punctuation"
    )]
    Escape(char),
    #[error("must be a pattern whose \\uXXXX are characters other than NUL")]
    CodePoint,
}

/// A pattern in the syntax of the engines.
fn translate(pattern: &str) -> Result<String, InvalidPattern> {
    let chars: Vec<char> = pattern.chars().collect();
    if chars.len() > CHARS_MAX {
        return Err(InvalidPattern::TooLong);
    }
    let mut parser = Parser { chars: &chars, at: 0, depth: 0, translated: String::new() };
    if chars.is_empty() {
        return Ok(String::new());
    }
    let atoms = parser.alternatives()?;
    match parser.peek() {
        Some(found) => Err(parser.unexpected(found)),
        None if atoms > ATOMS_MAX => Err(InvalidPattern::TooManyAtoms),
        None => Ok(parser.translated),
    }
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
    translated: String,
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
        self.translated.push_str(text);
    }

    fn unexpected(&self, found: char) -> InvalidPattern {
        InvalidPattern::Unexpected { found, at: self.at + 1 }
    }

    /// Each of these functions returns the number of atoms, with repetitions written out.
    fn alternatives(&mut self) -> Result<usize, InvalidPattern> {
        let mut atoms = self.sequence()?;
        while self.next_is('|') {
            self.emit("|");
            atoms += self.sequence()?;
        }
        Ok(atoms)
    }

    fn sequence(&mut self) -> Result<usize, InvalidPattern> {
        let (mut atoms, mut is_empty) = (0_usize, true);
        while let Some(next) = self.peek()
            && next != '|'
            && next != ')'
        {
            is_empty = false;
            atoms = atoms.saturating_add(self.piece()?);
            if atoms > ATOMS_MAX {
                return Err(InvalidPattern::TooManyAtoms);
            }
        }
        if is_empty { Err(InvalidPattern::EmptyPart) } else { Ok(atoms) }
    }

    fn piece(&mut self) -> Result<usize, InvalidPattern> {
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

    fn atom(&mut self) -> Result<usize, InvalidPattern> {
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

    fn group(&mut self) -> Result<usize, InvalidPattern> {
        self.depth += 1;
        if self.depth > GROUPS_DEEP_MAX {
            return Err(InvalidPattern::TooDeep);
        }
        if self.next_is('?') && !self.next_is(':') {
            return Err(InvalidPattern::SpecialGroup);
        }
        self.emit("(?:");
        let atoms = self.alternatives()?;
        if !self.next_is(')') {
            return Err(InvalidPattern::OpenGroup);
        }
        self.emit(")");
        self.depth -= 1;
        Ok(atoms)
    }

    /// Returns how often the atom is repeated, at least.
    fn quantifier(&mut self) -> Result<usize, InvalidPattern> {
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

    fn counted(&mut self) -> Result<usize, InvalidPattern> {
        let min = self.number().ok_or(InvalidPattern::Quantifier)?;
        let (text, max) = if !self.next_is(',') {
            (format!("{{{min}}}"), Some(min))
        } else if let Some(max) = self.number() {
            (format!("{{{min},{max}}}"), Some(max))
        } else {
            (format!("{{{min},}}"), None)
        };
        let is_valid = min <= REPEAT_MAX && max.is_none_or(|max| (min..=REPEAT_MAX).contains(&max));
        if !self.next_is('}') || !is_valid {
            return Err(InvalidPattern::Quantifier);
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

    fn class(&mut self) -> Result<CharSet, InvalidPattern> {
        let mut set = CharSet { is_negated: self.next_is('^'), ..CharSet::default() };
        loop {
            let first = match self.next().ok_or(InvalidPattern::OpenClass)? {
                ']' if set.ranges.is_empty() => return Err(InvalidPattern::EmptyClass),
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
            let last = match self.next().ok_or(InvalidPattern::OpenClass)? {
                '\\' => self.escape(true)?,
                literal => CharSet::of(literal),
            };
            match (first.ranges.as_slice(), last.ranges.as_slice()) {
                ([(from, same)], [(to, same_to)]) if from == same && to == same_to && from <= to => {
                    set.ranges.push((*from, *to))
                }
                _ => return Err(InvalidPattern::Range),
            }
        }
    }

    /// The characters of an escape, whose backslash was read.
    fn escape(&mut self, in_class: bool) -> Result<CharSet, InvalidPattern> {
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
                Err(InvalidPattern::Escape(escaped))
            }
        }
    }

    /// `\uXXXX`, of which the `u` was read.
    fn code_point(&mut self) -> Result<CharSet, InvalidPattern> {
        let digits: String = self.chars.iter().skip(self.at).take(4).collect();
        self.at += 4;
        let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 4);
        let found = code.and_then(char::from_u32).filter(|found| *found != '\0');
        found.map(CharSet::of).ok_or(InvalidPattern::CodePoint)
    }

    fn emit_set(&mut self, set: &CharSet) {
        if let ([(from, to)], false) = (set.ranges.as_slice(), set.is_negated)
            && from == to
        {
            return push_literal(&mut self.translated, *from);
        }
        self.emit(if set.is_negated { "[^" } else { "[" });
        for (from, to) in &set.ranges {
            push_literal(&mut self.translated, *from);
            if from < to {
                self.emit("-");
                push_literal(&mut self.translated, *to);
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

fn push_literal(text: &mut String, code: u32) {
    let Some(literal) = char::from_u32(code) else { return };
    // Not all punctuation: `\<` is not a literal. The last three are operators between two of them within a class.
    if matches!(
        literal,
        '\\' | '.' | '+' | '*' | '?' | '(' | ')' | '|' | '[' | ']' | '{' | '}' | '^' | '$' | '-' | '&' | '~' | '#'
    ) {
        text.push('\\');
    }
    text.push(literal);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_match(pattern: &str, text: &str) -> bool {
        Pattern::new(pattern).unwrap().is_match(text, &mut Steps::new(1_000_000)).unwrap()
    }

    #[test]
    fn classes_are_written_out() {
        let translated = |pattern| translate(pattern).unwrap();
        assert_eq!(translated(r"^\d{2,}$"), "^[0-9]{2,}$");
        assert_eq!(translated(r"a-b|(c)"), r"a\-b|(?:c)");
        assert_eq!(translated(r"[z\da-c-]"), r"[\-0-9a-cz]");
        assert_eq!(translated(r"\u0041"), "A");
    }

    #[test]
    fn texts_are_matched_as_in_ecma_262() {
        for (pattern, text, expected) in [
            ("^a", "ba", false),
            ("b$", "b\n", false),
            ("", "anything", true),
            ("^.$", "\u{2028}", false),
            ("^.{2}$", "é😀", true),
            (r"^\w+$", "é", false),
            (r"^\W$", "é", true),
            (r"^\s$", "\u{feff}", true),
            (r"^\d$", "٣", false),
            ("^[a&&b]+$", "a&b", true),
            ("^(?:ab|c){2}$", "abc", true),
            ("[^a]", "aaa", false),
            ("^a{0}b$", "b", true),
            ("^a{0}b$", "ab", false),
        ] {
            assert_eq!(is_match(pattern, text), expected, "{pattern} {text}");
        }
        let long = "b".repeat(200_000);
        assert!(is_match("b+$", &long) && !is_match("a", &long), "too long for the first engine");
        assert!(is_match("^x", "x"), "each pattern resets what the previous one has left");
    }

    #[test]
    fn a_match_is_charged_by_the_states_of_the_pattern_and_the_length_of_the_text() {
        let (small, large) = (Pattern::new("a").unwrap(), Pattern::new(r"\w{250}").unwrap());
        assert!(large.cost() > 20 * small.cost());
        assert!(large.bytes() < COMPILED_BYTES_MAX * 2);
        let matched = |length| large.is_match(&"a".repeat(length), &mut Steps::new(large.cost() * 900));
        assert!(matched(1_000).is_err());
        assert!(matched(800).unwrap());
    }

    #[test]
    fn a_pattern_that_needs_much_memory_is_refused() {
        let error = Pattern::new(r"\W{1000}").unwrap_err().to_string();
        assert!(error.contains("bytes when it is compiled"), "{error}");
    }

    #[test]
    fn what_engines_interpret_differently_is_refused() {
        for refused in [
            "(",
            ")",
            "[",
            "[]",
            "a**",
            "a*?",
            "^*",
            "a{2",
            "a{3,2}",
            "a{1001}",
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
